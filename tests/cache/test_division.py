"""The division of a pool among KV groups: the C++ core takes what the plan says fits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftkv._core import GroupSpec, Link, Scheduler
from swiftkv.arithmetic import ceil_div
from swiftkv.cache.division import OwnRegions, SharedExtents, can_share, divide
from swiftkv.cache.geometry import KVGroup
from swiftkv.cache.pool import Pool


def full(num_layers: int, heads: int = 8, k_dim: int = 192, v_dim: int = 128, block_size: int = 16) -> KVGroup:
    return KVGroup(tuple(range(num_layers)), heads, k_dim, "bfloat16", block_size, v_head_dim=v_dim)


def windowed(
    num_layers: int, heads: int = 8, k_dim: int = 192, v_dim: int = 128, block_size: int = 16, window: int = 128
) -> KVGroup:
    layers = tuple(range(100, 100 + num_layers))
    return KVGroup(layers, heads, k_dim, "bfloat16", block_size, "window", window, v_dim)


@pytest.mark.parametrize(
    ("groups", "extent_kib"),
    [
        pytest.param((full(10), windowed(60)), 4_800, id="MiMo-V2.5-Pro"),
        pytest.param((full(9, 4), windowed(39, 8)), 9_360, id="MiMo-V2-Flash"),
        pytest.param((full(12, 8, 64, 64), windowed(12, 8, 64, 64)), 384, id="gpt-oss-20b"),
        pytest.param((full(18, 8, 64, 64), windowed(18, 8, 64, 64)), 576, id="gpt-oss-120b"),
        pytest.param((full(21, 8, 256, 256), windowed(21, 8, 256, 256)), 2_688, id="Gemma-2-9B"),
        pytest.param((full(23, 16, 128, 128), windowed(23, 16, 128, 128)), 2_944, id="Gemma-2-27B"),
        pytest.param((full(4, 1, 256, 256), windowed(22, 1, 256, 256)), 704, id="Gemma-3-1B"),
        pytest.param((full(5, 4, 256, 256), windowed(29, 4, 256, 256)), 9_280, id="Gemma-3-4B"),
        pytest.param((full(8, 8, 256, 256), windowed(40, 8, 256, 256)), 5_120, id="Gemma-3-12B"),
        pytest.param((full(10, 16, 128, 128), windowed(52, 16, 128, 128)), 33_280, id="Gemma-3-27B"),
    ],
)
def test_groups_of_published_models_share_small_extents(groups: tuple[KVGroup, ...], extent_kib: int) -> None:
    assert can_share(groups)
    division = SharedExtents(groups, splits_prompts=True)
    assert division.extent_bytes == extent_kib << 10
    for i, group in enumerate(groups):
        assert division.blocks_per_extent(i) * group.block_bytes == division.extent_bytes


def test_who_shares() -> None:
    def division_of(groups: tuple[KVGroup, ...], shares_extents: bool) -> object:
        return divide(groups, max_num_seqs=4, enable_chunked_prefill=True, shares_extents=shares_extents)

    hybrid = (full(10), windowed(60))
    assert division_of(hybrid, True) == SharedExtents(hybrid, splits_prompts=True)
    assert division_of(hybrid, False) == OwnRegions(hybrid, 4)
    assert division_of(hybrid[:1], True) == OwnRegions(hybrid[:1], 4)
    absurd = (full(37), windowed(41))  # in common only 37 x 41 layers
    assert division_of(absurd, True) == OwnRegions(absurd, 4)


def test_a_short_sequence_in_a_pool_of_pros() -> None:
    """An extent holds six full blocks: nine need two, and one more that may be filled in part."""
    division = SharedExtents((full(10), windowed(60)), splits_prompts=True)
    assert division.pool_bytes_for_tokens(9 * 16) == (2 + 1 + 9) * division.extent_bytes
    assert division.pool_bytes_for_tokens(60_000) == (625 + 1 + 10) * division.extent_bytes
    blocks = division.group_blocks(636 * division.extent_bytes)
    assert blocks == (6 * 636, 636)
    assert division.sequence_blocks(blocks) == 3_750
    assert division.pool_bytes(blocks) == 636 * division.extent_bytes


def test_windows_alone_bound_no_sequence() -> None:
    division = SharedExtents((windowed(3), windowed(2, window=1_000)), splits_prompts=True)
    needed = division.pool_bytes_for_tokens(1_000_000)
    enough, too_few = division.group_blocks(needed), division.group_blocks(needed - division.extent_bytes)
    assert not division.bounds_sequences(enough)
    assert division.bounds_sequences(too_few)
    assert SharedExtents(division.groups, splits_prompts=False).bounds_sequences(enough)


@given(
    layers=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    window=st.integers(1, 100),
    num_tokens=st.integers(2, 400),
    splits_prompts=st.booleans(),
    num_extents=st.integers(1, 60),
    borrowed=st.just((0, 0)) | st.tuples(st.integers(0, 200), st.integers(0, 20)),
)
def test_the_core_takes_what_fits_and_nothing_longer(
    layers: tuple[int, int],
    window: int,
    num_tokens: int,
    splits_prompts: bool,
    num_extents: int,
    borrowed: tuple[int, int],
) -> None:
    groups = (full(layers[0]), windowed(layers[1], window=window))
    division = SharedExtents(groups, splits_prompts)
    counts = division.group_blocks(num_extents * division.extent_bytes)

    def takes(max_model_len: int) -> bool:
        specs = [
            GroupSpec(
                g.num_layers,
                counts[i],
                g.window,
                g.layer_block_bytes,
                blocks_per_extent=division.blocks_per_extent(i),
            )
            for i, g in enumerate(groups)
        ]
        links = [Link(i, count, 1, groups[i].block_bytes, 0) for i, count in enumerate(borrowed) if count]
        try:
            Scheduler(specs, 16, 4, 64, max_model_len, enable_chunked_prefill=splits_prompts, borrow_links=links)
        except ValueError:
            return False
        return True

    assert takes(num_tokens) == division.holds(ceil_div(num_tokens, 16), counts, borrowed)
    if not any(borrowed):
        assert takes(num_tokens) == (division.pool_bytes_for_tokens(num_tokens) <= division.pool_bytes(counts))
    longest = division.sequence_blocks(counts, borrowed) * 16
    if longest:
        assert takes(longest)
    assert not takes(longest + 16)


def test_groups_that_share_extents_see_the_same_bytes() -> None:
    groups = (full(2, 1, 16, 16), windowed(6, 1, 16, 16))
    division = SharedExtents(groups, splits_prompts=True)
    counts = division.group_blocks(5 * division.extent_bytes)
    pool = Pool(list(zip(groups, counts, strict=True)), shares_extents=True)
    assert pool.nbytes == 5 * division.extent_bytes
    of_full, of_window = pool.region_tensor(0), pool.region_tensor(1)
    of_window[3] = 7  # which is where the full group's blocks 9 to 11 are
    assert of_full.flatten(1).eq(7).all(1).nonzero().flatten().tolist() == [9, 10, 11]
    assert of_full.flatten(1).any(1).nonzero().flatten().tolist() == [9, 10, 11]
