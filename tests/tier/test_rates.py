"""Loading is chosen where it was measured to be faster."""

from __future__ import annotations

import pytest

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
