"""The pool: the KV bytes of one engine, one flat shared mapping in block-major layout."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Sequence

import torch

from swiftkv.cache.geometry import GroupRegion, KVGroup, lay_out, pool_bytes_of

_MADV_POPULATE_WRITE = 23  # Linux 5.14; older kernels answer EINVAL
_PREFAULT_SLICE_BYTES = 4 << 20


def region_view(pool: torch.Tensor, region: GroupRegion) -> torch.Tensor:
    """Return a region of the flat pool as uint8 `[num_blocks, num_layers, layer_block_bytes]`."""
    flat = pool[region.base_offset_bytes : region.base_offset_bytes + region.nbytes]
    return flat.view(region.num_blocks, region.group.num_layers, region.group.layer_block_bytes)


class Pool:
    """One flat allocation that other processes can map, with the regions of all KV groups.

    The memory has no name in any file system: another process of the same user maps it by a copy of our file
    descriptor, and the kernel frees it when the last process that maps it ends, however it ends. Its size is sealed,
    because SIGBUS would kill a peer that touched memory beyond a new end.
    """

    def __init__(self, groups: Sequence[tuple[KVGroup, int]], name: str = "pool", shares_extents: bool = False) -> None:
        """`groups` are (group, number of blocks), laid out as `lay_out` does. `name` shows in `/proc/<pid>/maps`.

        Raises `OSError` if the memory cannot be mapped.
        """
        self.regions: tuple[GroupRegion, ...] = lay_out(groups, shares_extents)
        self.nbytes = pool_bytes_of(self.regions)
        self.fd = os.memfd_create(f"swiftkv-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, self.nbytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        mapping = mmap.mmap(self.fd, self.nbytes, mmap.MAP_SHARED)
        with contextlib.suppress(OSError):  # the kernel may have no huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
        self.tensor: torch.Tensor = torch.frombuffer(mapping, dtype=torch.uint8)  # [nbytes], starts as zeros

    def identity(self) -> tuple[int, int, int]:
        """Return our descriptor of the memory, and the `st_dev` and `st_ino` of that: no other memory has these."""
        status = os.fstat(self.fd)
        return self.fd, status.st_dev, status.st_ino

    def region_tensor(self, index: int) -> torch.Tensor:
        """Return group `index`'s bytes as uint8 `[num_blocks, num_layers, layer_block_bytes]`, a view."""
        return region_view(self.tensor, self.regions[index])

    def prefault(self) -> threading.Thread:
        """Have the kernel back the pool with memory, from its start on, in a thread of low priority.

        Without huge pages a first write to 256 MiB costs a prefill up to a second; serving need not wait for this. The
        thread ends with the pool, and before the interpreter ends: otherwise its tensor would abort the process.
        """
        is_over = threading.Event()
        thread = threading.Thread(target=_prefault, args=(self.tensor, is_over), name="prefault", daemon=True)
        thread.start()
        weakref.finalize(self, _end_prefault, thread, is_over)
        return thread


def _end_prefault(thread: threading.Thread, is_over: threading.Event) -> None:
    is_over.set()
    thread.join()


def _prefault(tensor: torch.Tensor, is_over: threading.Event) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # on Linux: of this thread alone
    madvise = ctypes.CDLL(None, use_errno=True).madvise  # mmap.madvise would hold the GIL meanwhile
    for offset in range(0, tensor.numel(), _PREFAULT_SLICE_BYTES):
        if is_over.is_set():
            return
        length = min(_PREFAULT_SLICE_BYTES, tensor.numel() - offset)
        address = ctypes.c_void_p(tensor.data_ptr() + offset)
        if madvise(address, ctypes.c_size_t(length), _MADV_POPULATE_WRITE) != 0:
            return  # the kernel cannot, or has no memory left: then pages come on first write
