"""The pool: the KV bytes of one engine, one flat mapping in block-major layout."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swiftkv.cache.geometry import GroupRegion, KVGroup, lay_out, pool_bytes_of
from swiftkv.cache.host_blocks import HostBlocks, HostChunks, place_beside
from swiftkv.shared_memory import HUGE_PAGE_BYTES, PlacedMemory, fill_ahead, make_memory, map_memories


def region_view(pool: torch.Tensor, region: GroupRegion) -> torch.Tensor:
    """Return a region of the flat pool as uint8 `[num_blocks, num_layers, layer_block_bytes]`."""
    flat = pool[region.base_offset_bytes : region.base_offset_bytes + region.nbytes]
    return flat.view(region.num_blocks, region.group.num_layers, region.group.layer_block_bytes)


@dataclass(frozen=True, slots=True)
class SharedHostMemory:
    """The memory that the engines of a node share below their pools; see `storage.host_medium`."""

    fd: int
    nbytes: int
    chunks: HostChunks


class Pool:
    """One flat allocation of shared memory, with the regions of all KV groups.

    Another process of the same user maps it through a copy of this process's file descriptor.
    """

    def __init__(
        self,
        groups: Sequence[tuple[KVGroup, int]],
        name: str = "pool",
        shares_extents: bool = False,
        host: SharedHostMemory | None = None,
    ) -> None:
        """Map the pool, and `host` behind it where its chunks can be blocks of a group.

        `groups` are (group, number of blocks), laid out as `lay_out` does; `name` shows in `/proc/<pid>/maps`.

        Raises `OSError` if the memory cannot be mapped.
        """
        self.regions: tuple[GroupRegion, ...] = lay_out(groups, shares_extents)
        self.nbytes = pool_bytes_of(self.regions)
        self.fd = make_memory(name, self.nbytes)
        weakref.finalize(self, os.close, self.fd)
        self.host_blocks: HostBlocks | None = None
        """The chunks of host memory as blocks; `None` if there are none that kernels could attend to."""
        self.host_memory: memoryview | None = None
        """The host memory, if it has `host_blocks`: its only mapping in this process."""
        self.host_offset_bytes = 0
        """The offset of the host memory from the first byte of the pool."""
        memories = [PlacedMemory(self.fd, self.nbytes)]
        place = None if host is None else place_beside(self.regions, host.chunks, HUGE_PAGE_BYTES)
        if host is not None and place is not None:
            memories.append(PlacedMemory(host.fd, host.nbytes, place.offset_bytes))
        mapped = map_memories(memories)
        self._mapping = mapped[: self.nbytes]
        self._range = torch.frombuffer(mapped, dtype=torch.uint8)
        self.tensor: torch.Tensor = self._range[: self.nbytes]  # [nbytes], starts as zeros
        if place is not None:
            self.host_blocks, self.host_memory = place.blocks, mapped[place.offset_bytes :]
            self.host_offset_bytes = place.offset_bytes

    def identity(self) -> tuple[int, int, int]:
        """Return our file descriptor of the memory, and its `st_dev` and `st_ino`, which no other memory has."""
        status = os.fstat(self.fd)
        return self.fd, status.st_dev, status.st_ino

    def region_tensor(self, index: int) -> torch.Tensor:
        """Return group `index`'s bytes as uint8 `[num_blocks, num_layers, layer_block_bytes]`, a view."""
        return region_view(self.tensor, self.regions[index])

    def attended_tensor(self, index: int) -> torch.Tensor:
        """Return all that kernels may attend to as group `index`'s layer blocks: flat uint8, a view.

        Behind the region follow the blocks in host memory, if the group has any. Nothing may touch what lies between.
        """
        if self.host_blocks is None or self.host_blocks.group != index:
            return self.region_tensor(index).view(-1)
        region = self.regions[index]
        end = region.base_offset_bytes + self.host_blocks.end * region.group.layer_block_bytes
        return self._range[region.base_offset_bytes : end]

    def fill_ahead(self) -> threading.Thread:
        """Have the kernel back the pool with memory, from its start on, in a thread that ends with the pool.

        Without it, the first write to 256 MiB would cost a prefill up to a second. Attention would read long histories
        more slowly, too: with small pages, every 4 KiB need a walk through the page tables.
        """
        return fill_ahead(self, self._mapping)
