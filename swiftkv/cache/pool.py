"""The pool: the KV bytes of one engine, one flat mapping in block-major layout."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from swiftkv.cache.geometry import GroupRegion, KVGroup, lay_out, pool_bytes_of
from swiftkv.prefault import POPULATE_WRITE, prefault


def region_view(pool: torch.Tensor, region: GroupRegion) -> torch.Tensor:
    """Return a region of the flat pool as uint8 `[num_blocks, num_layers, layer_block_bytes]`."""
    flat = pool[region.base_offset_bytes : region.base_offset_bytes + region.nbytes]
    return flat.view(region.num_blocks, region.group.num_layers, region.group.layer_block_bytes)


class _HostPool(ABC):
    """One flat allocation, with the regions of all KV groups."""

    def __init__(self, groups: Sequence[tuple[KVGroup, int]], name: str = "pool", shares_extents: bool = False) -> None:
        """`groups` are (group, number of blocks), laid out as `lay_out` does.

        Raises `OSError` if the memory cannot be mapped.
        """
        self.regions: tuple[GroupRegion, ...] = lay_out(groups, shares_extents)
        self.nbytes = pool_bytes_of(self.regions)
        mapping = self._map(name)
        with contextlib.suppress(OSError):  # the kernel may have no huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
        self.tensor: torch.Tensor = torch.frombuffer(mapping, dtype=torch.uint8)  # [nbytes], starts as zeros

    @abstractmethod
    def _map(self, name: str) -> mmap.mmap:
        """Return `nbytes` of new memory."""

    @abstractmethod
    def identity(self) -> tuple[int, ...]:
        """Return what another process needs to map the memory."""

    def region_tensor(self, index: int) -> torch.Tensor:
        """Return group `index`'s bytes as uint8 `[num_blocks, num_layers, layer_block_bytes]`, a view."""
        return region_view(self.tensor, self.regions[index])

    def prefault(self) -> threading.Thread:
        """Have the kernel back the pool with memory, from its start on, in a thread that ends with the pool.

        Without huge pages a first write to 256 MiB costs a prefill up to a second; serving need not wait for this.
        """
        return prefault(self, self.tensor.data_ptr(), [(0, self.nbytes)], POPULATE_WRITE)


class Pool(_HostPool):
    """A pool that other processes can map.

    The memory has no name in any file system: another process of the same user maps it by a copy of our file
    descriptor, and the kernel frees it when the last process that maps it ends, however it ends. Its size is sealed,
    because SIGBUS would kill a peer that touched memory beyond a new end.
    """

    def _map(self, name: str) -> mmap.mmap:
        """Map the memory; `name` shows in `/proc/<pid>/maps`."""
        self.fd = os.memfd_create(f"swiftkv-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, self.nbytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return mmap.mmap(self.fd, self.nbytes, mmap.MAP_SHARED)

    def identity(self) -> tuple[int, int, int]:
        """Return our descriptor of the memory, and the `st_dev` and `st_ino` of that: no other memory has these."""
        status = os.fstat(self.fd)
        return self.fd, status.st_dev, status.st_ino


class PrivatePool(_HostPool):
    """A pool that no other process can map.

    Linux gives huge pages to private memory that asks for them, and to shared memory only if an administrator allows
    it. Attention reads long histories faster from them: with small pages, every 4 KiB take a walk through the page
    tables, up to a microsecond in a virtual machine.
    """

    def _map(self, name: str) -> mmap.mmap:
        mapping = mmap.mmap(-1, self.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.madvise(mmap.MADV_DONTFORK)  # while a fork lived, every page that we write would be copied
        return mapping

    def identity(self) -> tuple[()]:
        """Return nothing: the memory is out of reach."""
        return ()
