"""Block and pool sizes against the paper's numbers and against hand-made ones."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftkv.cache.geometry import (
    MAX_EXACT_EXTENT_BLOCKS,
    MAX_EXTENT_WASTE,
    WINDOW_PART,
    KVGroup,
    blocks_for_tokens,
    blocks_in_pool,
    extent_between,
    pool_bytes_for_tokens,
    sequence_blocks,
    split_pool,
)

MIB = 1 << 20


def dense(num_layers: int, num_kv_heads: int, head_dim: int, dtype: str = "float16", block_size: int = 16) -> KVGroup:
    return KVGroup(tuple(range(num_layers)), num_kv_heads, head_dim, dtype, block_size)


@pytest.mark.parametrize(
    ("num_layers", "num_kv_heads", "megabytes"),
    [
        pytest.param(32, 32, 0.50, id="LWM"),
        pytest.param(36, 8, 0.141, id="Qwen3-8B"),
        pytest.param(40, 8, 0.156, id="Qwen3-14B"),
        pytest.param(64, 8, 0.25, id="Qwen3-32B"),
    ],
)
def test_bytes_per_token_of_table_2(num_layers: int, num_kv_heads: int, megabytes: float) -> None:
    assert round(dense(num_layers, num_kv_heads, 128).bytes_per_token / MIB, 3) == megabytes


def test_layer_block_by_hand() -> None:
    group = dense(num_layers=28, num_kv_heads=8, head_dim=128, dtype="bfloat16")
    assert group.layer_block_bytes == 2 * 16 * 8 * 128 * 2 == 65536
    assert group.block_bytes == 28 * 65536
    assert dense(28, 8, 128, "float32").block_bytes == 2 * group.block_bytes
    assert dense(28, 8, 128, "bfloat16", block_size=32).bytes_per_token == group.bytes_per_token


def test_the_papers_example_of_layer_stream_and_regular_cache() -> None:
    lsc_layer_blocks, rc_blocks = split_pool(100, [9, 8], num_layers=10)
    assert (lsc_layer_blocks, rc_blocks, lsc_layer_blocks + rc_blocks) == (17, 8, 25)
    assert split_pool(100, [], num_layers=10) == (0, 10)


def test_borrowed_blocks_beyond_the_pool_leave_no_regular_cache() -> None:
    assert split_pool(100, [60, 60], num_layers=10) == (100, 0)


def test_what_a_sequence_of_a_hybrid_takes() -> None:
    """MiMo-V2.5-Pro: 70 layers of 8 KV heads, of which 60 look back over 128 tokens."""
    full = KVGroup(tuple(range(10)), 8, 192, "bfloat16", 16, v_head_dim=128)
    window = KVGroup(tuple(range(10, 70)), 8, 192, "bfloat16", 16, kind="window", window=128, v_head_dim=128)
    num_tokens, chunk_tokens = 65_536, 2_048
    dense_bytes = 70 * full.layer_block_bytes * num_tokens // 16
    at_rest = sum(group.blocks_at_rest(num_tokens) * group.block_bytes for group in (full, window))
    assert at_rest / dense_bytes <= 0.146
    in_prefill = sum(group.blocks_in_prefill(num_tokens, chunk_tokens) * group.block_bytes for group in (full, window))
    assert in_prefill - at_rest <= (chunk_tokens // 16 + 2) * window.block_bytes


def test_groups_side_by_side_in_a_small_pool_get_equal_shares() -> None:
    full = KVGroup((0, 2), 2, 16, "float32", 16)
    windowed = KVGroup((1, 3, 4), 2, 16, "float32", 16, kind="window", window=128)
    both = full.block_bytes + windowed.block_bytes
    assert blocks_in_pool(7 * both, (full, windowed), 256) == (7, 7)
    assert blocks_in_pool(7 * both, (replace(windowed, layers=(0, 1)), windowed)) == (7, 7)  # nobody sees everything
    assert blocks_in_pool(1000 * both, (full, windowed)) == (1000, 1000)  # prompts must fit in whole


@given(
    group=st.builds(
        dense,
        num_layers=st.integers(1, 80),
        num_kv_heads=st.integers(1, 32),
        head_dim=st.sampled_from([16, 64, 96, 128]),
        dtype=st.sampled_from(["float32", "bfloat16"]),
        block_size=st.sampled_from([16, 32, 64]),
    ),
    num_tokens=st.integers(1, 100_000),
)
def test_the_pool_that_a_sequence_needs_is_the_smallest(group: KVGroup, num_tokens: int) -> None:
    needed = pool_bytes_for_tokens(num_tokens, [group])
    blocks = blocks_for_tokens(num_tokens, group.block_size)
    assert (blocks - 1) * group.block_size < num_tokens <= blocks * group.block_size
    assert blocks_in_pool(needed, [group]) == (blocks,)
    assert blocks_in_pool(needed - 1, [group]) == (blocks - 1,)


@pytest.mark.parametrize(
    ("worker_layers", "meu_w", "meu_m", "mebibytes"),
    [pytest.param(36, 16, 9, 36, id="Qwen3-8B"), pytest.param(40, 8, 5, 20, id="Qwen3-14B")],
)
def test_extents_beside_qwen3_32b(worker_layers: int, meu_w: int, meu_m: int, mebibytes: int) -> None:
    extent = extent_between(dense(worker_layers, 8, 128).block_bytes, dense(64, 8, 128).block_bytes)
    assert (extent.meu_w, extent.meu_m, extent.num_bytes) == (meu_w, meu_m, mebibytes * MIB)
    assert (extent.is_lcm, extent.wasted_bytes) == (True, 0)


def test_an_extent_counts_bytes_not_elements() -> None:
    group, in_float32 = dense(36, 8, 128, "bfloat16"), dense(36, 8, 128, "float32")
    extent = extent_between(group.block_bytes, in_float32.block_bytes)
    assert (extent.meu_w, extent.meu_m) == (2, 1)


def test_coprime_blocks_waste_a_little_rather_than_lend_by_the_gigabyte() -> None:
    extent = extent_between(61 * MIB, 53 * MIB)
    assert math.lcm(61, 53) == 3233
    assert (extent.meu_w, extent.meu_m, extent.wasted_bytes) == (7, 8, 3 * MIB)
    assert extent.waste == Fraction(3, 427)
    assert not extent.is_lcm


block_bytes = st.one_of(
    st.integers(1, 3_000),
    st.builds(lambda layers, heads, dim: layers * heads * dim, st.integers(1, 96), st.integers(1, 64), st.just(8192)),
)


@given(lender=block_bytes, borrower=block_bytes)
def test_an_extent_is_a_common_multiple_or_wastes_little(lender: int, borrower: int) -> None:
    extent = extent_between(lender, borrower)
    lcm = math.lcm(lender, borrower)
    assert extent.num_bytes == extent.meu_w * lender
    assert extent.meu_m == extent.num_bytes // borrower
    assert extent.num_bytes <= lcm
    assert extent.is_lcm == (extent.num_bytes == lcm) == (extent.wasted_bytes == 0)
    assert extent.waste < MAX_EXTENT_WASTE
    if lcm <= MAX_EXACT_EXTENT_BLOCKS * max(lender, borrower):
        assert extent.is_lcm


@given(lender=st.integers(1, 400), borrower=st.integers(1, 400))
def test_where_it_is_not_the_lcm_no_smaller_extent_would_do(lender: int, borrower: int) -> None:
    extent = extent_between(lender, borrower)
    if math.lcm(lender, borrower) > MAX_EXACT_EXTENT_BLOCKS * max(lender, borrower):
        sizes = (n * lender for n in range(-(-borrower // lender), math.lcm(lender, borrower) // lender + 1))
        assert extent.num_bytes == next(size for size in sizes if (size % borrower) * 100 < size)


@given(lender=block_bytes, borrower=block_bytes, pool_blocks=st.integers(0, 10**12), percent=st.integers(0, 99))
def test_a_budget_is_whole_extents_within_it(lender: int, borrower: int, pool_blocks: int, percent: int) -> None:
    extent = extent_between(lender, borrower)
    pool_bytes = pool_blocks * lender
    lent, more = (extent.count_within(Fraction(p * pool_bytes, 100)) for p in (percent, percent + 1))
    assert lent * extent.num_bytes * 100 <= percent * pool_blocks * lender < (lent + 1) * extent.num_bytes * 100
    assert lent <= more
    assert lent <= pool_blocks // extent.meu_w


@given(pool=st.integers(0, 10**9), borrowed=st.integers(0, 10**9), num_layers=st.integers(1, 100))
def test_borrowing_more_never_shortens_the_longest_sequence(pool: int, borrowed: int, num_layers: int) -> None:
    lsc_layer_blocks, rc_blocks = split_pool(pool, [borrowed], num_layers)
    assert lsc_layer_blocks + rc_blocks * num_layers <= pool
    assert sum(split_pool(pool, [borrowed, 1], num_layers)) >= lsc_layer_blocks + rc_blocks
    assert sum(split_pool(pool + 1, [borrowed], num_layers)) >= lsc_layer_blocks + rc_blocks


def groups_of(
    full: tuple[int, int, int, int], window: tuple[int, int, int, int], num_tokens: int
) -> tuple[KVGroup, KVGroup]:
    """The groups of a hybrid: (layers, KV heads, key dimensions, value dimensions) of each; layers in two runs."""
    (f_layers, f_heads, f_k, f_v), (w_layers, w_heads, w_k, w_v) = full, window
    first = tuple(range(f_layers))
    rest = tuple(range(f_layers, f_layers + w_layers))
    return (
        KVGroup(first, f_heads, f_k, "bfloat16", 16, v_head_dim=f_v),
        KVGroup(rest, w_heads, w_k, "bfloat16", 16, "window", num_tokens, w_v),
    )


@pytest.mark.parametrize(
    ("groups", "block_kib", "blocks_of_an_extent"),
    [
        # Where both groups meet: blocks of the full group, and of the window group, in their least common multiple.
        pytest.param(groups_of((10, 8, 192, 128), (60, 8, 192, 128), 128), (800, 4800), (6, 1), id="MiMo-V2.5-Pro"),
        pytest.param(groups_of((9, 4, 192, 128), (39, 8, 192, 128), 129), (360, 3120), (26, 3), id="MiMo-V2-Flash"),
        pytest.param(groups_of((12, 8, 64, 64), (12, 8, 64, 64), 128), (384, 384), (1, 1), id="gpt-oss-20b"),
        pytest.param(groups_of((10, 16, 128, 128), (52, 16, 128, 128), 1024), (1280, 6656), (26, 5), id="Gemma-3-27B"),
        pytest.param(groups_of((10, 4, 512, 512), (50, 16, 256, 256), 1024), (1280, 12800), (10, 1), id="Gemma-4-31B"),
        pytest.param(groups_of((4, 2, 256, 256), (16, 2, 256, 256), 512), (128, 512), (4, 1), id="Gemma-3n, own KV"),
    ],
)
def test_hybrids_meet_in_small_extents(
    groups: tuple[KVGroup, KVGroup], block_kib: tuple[int, int], blocks_of_an_extent: tuple[int, int]
) -> None:
    full, window = groups
    assert (full.block_bytes >> 10, window.block_bytes >> 10) == block_kib
    extent = extent_between(full.block_bytes, window.block_bytes)
    assert (extent.meu_w, extent.meu_m) == blocks_of_an_extent
    assert extent.wasted_bytes == 0


@given(
    pool_bytes=st.integers(0, 1 << 34),
    full=st.tuples(st.integers(1, 40), st.sampled_from([1, 4, 8])),
    window=st.tuples(st.integers(1, 60), st.sampled_from([1, 4, 8])),
    window_tokens=st.integers(2, 5000),
)
def test_a_hybrid_gives_its_windows_a_part_and_never_more_than_an_equal_share(
    pool_bytes: int, full: tuple[int, int], window: tuple[int, int], window_tokens: int
) -> None:
    groups = groups_of((*full, 128, 128), (*window, 128, 64), window_tokens)
    of_full, of_window = blocks_in_pool(pool_bytes, groups, 4)
    used = of_full * groups[0].block_bytes + of_window * groups[1].block_bytes
    equal = pool_bytes // (groups[0].block_bytes + groups[1].block_bytes)
    assert pool_bytes - groups[0].block_bytes < used <= pool_bytes
    assert of_window <= equal <= of_full
    part = of_window * groups[1].block_bytes / pool_bytes if pool_bytes else 0
    assert of_window == equal or of_window <= 4 * (groups[1].tail_blocks + 2) or part <= WINDOW_PART


@given(num_tokens=st.integers(1, 200_000), window_tokens=st.integers(2, 5000))
def test_a_pool_of_the_size_for_a_sequence_holds_it(num_tokens: int, window_tokens: int) -> None:
    groups = groups_of((10, 8, 192, 128), (60, 8, 192, 128), window_tokens)
    needed = pool_bytes_for_tokens(num_tokens, groups, 4)
    counts = blocks_in_pool(needed, groups, 4)
    assert all(count >= group.blocks_to_run(num_tokens) for count, group in zip(counts, groups, strict=True))
    assert needed <= sum(group.block_bytes for group in groups) * blocks_for_tokens(num_tokens, 16)
    assert sequence_blocks(counts, groups) == counts[0]


def test_a_hybrid_holds_several_times_the_tokens_of_its_dense_twin() -> None:
    """MiMo-V2.5-Pro in 100 GiB: 10 layers of 70 see everything."""
    hybrid = groups_of((10, 8, 192, 128), (60, 8, 192, 128), 128)
    dense_twin = KVGroup(tuple(range(70)), 8, 192, "bfloat16", 16, v_head_dim=128)
    assert blocks_in_pool(100 << 30, hybrid, 256)[0] > 5.9 * blocks_in_pool(100 << 30, [dense_twin])[0]


def test_latents_are_keys_and_values_of_one_head() -> None:
    """DeepSeek-V3 caches 512 latents and 64 rotary dimensions a token, and attends to their sum."""
    group = KVGroup(tuple(range(61)), 1, 64, "bfloat16", 64, v_head_dim=512)
    assert group.bytes_per_token == 61 * (512 + 64) * 2


def test_a_layer_need_not_be_in_a_group_of_keys_and_values() -> None:
    """Qwen3.5 has one full layer in four; the others keep a state of fixed size, which is a group of its own kind."""
    full = KVGroup(tuple(range(3, 48, 4)), 2, 256, "bfloat16", 16)
    state = KVGroup(tuple(layer for layer in range(48) if layer % 4 != 3), 32, 128, "float32", 16, "recurrent")
    assert full.num_layers + state.num_layers == 48
    assert set(full.layers).isdisjoint(state.layers)
