"""Loading is chosen where it was measured to be faster."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from swiftkv.tier import rates
from swiftkv.tier.rates import LoadPlanner, Rate


def test_a_rate_follows_what_was_measured_late() -> None:
    rate = Rate()
    assert rate.seconds_for(1) is None
    rate.add(100, 1.0)
    assert rate.seconds_for(50) == pytest.approx(0.5)
    for _ in range(40):
        rate.add(100, 4.0)
    assert rate.seconds_for(50) == pytest.approx(2.0, rel=0.01)


def test_what_is_not_known_is_tried() -> None:
    planner = LoadPlanner()
    assert planner.is_worth_loading(1 << 20, 0, None)
    assert planner.is_worth_loading(1 << 20, 0, 0.001)
    planner.note_read(1 << 20, 50.0, now_s=10.0)
    assert planner.is_worth_loading(1 << 20, 0, None)


def test_the_sooner_of_loading_and_computing_is_chosen() -> None:
    planner = LoadPlanner()
    planner.note_read(1 << 20, 0.5, now_s=10.0)
    assert planner.is_worth_loading(1 << 20, 0, 1.0)
    assert not planner.is_worth_loading(3 << 20, 0, 1.0)
    assert not planner.is_worth_loading(1 << 20, 2 << 20, 1.0)


def test_a_slow_storage_is_tried_again_after_a_while() -> None:
    planner = LoadPlanner()
    planner.note_read(1 << 20, 50.0, now_s=10.0)
    assert not planner.is_worth_loading(1 << 20, 0, 1.0)
    assert not planner.begins_trial(39.0)
    assert planner.begins_trial(41.0)
    assert not planner.begins_trial(42.0)


def test_a_storage_that_was_late_for_every_byte_is_not_worth_it() -> None:
    planner = LoadPlanner()
    planner.note_read(0, 1.0, now_s=10.0)
    assert not planner.is_worth_loading(1, 0, 1.0)


MIB = 1 << 20


def blocks_of(num_bytes: int) -> Callable[[int], int]:
    """Return how many bytes are loaded of a hundred blocks if so many are computed."""
    return lambda num_computed: (100 - num_computed) * num_bytes


@pytest.mark.parametrize("factor", [0.4, 0.5, 1.0, 2.0, 3.0])
def test_both_ends_are_divided_so_that_they_take_equally_long(factor: float) -> None:
    """Computing a block takes a second, and loading one `factor` of it."""
    planner = LoadPlanner()
    planner.note_read(MIB, factor, now_s=10.0)
    num_computed = planner.num_to_compute(100, blocks_of(MIB), 0, float)
    assert num_computed is not None
    load_s = factor * (100 - num_computed)
    assert load_s <= num_computed <= load_s + 1 + factor
    assert num_computed <= 0.8 * 100 * min(1, factor)


def test_one_of_both_alone_is_chosen_where_both_together_gain_little() -> None:
    planner = LoadPlanner()
    planner.note_read(MIB, 0.05, now_s=10.0)
    assert planner.num_to_compute(100, blocks_of(MIB), 0, float) is None
    assert planner.num_to_compute(100, blocks_of(400 * MIB), 0, float) is None
    assert planner.num_to_compute(1, lambda count: (1 - count) * 20 * MIB, 0, float) is None


@pytest.mark.parametrize(("step_s", "num_not_loaded"), [(0.0, 10), (0.5, 10), (3.0, 20)])
def test_half_of_what_is_computed_is_loaded_too_if_a_step_more_costs_little(step_s: float, num_not_loaded: int) -> None:
    """Computing a block takes a second, and each step so much more."""
    assert rates.num_not_loaded(20, lambda begin, end: step_s + end - begin) == num_not_loaded


def test_of_a_front_of_one_block_all_is_computed() -> None:
    assert rates.num_not_loaded(1, lambda begin, end: float(end - begin)) == 1


def test_what_others_load_first_is_time_to_compute() -> None:
    planner = LoadPlanner()
    planner.note_read(MIB, 1.0, now_s=10.0)
    alone, behind_others = (planner.num_to_compute(100, blocks_of(MIB), queued * MIB, float) for queued in (0, 50))
    assert alone is not None
    assert behind_others is not None
    assert behind_others > alone


def test_nothing_is_divided_before_both_are_measured() -> None:
    planner = LoadPlanner()
    assert planner.num_to_compute(100, blocks_of(MIB), 0, float) is None
    planner.note_read(MIB, 1.0, now_s=10.0)
    assert planner.num_to_compute(100, blocks_of(MIB), 0, lambda _: None) is None
    late = LoadPlanner()
    late.note_read(0, 1.0, now_s=10.0)
    assert late.num_to_compute(100, blocks_of(MIB), 0, float) is None


def test_bytes_that_are_loaded_in_any_case_are_time_to_compute() -> None:
    """A tail of a window is as large wherever the front ends; where it takes as long as computing all, that is done."""
    planner = LoadPlanner()
    planner.note_read(MIB, 1.0, now_s=10.0)

    def num_computed(tail: int) -> int | None:
        return planner.num_to_compute(100, lambda count: (100 - count + tail) * MIB, 0, float)

    assert [num_computed(tail) for tail in (0, 20, 100)] == [50, 60, None]
