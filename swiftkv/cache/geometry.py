"""The geometry of KV: groups of layers, blocks, pools and extents, in bytes. Imports no torch, touches no memory.

Planning, pools, kernels, the core and lending all take it from here. The equations are the paper's, on integers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count
from typing import Literal

from swiftkv.arithmetic import ceil_div

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes per element of every dtype that a model can be served in."""

BLOCK_SIZE_MULTIPLE = 16
"""The divisor of every block size: kernels read keys and values sixteen tokens at a time."""

MAX_EXACT_EXTENT_BLOCKS = 32
"""The most blocks of the larger model in an extent that is a least common multiple. A larger one is too coarse."""

MAX_EXTENT_WASTE = Fraction(1, 100)
"""An extent that is not the least common multiple wastes less than this part of its bytes."""


WINDOW_PART = Fraction(3, 20)
"""The part of a hybrid's pool that its window groups get at least, if that is no more blocks than the others get."""

KVKind = Literal["full", "window", "recurrent"]
"""The state that a layer keeps: all keys and values, only those of the last tokens, or (reserved) a state of fixed
size."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """The layers of one model that share one attention kind, and the shape of their KV.

    `layers` are the model's layer numbers, in order: layer `layers[i]` is layer block `i` of each block.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int  # the size of a key
    dtype: str  # a key of DTYPE_BYTES
    block_size: int  # tokens per block
    kind: KVKind = "full"
    window: int = 0  # for kind window: how many tokens back a layer sees
    v_head_dim: int | None = None  # the size of a value; None: head_dim

    def __post_init__(self) -> None:
        assert self.layers
        assert self.num_kv_heads > 0
        assert self.head_dim > 0
        assert self.value_head_dim > 0
        assert self.dtype in DTYPE_BYTES
        assert self.block_size > 0
        assert self.block_size % BLOCK_SIZE_MULTIPLE == 0
        assert (self.window > 0) == (self.kind == "window")

    @property
    def value_head_dim(self) -> int:
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def layer_block_bytes(self) -> int:
        """`M_block`: keys and values of `block_size` tokens in one layer (paper Eq. 1)."""
        dims = self.num_kv_heads * (self.head_dim + self.value_head_dim)
        return self.block_size * dims * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """The bytes of one block of a block-major pool: all of the group's layers, contiguous."""
        return self.num_layers * self.layer_block_bytes

    @property
    def bytes_per_token(self) -> int:
        """The paper's "overhead per token" (Table 2), for this group's layers."""
        return self.block_bytes // self.block_size

    @property
    def tail_blocks(self) -> int:
        """The number of earlier blocks that the first token of a block attends to, in a window group."""
        assert self.kind == "window"
        return ceil_div(self.window - 1, self.block_size)

    def blocks_at_rest(self, num_tokens: int) -> int:
        """Return the blocks that a sequence leaves for its next turn: with a window, its tail and one block more."""
        whole = blocks_for_tokens(num_tokens, self.block_size)
        return min(whole, self.tail_blocks + 1) if self.kind == "window" else whole

    def blocks_to_run(self, num_tokens: int) -> int:
        """Return the fewest blocks in which a sequence can be computed to its end, with chunks that fit into them."""
        whole = blocks_for_tokens(num_tokens, self.block_size)
        return min(whole, self.tail_blocks + 2) if self.kind == "window" else whole

    def blocks_in_prefill(self, num_tokens: int, chunk_tokens: int) -> int:
        """Return the most blocks that a sequence holds while chunks of `chunk_tokens` of its prompt are computed."""
        whole = blocks_for_tokens(num_tokens, self.block_size)
        if self.kind != "window":
            return whole
        return min(whole, self.tail_blocks + blocks_for_tokens(chunk_tokens, self.block_size) + 2)


@dataclass(frozen=True, slots=True)
class GroupRegion:
    """The place of one KV group's blocks `(num_blocks, num_layers, layer block)` in a pool."""

    group: KVGroup
    num_blocks: int
    base_offset_bytes: int

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.group.block_bytes


def lay_out(groups: Sequence[tuple[KVGroup, int]], shares_extents: bool = False) -> tuple[GroupRegion, ...]:
    """Return the regions of a pool of `groups`, (group, number of blocks): one after the other, without gaps.

    Groups that share extents have the same region, which each divides into its own blocks. Every pool has this layout,
    on the CPU and on GPUs, and borrowers find a lender's blocks by it.
    """
    regions = []
    offset_bytes = 0
    for group, num_blocks in groups:
        assert num_blocks > 0
        regions.append(GroupRegion(group, num_blocks, offset_bytes))
        offset_bytes += 0 if shares_extents else regions[-1].nbytes
    return tuple(regions)


def pool_bytes_of(regions: Sequence[GroupRegion]) -> int:
    """Return the size of the pool that has these regions."""
    return max(region.base_offset_bytes + region.nbytes for region in regions)


@dataclass(frozen=True, slots=True)
class Extent:
    """The smallest unit that one KV group can lend to another: `meu_w` lender blocks that hold `meu_m` borrower blocks.

    Eqs. 6 to 9 in bytes: the paper counts elements, which is right only between models of one dtype.
    """

    lender_block_bytes: int
    borrower_block_bytes: int
    meu_w: int  # lender blocks
    meu_m: int  # borrower blocks

    def __post_init__(self) -> None:
        assert self.meu_w > 0
        assert self.meu_m > 0
        assert 0 <= self.wasted_bytes < self.borrower_block_bytes

    @property
    def num_bytes(self) -> int:
        return self.meu_w * self.lender_block_bytes

    @property
    def wasted_bytes(self) -> int:
        """The unused bytes after the last of the borrower's blocks."""
        return self.num_bytes - self.meu_m * self.borrower_block_bytes

    @property
    def waste(self) -> Fraction:
        """The part of the extent that is wasted: 0, or less than `MAX_EXTENT_WASTE`."""
        return Fraction(self.wasted_bytes, self.num_bytes)

    @property
    def is_lcm(self) -> bool:
        return self.num_bytes == math.lcm(self.lender_block_bytes, self.borrower_block_bytes)

    def count_within(self, budget_bytes: Fraction) -> int:
        """Return how many whole extents fit in a budget, which need not be a whole number of bytes."""
        return math.floor(budget_bytes / self.num_bytes)


def extent_between(lender_block_bytes: int, borrower_block_bytes: int) -> Extent:
    """Return the extent for two blocks: their least common multiple in bytes (Eqs. 8 and 9), unless that is too large.

    Otherwise it is the smallest multiple of the lender's block that holds a whole number of the borrower's blocks with
    waste below `MAX_EXTENT_WASTE`. It is never larger than the least common multiple, and found in a hundred steps.
    """

    def of_lender_blocks(meu_w: int) -> Extent:
        return Extent(
            lender_block_bytes, borrower_block_bytes, meu_w, meu_w * lender_block_bytes // borrower_block_bytes
        )

    larger_bytes = max(lender_block_bytes, borrower_block_bytes)
    exact = of_lender_blocks(math.lcm(lender_block_bytes, borrower_block_bytes) // lender_block_bytes)
    if exact.num_bytes <= MAX_EXACT_EXTENT_BLOCKS * larger_bytes:
        return exact
    candidates = (of_lender_blocks(ceil_div(n * larger_bytes, lender_block_bytes)) for n in count(1))
    return next(extent for extent in candidates if extent.waste < MAX_EXTENT_WASTE)


def blocks_for_tokens(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold `num_tokens` tokens of one sequence."""
    return ceil_div(num_tokens, block_size)


def split_pool(pool_layer_blocks: int, borrowed_blocks: Sequence[int], num_layers: int) -> tuple[int, int]:
    """Divide a borrower's pool into layer blocks for layer streaming and whole blocks (paper Eqs. 4 and 5).

    `pool_layer_blocks` is `K_master` (Eq. 3), `borrowed_blocks` the `K_i` (Eq. 2). Returns `(N_LSC, N_RC)`; their
    sum is the longest sequence in blocks. With nothing borrowed the whole pool is regular.
    """
    lsc_layer_blocks = min(sum(borrowed_blocks), pool_layer_blocks)
    return lsc_layer_blocks, (pool_layer_blocks - lsc_layer_blocks) // num_layers


def blocks_in_pool(pool_bytes: int, groups: Sequence[KVGroup], num_windows: int | None = None) -> tuple[int, ...]:
    """Divide a pool: return the number of blocks that each group gets.

    Full-attention groups get equally many, because every token has KV in each of them. So do window groups if
    `num_windows` is `None`.

    Otherwise prompts are split, and a sequence of any length needs little more than its window. Window groups then get
    room for the windows of `num_windows` sequences. They get at least `WINDOW_PART` of the bytes, to keep the tails of
    sequences at rest, but never more blocks than the other groups.
    """
    if len(groups) == 1:
        group = groups[0]
        return split_pool(pool_bytes // group.layer_block_bytes, (), group.num_layers)[1:]
    equal = pool_bytes // sum(group.block_bytes for group in groups)
    full_block_bytes = sum(group.block_bytes for group in groups if group.kind != "window")
    if not full_block_bytes or num_windows is None:
        return (equal,) * len(groups)
    shared = pool_bytes * WINDOW_PART // sum(group.block_bytes for group in groups if group.kind == "window")
    of_windows = {
        index: min(equal, max(shared, num_windows * (group.tail_blocks + 2)))
        for index, group in enumerate(groups)
        if group.kind == "window"
    }
    left_bytes = pool_bytes - sum(count * groups[index].block_bytes for index, count in of_windows.items())
    return tuple(of_windows.get(index, left_bytes // full_block_bytes) for index in range(len(groups)))


def pool_bytes_for_tokens(num_tokens: int, groups: Sequence[KVGroup], num_windows: int | None = None) -> int:
    """Return the bytes of a pool that holds one sequence of `num_tokens`. With one group, no smaller pool does."""

    def holds(pool_bytes: int) -> bool:
        counts = blocks_in_pool(pool_bytes, groups, num_windows)
        return all(count >= group.blocks_to_run(num_tokens) for count, group in zip(counts, groups, strict=True))

    enough = sum(group.block_bytes * blocks_for_tokens(num_tokens, group.block_size) for group in groups)
    if len(groups) == 1 or num_windows is None:
        return enough
    least = 0  # always too little
    while enough - least > 1:
        middle = (least + enough) // 2
        least, enough = (least, middle) if holds(middle) else (middle, enough)
    return enough


def windows_at_once(max_num_seqs: int, enable_chunked_prefill: bool) -> int | None:
    """Return the number of sequences whose windows must fit; `None` if whole prompts must fit into window groups."""
    return max_num_seqs if enable_chunked_prefill else None


def sequence_blocks(counts: Sequence[int], groups: Sequence[KVGroup]) -> int:
    """Return the number of blocks for whole sequences: that of full-attention groups or, without any, of all groups."""
    full = [count for count, group in zip(counts, groups, strict=True) if group.kind != "window"]
    return min(full or counts)
