"""The GPUs of this machine as NVML describes them, and the transport between each pair of memories."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from swiftkv.errors import ConfigError
from swiftkv.system_files import read_system_file

TransportKind = Literal["shm", "peer", "p2p"]
Link = Literal["nvlink", "pcie", "pcie behind an IOMMU"]

_MPS_DIRECTORY = "/tmp/nvidia-mps"
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_KERNEL_RELEASE = Path("/proc/sys/kernel/osrelease")

OLDEST_CAPABILITY = 80
"""The least compute capability that the kernels need. GPUs before Ampere have neither bfloat16 products nor
asynchronous copies to shared memory."""

LINK_PROGRAMS = 32
"""The number of programs, of 32 KiB each, that keep a link between two GPUs busy: 1 MiB in flight is NVLink's 400 GB/s
times 2 us. Each takes a multiprocessor from the kernels that compute, until the whole list is copied; more would copy
no faster."""

ONE_GPU_PROGRAMS = 96
"""The number of programs for copies within one GPU, whose memory is faster than any link."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as NVML knows it."""

    name: str
    uuid: str
    capability: int  # 90 for NVIDIA's 9.0


@dataclass(frozen=True, slots=True)
class Topology:
    """The GPUs that CUDA numbers, in its order, and which pairs, lower index first, can map each other's memory."""

    gpus: tuple[Gpu, ...]
    links: Mapping[tuple[int, int], Link]
    absence: str = ""  # why there are no GPUs
    has_mps: bool = False  # whether NVIDIA's multi-process service launches for all processes
    is_wsl: bool = False  # whether this is Linux within Windows

    def link(self, a: int, b: int) -> Link | None:
        return self.links.get((min(a, b), max(a, b)))


class TransportChoice(NamedTuple):
    """The transport between two engines' pools, and the reason for it, as half a sentence."""

    kind: TransportKind
    reason: str
    max_programs: int = LINK_PROGRAMS  # programs that copy at once where kernels copy: with `peer`


def choose_transport(lender_device: str, borrower_device: str, topology: Topology) -> TransportChoice:
    """Choose the transport between two devices, named as in the YAML file: `cpu`, `cuda` or `cuda:N`.

    Raises `ValueError` for a GPU that is not there.
    """
    lender, borrower = _gpu_index(lender_device, topology), _gpu_index(borrower_device, topology)
    if lender is None and borrower is None:
        return TransportChoice("shm", "both pools are in host memory")
    if lender is None or borrower is None:
        return TransportChoice("p2p", "one pool is in host memory, the other on a GPU")
    if topology.has_mps:
        return TransportChoice("p2p", "NVIDIA's MPS runs, under which copies outlive the process that made them")
    if topology.is_wsl:
        return TransportChoice("p2p", "this is WSL, where no process can map another's GPU memory")
    if lender == borrower:
        return TransportChoice("peer", f"both pools are on GPU {lender}", ONE_GPU_PROGRAMS)
    link = topology.link(lender, borrower)
    if link == "nvlink":
        return TransportChoice("peer", f"NVLink between GPU {lender} and GPU {borrower}")
    if link == "pcie":
        return TransportChoice("peer", f"GPU {lender} and GPU {borrower} reach each other through PCIe, without NVLink")
    if link is not None:
        return TransportChoice(
            "p2p",
            f"an IOMMU translates between GPU {lender} and GPU {borrower}, and copies through it may be wrong; with "
            "iommu=pt among the kernel's parameters they can map each other's memory",
        )
    return TransportChoice("p2p", f"GPU {lender} and GPU {borrower} cannot map each other's memory")


TransportSetting = Literal["auto", "shm", "peer", "p2p"]


def node_transports(
    setting: TransportSetting, pairs: Iterable[tuple[str, str]], topology: Topology | None
) -> dict[str, TransportChoice]:
    """Return the transport in each kind of memory that `pairs` are in, `the host` or `GPUs`.

    `pairs` are (lender's device, borrower's device). `topology` may be None if no GPU is among them. Raises
    `ConfigError` if the configured transport does not reach between a pair, or if a GPU does not exist.
    """
    found = {}
    for memory, is_host in (("the host", True), ("GPUs", False)):
        here = [pair for pair in dict.fromkeys(pairs) if (pair[0] == "cpu") == is_host]
        if here:
            try:
                found[memory] = settle_transport(setting, here, topology or Topology((), {}))
            except ValueError as error:
                raise ConfigError(f"node.lending.transport: in the memory of {memory}, {error}; write auto") from None
    return found


def settle_transport(
    setting: TransportSetting, pairs: Sequence[tuple[str, str]], topology: Topology
) -> TransportChoice:
    """Return the one transport that serves all `pairs` of (lender's device, borrower's device).

    An engine borrows over one transport, so `auto` chooses one that serves every pair. Its kernels copy with as many
    programs as the fastest pair needs. All devices must be the host's, or all GPUs.

    Raises `ValueError` if `setting` does not reach between a pair, or if a GPU does not exist.
    """
    choices = [choose_transport(lender, borrower, topology) for lender, borrower in pairs]
    possible = next((choice for choice in choices if choice.kind == "p2p"), choices[0])
    possible = possible._replace(max_programs=max(choice.max_programs for choice in choices))
    if setting in ("auto", possible.kind):
        return possible
    if setting == "p2p":
        return TransportChoice(
            "p2p", f"node.lending.transport says so, but {possible.kind} is possible: {possible.reason}"
        )
    raise ValueError(f"{setting} cannot be used, but {possible.kind} can: {possible.reason}")


def read_topology() -> Topology:
    """Read the topology of this machine without making a CUDA context.

    Without GPUs, a driver or NVML it is empty and says why.
    """
    try:
        import pynvml
    except ImportError:
        return Topology((), {}, "nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Topology((), {}, f"NVML: {error}")
    try:
        handles, gpus = _usable_gpus()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        chosen = visible_devices(visible, [gpu.uuid for gpu in gpus])
        links: dict[tuple[int, int], Link] = {}
        for b, theirs in enumerate(chosen):
            for a, ours in enumerate(chosen[:b]):
                if _can(handles[ours], handles[theirs], pynvml.NVML_P2P_CAPS_INDEX_NVLINK):
                    links[a, b] = "nvlink"
                elif _can(handles[ours], handles[theirs], pynvml.NVML_P2P_CAPS_INDEX_READ) and _can(
                    handles[ours], handles[theirs], pynvml.NVML_P2P_CAPS_INDEX_WRITE
                ):
                    are_translated = _is_translated(handles[ours]) or _is_translated(handles[theirs])
                    links[a, b] = "pcie behind an IOMMU" if are_translated else "pcie"
    except pynvml.NVMLError as error:
        return Topology((), {}, f"NVML: {error}")
    finally:
        pynvml.nvmlShutdown()
    absence = _absence(gpus, chosen, visible)
    return Topology(tuple(gpus[index] for index in chosen), links, absence, uses_mps(os.environ), is_wsl())


def _absence(gpus: Sequence[Gpu], chosen: Sequence[int], visible: str | None) -> str:
    """Return why no GPU is `chosen` by `visible`, the value of CUDA_VISIBLE_DEVICES, if none is."""
    if chosen:
        return ""
    if not gpus:
        return "NVML finds no GPU that can be used"
    if (visible or "").lstrip().startswith("MIG-"):
        return "CUDA_VISIBLE_DEVICES names a part of a GPU (MIG), and only whole ones lend to each other"
    return "CUDA_VISIBLE_DEVICES names no GPU"


def uses_mps(environment: Mapping[str, str]) -> bool:
    """Return whether CUDA would find a control daemon of the multi-process service, because its pipe exists."""
    return os.path.exists(os.path.join(environment.get("CUDA_MPS_PIPE_DIRECTORY", _MPS_DIRECTORY), "control"))


def is_wsl(release: Path = _KERNEL_RELEASE) -> bool:
    """Return whether the kernel is that of Windows Subsystem for Linux, by the file that tells its release."""
    return "microsoft" in read_system_file(release).lower()


def is_translated(bus_id: str, devices: Path = _PCI_DEVICES) -> bool:
    """Return whether an IOMMU translates the addresses of a GPU, which NVML's `bus_id` names.

    NVIDIA does not support copies between GPUs through PCIe then, although the driver says that they can be made.
    """
    name = bus_id.lower()[-len("0000:00:00.0") :]  # NVML's domain has eight digits
    return read_system_file(devices / name / "iommu_group" / "type").startswith("DMA")


def visible_devices(variable: str | None, uuids: list[str]) -> list[int]:
    """Return NVML's indices of the GPUs that CUDA numbers from 0 on, given the value of CUDA_VISIBLE_DEVICES.

    As with CUDA, the list ends at the first entry that names no GPU. GPUs come in NVML's order, which is CUDA's if all
    are of one kind or CUDA_DEVICE_ORDER is PCI_BUS_ID.
    """
    if variable is None:
        return list(range(len(uuids)))
    chosen: list[int] = []
    for entry in variable.split(","):
        name = entry.strip()
        matches = [index for index, uuid in enumerate(uuids) if name and uuid.startswith(name)]
        if name.isdecimal() and int(name) < len(uuids):
            matches = [int(name)]
        if len(matches) != 1 or matches[0] in chosen:
            break
        chosen += matches
    return chosen


def _usable_gpus() -> tuple[list[object], list[Gpu]]:
    """Return NVML's handles and descriptions, without GPUs that are lost or not permitted, as CUDA does."""
    import pynvml

    handles, gpus = [], []
    for index in range(pynvml.nvmlDeviceGetCount()):
        with contextlib.suppress(pynvml.NVMLError_GpuIsLost, pynvml.NVMLError_NoPermission):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            gpus.append(_gpu(handle))
            handles.append(handle)
    return handles, gpus


def _gpu(handle: object) -> Gpu:
    import pynvml

    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    name, uuid = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)
    return Gpu(_text(name), _text(uuid), 10 * major + minor)


def _is_translated(handle: object) -> bool:
    import pynvml

    return is_translated(_text(pynvml.nvmlDeviceGetPciInfo(handle).busId))


def _can(a: object, b: object, capability: int) -> bool:
    import pynvml

    try:
        status: int = pynvml.nvmlDeviceGetP2PStatus(a, b, capability)
    except pynvml.NVMLError:  # the driver does not know, so it cannot be relied on
        return False
    return status == int(pynvml.NVML_P2P_STATUS_OK)


def _gpu_index(device: str, topology: Topology) -> int | None:
    """Return the number of a GPU, or None for host memory."""
    kind, _, number = device.partition(":")
    if kind == "cpu":
        return None
    index = int(number or 0)
    if index >= len(topology.gpus):
        found = topology.absence or f"{len(topology.gpus)} GPUs are visible"
        raise ValueError(f"there is no {device}: {found}")
    return index


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
