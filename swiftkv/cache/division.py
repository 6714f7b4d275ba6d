"""How the KV groups of one engine divide its pool: into regions of their own, or by extents that change hands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from swiftkv.arithmetic import ceil_div
from swiftkv.cache.geometry import (
    MAX_EXACT_EXTENT_BLOCKS,
    KVGroup,
    blocks_for_tokens,
    blocks_in_pool,
    pool_bytes_for_tokens,
    sequence_blocks,
    windows_at_once,
)


@dataclass(frozen=True, slots=True)
class OwnRegions:
    """Every KV group has a region to itself, of a size that is fixed when the engine starts."""

    groups: tuple[KVGroup, ...]
    num_windows: int | None  # as in `blocks_in_pool`

    def group_blocks(self, pool_bytes: int) -> tuple[int, ...]:
        """Return the number of blocks that each group gets of a pool."""
        return blocks_in_pool(pool_bytes, self.groups, self.num_windows)

    def blocks_per_extent(self, group: int) -> int:
        """Return 0: nothing changes hands."""
        return 0

    def lendable(self) -> dict[int, int]:
        """Return the groups that lend, each with the number of its blocks that are lent together at least."""
        return dict.fromkeys(range(len(self.groups)), 1)

    def pool_bytes(self, group_blocks: Sequence[int]) -> int:
        """Return the size of a pool of so many blocks."""
        return sum(count * group.block_bytes for count, group in zip(group_blocks, self.groups, strict=True))

    def pool_bytes_for_tokens(self, num_tokens: int) -> int:
        """Return a size for a pool that holds one sequence of `num_tokens`."""
        return pool_bytes_for_tokens(num_tokens, self.groups, self.num_windows)

    def sequence_blocks(self, group_blocks: Sequence[int]) -> int:
        """Return the blocks in which whole sequences lie."""
        return sequence_blocks(group_blocks, self.groups)


@dataclass(frozen=True, slots=True)
class SharedExtents:
    """All KV groups have their blocks in one region of extents, each of which is one group's at a time, or nobody's.

    An extent is the least common multiple of the groups' blocks, in bytes, so each group's blocks fill it. What a group
    is said to have is then the most that it can have, when the others have nothing.
    """

    groups: tuple[KVGroup, ...]
    splits_prompts: bool

    def bounds_sequences(self, group_blocks: Sequence[int]) -> bool:
        """Tell whether a sequence may be too long: not where prompts are split, and windows, which fit, are all."""
        if not self.splits_prompts or any(group.kind != "window" for group in self.groups):
            return True
        return self._extents_for(max(group.tail_blocks + 2 for group in self.groups)) > self._num_extents(group_blocks)

    def _num_extents(self, group_blocks: Sequence[int]) -> int:
        return group_blocks[0] // self.blocks_per_extent(0)

    @property
    def extent_bytes(self) -> int:
        return math.lcm(*(group.block_bytes for group in self.groups))

    def blocks_per_extent(self, group: int) -> int:
        return self.extent_bytes // self.groups[group].block_bytes

    def lendable(self) -> dict[int, int]:
        """Return the first group, in whose name all lend, with the number of its blocks in an extent."""
        return {0: self.blocks_per_extent(0)}

    def group_blocks(self, pool_bytes: int) -> tuple[int, ...]:
        """Return the most blocks that each group can have of a pool."""
        num_extents = pool_bytes // self.extent_bytes
        return tuple(num_extents * self.blocks_per_extent(i) for i in range(len(self.groups)))

    def pool_bytes(self, group_blocks: Sequence[int]) -> int:
        """Return the size of a pool whose groups can have so many blocks."""
        return group_blocks[0] * self.groups[0].block_bytes

    def pool_bytes_for_tokens(self, num_tokens: int) -> int:
        """Return the size of the smallest pool that holds one sequence of `num_tokens`."""
        return self._extents_for(blocks_for_tokens(num_tokens, self.groups[0].block_size)) * self.extent_bytes

    def sequence_blocks(self, group_blocks: Sequence[int]) -> int:
        """Return the blocks of the longest sequence that fits, beside its windows; 0 if none does."""
        if not self.bounds_sequences(group_blocks):
            return min(group_blocks)
        num_extents = self._num_extents(group_blocks)
        fitting, too_many = 0, max(group_blocks) + 1
        while too_many - fitting > 1:
            middle = (fitting + too_many) // 2
            fitting, too_many = (middle, too_many) if self._extents_for(middle) <= num_extents else (fitting, middle)
        return fitting

    def _extents_for(self, num_blocks: int) -> int:
        """Return the extents in which a sequence of so many blocks gets to its end, as the C++ core counts them."""
        total = 0
        for i, group in enumerate(self.groups):
            held = group.blocks_to_run(num_blocks * group.block_size) if self.splits_prompts else num_blocks
            size = self.blocks_per_extent(i)
            total += ceil_div(held, size) + (size > 1)
        return total


PoolDivision = OwnRegions | SharedExtents


def can_share(groups: Sequence[KVGroup]) -> bool:
    """Tell whether groups have an extent in common that is not absurdly large."""
    larger_bytes = max(group.block_bytes for group in groups)
    extent_bytes = math.lcm(*(group.block_bytes for group in groups))
    return len(groups) > 1 and extent_bytes <= MAX_EXACT_EXTENT_BLOCKS * larger_bytes


def divide(
    groups: Sequence[KVGroup], *, max_num_seqs: int, enable_chunked_prefill: bool, shares_extents: bool
) -> PoolDivision:
    """Return the division of an engine's pool; groups share extents if they may, and can."""
    if shares_extents and can_share(groups):
        return SharedExtents(tuple(groups), enable_chunked_prefill)
    return OwnRegions(tuple(groups), windows_at_once(max_num_seqs, enable_chunked_prefill))
