"""The pool: the KV bytes of one engine, one flat mapping in block-major layout."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence

import torch

from swiftkv.cache.geometry import GroupRegion, KVGroup, lay_out, pool_bytes_of
from swiftkv.shared_memory import fill_ahead, make_memory, map_memory


def region_view(pool: torch.Tensor, region: GroupRegion) -> torch.Tensor:
    """Return a region of the flat pool as uint8 `[num_blocks, num_layers, layer_block_bytes]`."""
    flat = pool[region.base_offset_bytes : region.base_offset_bytes + region.nbytes]
    return flat.view(region.num_blocks, region.group.num_layers, region.group.layer_block_bytes)


class Pool:
    """One flat allocation of shared memory, with the regions of all KV groups.

    Another process of the same user maps it through a copy of this process's file descriptor.
    """

    def __init__(self, groups: Sequence[tuple[KVGroup, int]], name: str = "pool", shares_extents: bool = False) -> None:
        """`groups` are (group, number of blocks), laid out as `lay_out` does; `name` shows in `/proc/<pid>/maps`.

        Raises `OSError` if the memory cannot be mapped.
        """
        self.regions: tuple[GroupRegion, ...] = lay_out(groups, shares_extents)
        self.nbytes = pool_bytes_of(self.regions)
        self.fd = make_memory(name, self.nbytes)
        weakref.finalize(self, os.close, self.fd)
        self._mapping = map_memory(self.fd, self.nbytes)
        self.tensor: torch.Tensor = torch.frombuffer(self._mapping, dtype=torch.uint8)  # [nbytes], starts as zeros

    def identity(self) -> tuple[int, int, int]:
        """Return our file descriptor of the memory, and its `st_dev` and `st_ino`, which no other memory has."""
        status = os.fstat(self.fd)
        return self.fd, status.st_dev, status.st_ino

    def region_tensor(self, index: int) -> torch.Tensor:
        """Return group `index`'s bytes as uint8 `[num_blocks, num_layers, layer_block_bytes]`, a view."""
        return region_view(self.tensor, self.regions[index])

    def fill_ahead(self) -> threading.Thread:
        """Have the kernel back the pool with memory, from its start on, in a thread that ends with the pool.

        Without it, the first write to 256 MiB would cost a prefill up to a second. Attention would read long histories
        more slowly, too: with small pages, every 4 KiB need a walk through the page tables.
        """
        return fill_ahead(self, self._mapping)
