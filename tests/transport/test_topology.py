"""Which transport a pair of engines gets, and why; on machines that need not be this one."""

from __future__ import annotations

import pytest

from swiftkv.transport.topology import Gpu, Topology, choose_transport, read_topology, visible_devices

GPUS = tuple(Gpu("NVIDIA H200", f"GPU-{letter}") for letter in "abcd")
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


@pytest.mark.parametrize(("topology", "why"), [(LAPTOP, "Driver Not Loaded"), (MACHINE, "4 GPUs are visible")])
def test_a_gpu_that_is_not_there(topology: Topology, why: str) -> None:
    with pytest.raises(ValueError, match=f"cuda:4 is not there: .*{why}"):
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
