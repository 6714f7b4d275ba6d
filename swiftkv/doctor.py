"""`swiftkv doctor`: the properties of this machine that help or hinder a node, with advice for each."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from swiftkv.machine_memory import allowed_memory_bytes, machine_memory_bytes
from swiftkv.processes import WANTED_OPEN_FILES
from swiftkv.shared_memory import can_have_huge_pages
from swiftkv.sockets import LONGEST_TMPDIR
from swiftkv.system_files import read_system_file
from swiftkv.transport.topology import OLDEST_CAPABILITY, Topology, read_topology
from swiftkv.units import format_size

_OLDEST_KERNEL = (5, 10)  # pidfd_open, memfd seals, pidfd in poll
_LITTLE_DISK_BYTES = 64 << 20
_LITTLE_SHARED_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """One property that was checked; `advice` is empty if nothing needs to be done."""

    about: str
    found: str
    advice: str = ""


def examine(root: Path = Path("/"), makes_huge_pages: bool | None = None) -> Iterator[Finding]:
    """Look at the machine whose `/proc` and `/sys` lie below `root`.

    `makes_huge_pages`: whether engines can have huge pages of shared memory; if `None`, the kernel is asked for one.
    """
    if makes_huge_pages is None:
        makes_huge_pages = can_have_huge_pages()
    yield _kernel()
    yield _instructions()
    yield _cores(root)
    yield _memory(root)
    yield _huge_pages(root, "enabled", "of weights", "madvise")
    yield _huge_pages(root, "shmem_enabled", "of pools", "advise", engines_make_them=makes_huge_pages)
    yield _numa(root)
    yield _open_files()
    yield _temporary_directory()
    topology = read_topology()
    yield shared_memory(root / "dev/shm", len(topology.gpus))
    yield from _gpus(topology)


def _kernel() -> Finding:
    release = platform.release()
    version = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdigit())
    old = version < _OLDEST_KERNEL
    return Finding("kernel", f"{platform.system()} {release}", "needs Linux 5.10 or newer" if old else "")


def _instructions() -> Finding:
    from swiftkv import _cpu

    isa = _cpu.isa()
    slow = "kernels run without AVX-512, which newer processors have" if isa == "avx2" else ""
    return Finding("instruction set", isa, slow)


def _cores(root: Path) -> Finding:
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    found = f"{usable} of {present} may be used"
    if (quota := _quota(root)) is not None and quota < usable:
        advice = f"the control group allows {quota:g} of them; write `threads: {max(1, int(quota))}` for each model"
        return Finding("cores", found, advice)
    return Finding("cores", found)


def _quota(root: Path) -> float | None:
    """Return how many cores the control group allows, `None` for all."""
    words = read_system_file(root / "sys/fs/cgroup/cpu.max").split()
    if len(words) != 2 or words[0] == "max":
        return None
    return int(words[0]) / int(words[1])


def _memory(root: Path) -> Finding:
    total_bytes, allowed_bytes = machine_memory_bytes(), allowed_memory_bytes(root)
    if allowed_bytes < total_bytes:
        found = f"{format_size(allowed_bytes)}, of the machine's {format_size(total_bytes)}"
        return Finding("memory", found, "pools and weights of all models must fit: `swiftkv plan FILE` adds them up")
    return Finding("memory", format_size(total_bytes))


def _huge_pages(root: Path, name: str, of: str, setting: str, *, engines_make_them: bool = False) -> Finding:
    path = Path("sys/kernel/mm/transparent_hugepage") / name
    chosen = _chosen(read_system_file(root / path))
    about, found = f"huge pages {of}", chosen or "unknown"
    if chosen not in ("never", "deny"):
        return Finding(about, found)
    if engines_make_them:
        return Finding(about, f"{found} by itself; engines ask for each")
    return Finding(about, found, f"data in huge pages is read faster: echo {setting} > /{path}")


def _numa(root: Path) -> Finding:
    nodes = len(list((root / "sys/devices/system/node").glob("node[0-9]*")))
    if nodes > 1 and read_system_file(root / "proc/sys/kernel/numa_balancing") == "1":
        advice = "pages move between nodes while engines read them: echo 0 > /proc/sys/kernel/numa_balancing"
        return Finding("memory nodes", f"{nodes}, balanced by the kernel", advice)
    return Finding("memory nodes", str(max(1, nodes)))


def _open_files() -> Finding:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < WANTED_OPEN_FILES:
        advice = f"limits the connections: raise it (ulimit -Hn {WANTED_OPEN_FILES}, LimitNOFILE= of a systemd unit)"
        return Finding("open files", f"{hard:,}", advice)
    return Finding("open files", "unlimited" if hard == resource.RLIM_INFINITY else f"{hard:,}")


def _temporary_directory() -> Finding:
    directory = tempfile.gettempdir()
    free_bytes = shutil.disk_usage(directory).free
    found = f"{directory}, {format_size(free_bytes)} free"
    if free_bytes < _LITTLE_DISK_BYTES:
        return Finding("TMPDIR", found, "engines publish their pools there: make room, or set TMPDIR")
    if len(directory) > LONGEST_TMPDIR:
        return Finding("TMPDIR", found, "too long for the names of sockets: a node uses /tmp instead")
    return Finding("TMPDIR", found)


def shared_memory(directory: Path, num_gpus: int) -> Finding:
    """Return the finding about `/dev/shm`, in which ranks on several GPUs exchange data; pools do not lie in it."""
    try:
        size_bytes = shutil.disk_usage(directory).total
    except OSError:
        size_bytes = 0
    little = num_gpus > 1 and size_bytes < _LITTLE_SHARED_BYTES
    advice = "NCCL needs it for several ranks of a model: --ipc=host or --shm-size=1g for a container" if little else ""
    return Finding("/dev/shm", format_size(size_bytes), advice)


def _gpus(topology: Topology) -> Iterator[Finding]:
    if not topology.gpus:
        yield Finding("GPUs", f"none: {topology.absence or 'no driver'}")
        return
    for index, gpu in enumerate(topology.gpus):
        found = f"{gpu.name}, compute capability {gpu.capability / 10}"
        old = (
            f"the kernels need {OLDEST_CAPABILITY / 10} (Ampere) or more" if gpu.capability < OLDEST_CAPABILITY else ""
        )
        yield Finding(f"cuda:{index}", found, old)
    for a in range(len(topology.gpus)):
        for b in range(a + 1, len(topology.gpus)):
            link = topology.link(a, b)
            slow = {
                None: "lending between them goes through the host",
                "pcie": "lending is slow: there is no NVLink",
                "pcie behind an IOMMU": "lending between them goes through the host; boot with iommu=pt to lend faster",
            }
            yield Finding(f"cuda:{a} to cuda:{b}", link or "no mapping", slow.get(link, ""))
    if topology.is_wsl:
        yield Finding("WSL", "this system", "lending between models on GPUs goes through the host")
    if topology.has_mps:
        yield Finding("MPS", "runs", "lending between GPUs goes through the host under MPS: stop it to lend faster")
    yield _torch()


def _torch() -> Finding:
    import torch

    found = f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}, Python {sys.version.split()[0]}"
    if torch.cuda.is_available():
        return Finding("torch", found)
    return Finding("torch", found, "was built without CUDA, or the driver is too old: make setup TORCH=torch")


def _chosen(setting: str) -> str:
    """Return the word in brackets of a setting such as `always [madvise] never`."""
    return setting.partition("[")[2].partition("]")[0]
