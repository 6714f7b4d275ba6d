"""Block and pool sizes against the paper's numbers and against hand-made ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftkv.cache.geometry import KVGroup, blocks_for_tokens, blocks_in_pool, pool_bytes_for_tokens, split_pool

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
    lsc_slots, rc_blocks = split_pool(100, [9, 8], num_layers=10)
    assert (lsc_slots, rc_blocks, lsc_slots + rc_blocks) == (17, 8, 25)
    assert split_pool(100, [], num_layers=10) == (0, 10)


def test_borrowed_blocks_beyond_the_pool_leave_no_regular_cache() -> None:
    assert split_pool(100, [60, 60], num_layers=10) == (100, 0)


def test_groups_side_by_side_get_equal_blocks() -> None:
    full = KVGroup((0, 2), 2, 16, "float32", 16)
    windowed = KVGroup((1, 3, 4), 2, 16, "float32", 16, window=128)
    both = full.block_bytes + windowed.block_bytes
    assert blocks_in_pool(7 * both + both - 1, (full, windowed)) == 7


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
    assert blocks_in_pool(needed, [group]) == blocks
    assert blocks_in_pool(needed - 1, [group]) == blocks - 1
