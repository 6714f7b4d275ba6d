"""The division of an engine's pool among its KV groups: regions of their own, or extents that change hands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from swiftkv.arithmetic import ceil_div
from swiftkv.cache.geometry import (
    MAX_EXACT_EXTENT_BLOCKS,
    WINDOW_PART,
    KVGroup,
    blocks_for_tokens,
    blocks_in_pool,
    pool_bytes_for_tokens,
    sequence_blocks,
    split_pool,
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
        """Return 0: no extent changes hands."""
        return 0

    def lendable(self) -> dict[int, int]:
        """Return the groups that lend, each with the smallest number of its blocks that can be lent."""
        return dict.fromkeys(range(len(self.groups)), 1)

    def pool_bytes(self, group_blocks: Sequence[int]) -> int:
        """Return the bytes of a pool with `group_blocks` blocks of each group."""
        return sum(count * group.block_bytes for count, group in zip(group_blocks, self.groups, strict=True))

    def pool_bytes_for_tokens(self, num_tokens: int) -> int:
        """Return the bytes of a pool that holds one sequence of `num_tokens`."""
        return pool_bytes_for_tokens(num_tokens, self.groups, self.num_windows)

    def sequence_blocks(self, group_blocks: Sequence[int]) -> int:
        """Return the number of blocks for whole sequences."""
        return sequence_blocks(group_blocks, self.groups)

    def borrowing_parts(self, group_blocks: Sequence[int]) -> tuple[Fraction, ...]:
        """Return each group's part of the memory that is lent to the model: the same as its part of the pool."""
        pool_bytes = self.pool_bytes(group_blocks)
        return tuple(
            Fraction(count * group.block_bytes, pool_bytes)
            for count, group in zip(group_blocks, self.groups, strict=True)
        )

    def split(self, group_blocks: Sequence[int], borrowed: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Return `(N_LSC, N_RC)` of each group while it borrows `borrowed` blocks (Eqs. 4 and 5)."""
        return tuple(
            split_pool(count * group.num_layers, [blocks], group.num_layers)
            for count, blocks, group in zip(group_blocks, borrowed, self.groups, strict=True)
        )


@dataclass(frozen=True, slots=True)
class SharedExtents:
    """All KV groups have their blocks in one region of extents. An extent has at most one owner, which is a group.

    An extent is the least common multiple of the groups' blocks, in bytes, so blocks of any group fill it. The number
    of a group's blocks, in `group_blocks`, is the most that it can have: when the others have none.
    """

    groups: tuple[KVGroup, ...]
    splits_prompts: bool

    def bounds_sequences(self, group_blocks: Sequence[int]) -> bool:
        """Return whether a sequence may be too long for the pool.

        If prompts are split and all groups have windows that fit, no sequence is too long.
        """
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
        """Return the first group, which stands for all when extents are lent, and its blocks per extent."""
        return {0: self.blocks_per_extent(0)}

    def group_blocks(self, pool_bytes: int) -> tuple[int, ...]:
        """Return the most blocks that each group can have of a pool."""
        num_extents = pool_bytes // self.extent_bytes
        return tuple(num_extents * self.blocks_per_extent(i) for i in range(len(self.groups)))

    def pool_bytes(self, group_blocks: Sequence[int]) -> int:
        """Return the bytes of a pool whose groups can have `group_blocks`."""
        return group_blocks[0] * self.groups[0].block_bytes

    def pool_bytes_for_tokens(self, num_tokens: int) -> int:
        """Return the bytes of the smallest pool that holds one sequence of `num_tokens`."""
        return self._extents_for(blocks_for_tokens(num_tokens, self.groups[0].block_size)) * self.extent_bytes

    def borrowing_parts(self, group_blocks: Sequence[int]) -> tuple[Fraction, ...]:
        """Return each group's part of the memory that is lent to the model: little for windows, which are short.

        `group_blocks` is not needed: no group has a fixed part of the pool.
        """
        of_windows = [group.kind == "window" for group in self.groups]
        both = any(of_windows) and not all(of_windows)
        bytes_of = {
            is_window: sum(group.block_bytes for group in self.groups if (group.kind == "window") == is_window)
            for is_window in (False, True)
        }
        kind_part = {True: WINDOW_PART if both else 1, False: 1 - WINDOW_PART if both else 1}
        return tuple(
            kind_part[is_window] * Fraction(group.block_bytes, bytes_of[is_window])
            for group, is_window in zip(self.groups, of_windows, strict=True)
        )

    def split(self, group_blocks: Sequence[int], borrowed: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Return, for each group, the layer blocks that stage borrowed blocks, and the most blocks that it can have."""
        num_extents = self._num_extents(group_blocks)
        of_windows = self._extents_of_windows(self.sequence_blocks(group_blocks, borrowed))
        staging = self._staging_extents(num_extents - of_windows, borrowed)
        counts = []
        for i, group in enumerate(self.groups):
            left = num_extents - sum(staging) - (0 if group.kind == "window" else of_windows)
            size = self.blocks_per_extent(i)
            counts.append((staging[i] * size * group.num_layers, max(0, left) * size))
        return tuple(counts)

    def sequence_blocks(self, group_blocks: Sequence[int], borrowed: Sequence[int] = ()) -> int:
        """Return the blocks of the longest sequence that fits, beside its windows; 0 if none does.

        `borrowed` are the blocks of each group that lenders have room for, by default none.
        """
        if not self.bounds_sequences(group_blocks):
            return min(group_blocks)
        fitting, too_many = 0, max(group_blocks) + max(borrowed, default=0) + 1
        while too_many - fitting > 1:
            middle = (fitting + too_many) // 2
            fits = self.holds(middle, group_blocks, borrowed)
            fitting, too_many = (middle, too_many) if fits else (fitting, middle)
        return fitting

    def holds(self, num_blocks: int, group_blocks: Sequence[int], borrowed: Sequence[int] = ()) -> bool:
        """Return whether a sequence of `num_blocks` can be computed to its end. The C++ core counts the same way."""
        borrowed = borrowed or (0,) * len(self.groups)
        left = self._num_extents(group_blocks) - self._extents_of_windows(num_blocks)
        for i, staging in enumerate(self._staging_extents(left, borrowed)):
            if self.groups[i].kind != "window":
                staged = min(borrowed[i], staging * self.blocks_per_extent(i) * self.groups[i].num_layers)
                left -= staging + self._extents_of(i, max(0, num_blocks - staged))
        return left >= 0

    def _staging_extents(self, most: int, borrowed: Sequence[int]) -> list[int]:
        """Return the number of extents that stage the blocks each group borrows, together at most `most`."""
        left, found = max(0, most), []
        for i, group in enumerate(self.groups):
            size = self.blocks_per_extent(i)
            wanted = min(ceil_div(borrowed[i], size * group.num_layers), borrowed[i] // size, left)
            found.append(0 if group.kind == "window" else wanted)
            left -= found[-1]
        return found

    def _extents_of_windows(self, num_blocks: int) -> int:
        """Return the number of extents that the windows of a sequence need. No borrowed blocks are staged in these."""
        return sum(
            self._extents_of(i, self._held(group, num_blocks))
            for i, group in enumerate(self.groups)
            if group.kind == "window"
        )

    def _held(self, group: KVGroup, num_blocks: int) -> int:
        return group.blocks_to_run(num_blocks * group.block_size) if self.splits_prompts else num_blocks

    def _extents_of(self, group: int, num_blocks: int) -> int:
        size = self.blocks_per_extent(group)
        return ceil_div(num_blocks, size) + (num_blocks > 0 and size > 1)

    def _extents_for(self, num_blocks: int) -> int:
        """Return the number of extents in which a sequence of `num_blocks` can be computed to its end."""
        return sum(self._extents_of(i, self._held(group, num_blocks)) for i, group in enumerate(self.groups))


PoolDivision = OwnRegions | SharedExtents


def can_share(groups: Sequence[KVGroup]) -> bool:
    """Return whether groups have an extent in common that is not absurdly large."""
    larger_bytes = max(group.block_bytes for group in groups)
    extent_bytes = math.lcm(*(group.block_bytes for group in groups))
    return len(groups) > 1 and extent_bytes <= MAX_EXACT_EXTENT_BLOCKS * larger_bytes


def divide(
    groups: Sequence[KVGroup], *, max_num_seqs: int, enable_chunked_prefill: bool, shares_extents: bool
) -> PoolDivision:
    """Return the division of an engine's pool; groups share extents if `shares_extents` is set and they can."""
    if shares_extents and can_share(groups):
        return SharedExtents(tuple(groups), enable_chunked_prefill)
    return OwnRegions(tuple(groups), windows_at_once(max_num_seqs, enable_chunked_prefill))
