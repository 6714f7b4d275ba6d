"""The pool: the KV bytes of one engine, one flat shared mapping in block-major layout."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swiftkv.cache.geometry import KVGroup


@dataclass(frozen=True, slots=True)
class GroupRegion:
    """Where one KV group's blocks lie in the pool: `(num_blocks, num_layers, layer block)` from `base_offset_bytes` on."""

    group: KVGroup
    num_blocks: int
    base_offset_bytes: int

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.group.block_bytes


class Pool:
    """One flat allocation that other processes can map, with the regions of all KV groups side by side.

    The memory has no name in any file system: another process of the same user maps it through `/proc/<pid>/fd/<fd>`,
    and the kernel frees it when the last process that maps it ends, however it ends. Pages are zero and take memory
    only once written.
    """

    def __init__(self, groups: Sequence[tuple[KVGroup, int]], name: str = "pool") -> None:
        """`groups` are (group, number of blocks). `name` shows in `/proc/<pid>/maps`.

        Raises `OSError` if the address space cannot be had.
        """
        regions = []
        offset_bytes = 0
        for group, num_blocks in groups:
            assert num_blocks > 0
            regions.append(GroupRegion(group, num_blocks, offset_bytes))
            offset_bytes += num_blocks * group.block_bytes
        self.regions: tuple[GroupRegion, ...] = tuple(regions)
        self.nbytes = offset_bytes
        self.fd = os.memfd_create(f"swiftkv-{name}", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, self.nbytes)
        self._mapping = mmap.mmap(self.fd, self.nbytes, mmap.MAP_SHARED)
        self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self.tensor: torch.Tensor = torch.frombuffer(self._mapping, dtype=torch.uint8)  # [nbytes]

    def region_tensor(self, index: int) -> torch.Tensor:
        """Group `index`'s bytes as uint8 `[num_blocks, num_layers, layer_block_bytes]`, a view."""
        region = self.regions[index]
        flat = self.tensor[region.base_offset_bytes : region.base_offset_bytes + region.nbytes]
        return flat.view(region.num_blocks, region.group.num_layers, region.group.layer_block_bytes)
