"""The place of host memory beside a pool: there, kernels attend to its chunks as to blocks of the pool.

The blocks of other groups are copied from there into the pool, as far as each fills a chunk.

A kernel finds layer block `i` of a KV group at the group's first byte plus `i` layer blocks. Host memory can be mapped
beyond the pool so that each of its chunks begins at a whole number of layer blocks, too. Touches no memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from swiftkv.arithmetic import ceil_div
from swiftkv.cache.geometry import GroupRegion, KVGroup, pool_bytes_of

_MAX_PAGES_TRIED = 4096
"""The most page offsets between which a place is searched: a place further away would cost too many addresses."""
_MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class HostChunks:
    """The chunks of host memory: `num_chunks` of `chunk_bytes` each, one after the other from `offset_bytes` on."""

    offset_bytes: int
    chunk_bytes: int
    num_chunks: int


@dataclass(frozen=True, slots=True)
class HostBlocks:
    """The chunks of host memory as blocks of one KV group, in layer blocks from the group's first byte on."""

    group: int
    first: int  # layer block 0 of chunk 0
    stride: int  # layer blocks from one chunk to the next
    count: int

    @property
    def end(self) -> int:
        """The layer block behind the last chunk."""
        return self.first + self.stride * self.count


@dataclass(frozen=True, slots=True)
class HostPlace:
    """The offset of host memory from the first byte of a pool, and its chunks as blocks."""

    offset_bytes: int
    blocks: HostBlocks


@dataclass(frozen=True, slots=True)
class HostSource:
    """The chunks of host memory from which steps copy the blocks of some KV groups to the pool."""

    memory: memoryview
    chunks: HostChunks
    groups: frozenset[int]


def groups_to_copy(groups: Sequence[KVGroup], chunk_bytes: int, attended: HostBlocks | None) -> frozenset[int]:
    """Return the KV groups whose blocks fill chunks of host memory, without the one that is `attended` there."""
    own = None if attended is None else attended.group
    return frozenset(i for i, group in enumerate(groups) if group.block_bytes == chunk_bytes and i != own)


def place_beside(regions: Sequence[GroupRegion], chunks: HostChunks, page_bytes: int) -> HostPlace | None:
    """Return the first place for host memory behind a pool, a multiple of `page_bytes`.

    `None` if there is none near, or if no chunk is a block: only a model with one full-attention group has blocks
    there, and only those that fill a chunk.
    """
    index = _attended_group([region.group for region in regions])
    if index is None or regions[index].group.block_bytes != chunks.chunk_bytes or not chunks.num_chunks:
        return None
    region = regions[index]
    width = region.group.layer_block_bytes
    # The wanted number of pages `n` makes n * page_bytes + before a multiple of the width.
    before = chunks.offset_bytes - region.base_offset_bytes
    common = math.gcd(page_bytes, width)
    period = width // common  # every so many pages, there is a place
    if before % common or period > _MAX_PAGES_TRIED:
        return None
    first = -before // common * pow(page_bytes // common, -1, period) % period
    least = ceil_div(pool_bytes_of(regions), page_bytes)
    offset_bytes = (least + (first - least) % period) * page_bytes
    blocks = HostBlocks(index, (offset_bytes + before) // width, chunks.chunk_bytes // width, chunks.num_chunks)
    return HostPlace(offset_bytes, blocks) if blocks.end <= _MAX_INT32 else None


def _attended_group(groups: Sequence[KVGroup]) -> int | None:
    full = [index for index, group in enumerate(groups) if group.kind != "window"]
    return full[0] if len(full) == 1 else None
