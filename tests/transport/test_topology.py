"""Every pair of engines gets the right transport, with the reason; on machines that need not be this one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pynvml
import pytest

from swiftkv.config import parse_config
from swiftkv.devices import too_old
from swiftkv.errors import ConfigError
from swiftkv.transport.topology import (
    Gpu,
    Topology,
    TransportSetting,
    choose_transport,
    is_translated,
    is_wsl,
    node_transports,
    read_topology,
    uses_mps,
    visible_devices,
)

GPUS = tuple(Gpu("NVIDIA H200", f"GPU-{letter}", 90) for letter in "abcd")
MACHINE = Topology(GPUS, {(0, 1): "nvlink", (0, 2): "pcie"})
LAPTOP = Topology((), {}, "NVML: Driver Not Loaded")


@pytest.mark.parametrize(
    ("lender", "borrower", "kind", "reason"),
    [
        ("cpu", "cpu", "shm", "host memory"),
        ("cuda:1", "cuda:1", "peer", "both pools are on GPU 1"),
        ("cuda", "cuda:0", "peer", "both pools are on GPU 0"),
        ("cuda:0", "cuda:1", "peer", "NVLink"),
        ("cuda:1", "cuda:0", "peer", "NVLink"),
        ("cuda:2", "cuda:0", "peer", "PCIe"),
        ("cuda:1", "cuda:2", "p2p", "cannot map"),
        ("cpu", "cuda:0", "p2p", "host memory"),
        ("cuda:0", "cpu", "p2p", "host memory"),
    ],
)
def test_a_pair_gets_the_fastest_that_works(lender: str, borrower: str, kind: str, reason: str) -> None:
    choice = choose_transport(lender, borrower, MACHINE)
    assert choice.kind == kind
    assert reason in choice.reason


def test_host_memory_needs_no_gpu() -> None:
    assert choose_transport("cpu", "cpu", LAPTOP).kind == "shm"


@pytest.mark.parametrize(
    ("setting", "pairs", "kinds"),
    [
        ("auto", [("cpu", "cpu")], {"the host": "shm"}),
        ("auto", [("cuda:1", "cuda:0"), ("cpu", "cpu"), ("cuda:0", "cuda:0")], {"the host": "shm", "GPUs": "peer"}),
        ("auto", [("cuda:1", "cuda:0"), ("cuda:3", "cuda:0")], {"GPUs": "p2p"}),  # an engine has one transport
        ("peer", [("cuda:2", "cuda:0")], {"GPUs": "peer"}),
        ("p2p", [("cuda:1", "cuda:0"), ("cpu", "cpu")], {"the host": "p2p", "GPUs": "p2p"}),
        ("auto", [], {}),
    ],
)
def test_a_node_has_one_transport_for_each_kind_of_memory(
    setting: TransportSetting, pairs: list[tuple[str, str]], kinds: dict[str, str]
) -> None:
    chosen = node_transports(setting, pairs, MACHINE)
    assert {memory: choice.kind for memory, choice in chosen.items()} == kinds


def test_copies_over_a_link_leave_most_multiprocessors_to_those_who_compute() -> None:
    def programs(*pairs: tuple[str, str]) -> int:
        return node_transports("auto", pairs, MACHINE)["GPUs"].max_programs

    assert programs(("cuda:1", "cuda:0")) == programs(("cuda:2", "cuda:0")) == 32
    assert programs(("cuda:1", "cuda:1")) == programs(("cuda:1", "cuda:0"), ("cuda:0", "cuda:0")) == 96


def test_under_mps_nobody_writes_to_another_s_pool(tmp_path: Path) -> None:
    """A client's kernels finish after its death there, when its extents may be home already."""
    assert not uses_mps({"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)})
    (tmp_path / "control").touch()
    assert uses_mps({"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)})
    machine = replace(MACHINE, has_mps=True)
    assert (
        choose_transport("cuda:0", "cuda:0", machine).kind
        == choose_transport("cuda:0", "cuda:1", machine).kind
        == "p2p"
    )
    with pytest.raises(ConfigError, match="MPS"):
        node_transports("peer", [("cuda:1", "cuda:1")], machine)


def test_under_windows_nobody_maps_another_s_pool(tmp_path: Path) -> None:
    release = tmp_path / "osrelease"
    for text, expected in (("6.6.87.2-microsoft-standard-WSL2\n", True), ("6.8.0-45-generic\n", False)):
        release.write_text(text)
        assert is_wsl(release) == expected
    assert not is_wsl(tmp_path / "missing")
    choice = choose_transport("cuda:0", "cuda:0", replace(MACHINE, is_wsl=True))
    assert (choice.kind, "WSL" in choice.reason) == ("p2p", True)


@pytest.mark.parametrize(("type_", "expected"), [("DMA", True), ("DMA-FQ", True), ("identity", False), (None, False)])
def test_pcie_behind_an_iommu_that_translates_is_not_used(type_: str | None, expected: bool, tmp_path: Path) -> None:
    group = tmp_path / "0000:3b:00.0/iommu_group"
    group.mkdir(parents=True)
    if type_ is not None:
        (group / "type").write_text(f"{type_}\n")
    assert is_translated("00000000:3B:00.0", tmp_path) == expected
    choice = choose_transport("cuda:0", "cuda:2", replace(MACHINE, links={(0, 2): "pcie behind an IOMMU"}))
    assert (choice.kind, "iommu=pt" in choice.reason) == ("p2p", True)


def test_gpus_that_the_kernels_are_not_written_for_are_refused() -> None:
    gpus = (Gpu("Tesla T4", "GPU-a", 75), Gpu("NVIDIA A100", "GPU-b", 80), Gpu("NVIDIA H200", "GPU-c", 90))
    models = [
        {"name": "a", "path": "x", "device": "cuda:0"},
        {"name": "b", "path": "x", "device": "cuda:1", "tensor_parallel_size": 2},
        {"name": "c", "path": "x"},
        {"name": "d", "path": "x", "device": "cuda:0", "tensor_parallel_size": 2},
    ]
    mistakes = too_old(parse_config({"models": models}), Topology(gpus, {}))
    assert [mistake.partition(".")[0] for mistake in mistakes] == ["models[0]", "models[3]"]
    assert "cuda:0 (Tesla T4) has compute capability 7.5, and the kernels need 8.0" in mistakes[0]


@pytest.mark.parametrize(
    ("setting", "pair", "why"),
    [
        ("shm", ("cuda:0", "cuda:0"), "memory of GPUs, shm cannot be used, but peer can"),
        ("peer", ("cpu", "cpu"), "memory of the host, peer cannot be used, but shm can"),
        ("peer", ("cuda:1", "cuda:2"), "cannot map each other's memory; write auto"),
        ("auto", ("cuda:0", "cuda:7"), "there is no cuda:7"),
    ],
)
def test_a_transport_that_does_not_reach_is_refused(setting: TransportSetting, pair: tuple[str, str], why: str) -> None:
    with pytest.raises(ConfigError, match=f"node.lending.transport: .*{why}"):
        node_transports(setting, [pair], MACHINE)


@pytest.mark.parametrize(("topology", "why"), [(LAPTOP, "Driver Not Loaded"), (MACHINE, "4 GPUs are visible")])
def test_a_gpu_that_is_not_there(topology: Topology, why: str) -> None:
    with pytest.raises(ValueError, match=f"there is no cuda:4: .*{why}"):
        choose_transport("cuda:4", "cpu", topology)


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2,0", [2, 0]),
        ("GPU-c, 1", [2, 1]),
        ("1,7,0", [1]),
        ("1,1", [1]),
        ("-1", []),
        ("GPU-", []),
    ],
)
def test_cuda_numbers_what_the_environment_leaves(variable: str | None, expected: list[int]) -> None:
    assert visible_devices(variable, [gpu.uuid for gpu in GPUS]) == expected


def test_this_machine_has_a_topology_or_a_reason() -> None:
    topology = read_topology()
    assert bool(topology.gpus) != bool(topology.absence)
    assert all(0 <= a < b < len(topology.gpus) for a, b in topology.links)


def test_a_gpu_that_is_lost_or_not_ours_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of NVML about such a GPU fails, and the others serve."""

    def handle(index: int) -> int:
        if index in (1, 2):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST if index == 1 else pynvml.NVML_ERROR_NO_PERMISSION)
        return index

    answer_as(monkeypatch, count=4, handle=handle)
    topology = read_topology()
    assert [gpu.uuid for gpu in topology.gpus] == ["GPU-0", "GPU-3"]
    assert topology.link(0, 1) == "nvlink"


@pytest.mark.parametrize(
    ("variable", "reason"),
    [("MIG-17", r"a part of a GPU \(MIG\)"), (" MIG-17", r"a part of a GPU \(MIG\)"), ("9", "names no GPU")],
)
def test_a_variable_that_leaves_no_gpu_has_its_reason(
    variable: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_as(monkeypatch, count=1, handle=lambda index: index)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    with pytest.raises(ConfigError, match=reason):
        node_transports("auto", [("cuda:0", "cuda:0")], read_topology())


def answer_as(monkeypatch: pytest.MonkeyPatch, count: int, handle: Callable[[int], int]) -> None:
    """Have NVML tell of so many GPUs, which reach each other through NVLink."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    answers: dict[str, Callable[..., object]] = {
        "Init": lambda: None,
        "Shutdown": lambda: None,
        "DeviceGetCount": lambda: count,
        "DeviceGetHandleByIndex": handle,
        "DeviceGetName": lambda _: "H100",
        "DeviceGetUUID": lambda index: f"GPU-{index}",
        "DeviceGetCudaComputeCapability": lambda _: (9, 0),
        "DeviceGetP2PStatus": lambda *_: pynvml.NVML_P2P_STATUS_OK,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, f"nvml{name}", answer)
