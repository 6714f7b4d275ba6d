"""The blocks that a worker keeps for itself, against lists of all demand so far."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftkv.worker.lend_policy import (
    Demand,
    LongestRequestPolicy,
    TotalDemandPolicy,
)

WINDOW_S = 60.0
BUCKET_S = WINDOW_S / 16

blocks = st.integers(0, 10_000)
# Waits of no time, of less than a bucket, of about a window, of many.
waits_s = st.one_of(st.just(0.0), st.floats(0, 5), st.floats(55, 70), st.floats(0, 1000))
histories = st.lists(st.tuples(waits_s, blocks, blocks), min_size=1, max_size=40)


def demand(peak: int, longest: int = 0) -> Demand:
    return Demand(total_peak=peak, longest=longest, total_now=0, shortfall=0)


def largest_since(seen: list[tuple[float, int]], start_s: float) -> int:
    return max((value for at_s, value in seen if at_s >= start_s), default=0)


@given(histories)
def test_the_longest_request_of_the_window_is_kept(history: list[tuple[float, int, int]]) -> None:
    """Nothing is forgotten within the window, nor remembered for a sixteenth longer; the total plays no part."""
    policy = LongestRequestPolicy(WINDOW_S)
    seen: list[tuple[float, int]] = []
    now_s = 0.0
    for wait_s, peak, longest in history:
        now_s += wait_s
        before = policy.keep_blocks(now_s)
        assert largest_since(seen, now_s - WINDOW_S) <= before <= largest_since(seen, now_s - WINDOW_S - BUCKET_S)
        # To the bucket: a peak lives until the seventeenth bucket after its own begins.
        exact = [(at_s, value) for at_s, value in seen if now_s // BUCKET_S - at_s // BUCKET_S <= 16]
        assert before == largest_since(exact, 0)
        policy.observe(now_s, demand(peak, longest))
        seen.append((now_s, longest))
        assert policy.keep_blocks(now_s) == max(before, longest)


@given(histories, st.integers(0, 50), st.sampled_from([0.0, 1 / 16, 0.5]))
def test_the_largest_total_is_kept_and_between_half_and_two_reserves(
    history: list[tuple[float, int, int]], min_reserve: int, part: float
) -> None:
    policy = TotalDemandPolicy(WINDOW_S, part, min_reserve)
    peaks = LongestRequestPolicy(WINDOW_S)  # the same window, checked above
    now_s, kept_before = 0.0, 0
    for wait_s, peak, longest in history:
        now_s += wait_s
        policy.observe(now_s, demand(peak, longest))
        peaks.observe(now_s, demand(0, longest=peak))
        kept, window_peak = policy.keep_blocks(now_s), peaks.keep_blocks(now_s)
        reserve = max(min_reserve, math.floor(window_peak * part)) if window_peak else 0
        assert window_peak + reserve // 2 <= kept <= window_peak + 2 * reserve
        assert kept in (kept_before, window_peak + reserve)
        assert policy.keep_blocks(now_s) == kept
        kept_before = kept


@given(st.lists(st.tuples(st.floats(0, 50), st.integers(0, 8)), max_size=50))
def test_demand_that_swings_within_half_a_reserve_moves_nothing(swings: list[tuple[float, int]]) -> None:
    policy = TotalDemandPolicy(WINDOW_S, reserve_part=0, min_reserve_blocks=16)
    policy.observe(0, demand(100))
    kept = policy.keep_blocks(0)
    now_s = 0.0
    for wait_s, more in swings:
        now_s += wait_s
        policy.observe(now_s, demand(100 + more))
        assert policy.keep_blocks(now_s) == kept == 116


def test_a_burst_is_kept_for_a_window_and_then_forgotten() -> None:
    policy = TotalDemandPolicy(WINDOW_S)
    policy.observe(0, demand(1600))
    assert policy.keep_blocks(0) == 1700
    for second in range(1, 60):
        policy.observe(second, demand(160))
        assert policy.keep_blocks(second) == 1700
    assert policy.keep_blocks(64) == 170
    policy.observe(1000, demand(1))
    assert policy.keep_blocks(1000) == 5
    assert policy.keep_blocks(1e6) == 0  # idle


def test_what_is_wanted_now_counts_too() -> None:
    policy = TotalDemandPolicy(WINDOW_S, reserve_part=0, min_reserve_blocks=0)
    policy.observe(0, Demand(total_peak=0, longest=0, total_now=7, shortfall=3))
    assert policy.keep_blocks(0) == 7


# Qwen3-14B lends to Qwen3-32B: 8 of its blocks are 5 of the master's.
@pytest.mark.parametrize(
    ("longest_tokens", "moved"),
    [
        (1600, (0, 0)),  # needs the 100 blocks that there are
        (1585, (0, 0)),  # the last of them is not full
        (5000, (0, 0)),  # needs more than there are
        (1500, (0, 0)),  # 94 blocks: 6 are spare, fewer than one unit
        (1000, (32, 20)),  # 63 blocks: 37 are spare, four units
        (0, (96, 60)),
    ],
)
def test_algorithm_1_scale_down(longest_tokens: int, moved: tuple[int, int]) -> None:
    policy = LongestRequestPolicy(WINDOW_S)
    policy.observe(0, demand(0, longest=math.ceil(longest_tokens / 16)))
    extents = max(0, 100 - policy.keep_blocks(0)) // 8  # the extents that a lender would lend
    assert (8 * extents, 5 * extents) == moved
