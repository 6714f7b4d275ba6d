"""Refusals allow for how late requests alike were of late."""

from __future__ import annotations

import math

import numpy as np
import pytest

from swiftkv._core import ForecastErrors


def test_a_forecast_is_taken_as_it_is_until_enough_have_come() -> None:
    errors = ForecastErrors(0.8)
    for count in range(16):
        assert errors.allowance(500, 4.0) == 1.0, count
        errors.note(500, 4.0, 8.0)
    assert errors.allowance(500, 4.0) == 2.0


@pytest.mark.parametrize("part", [0.3, 0.8])
@pytest.mark.parametrize("scale", [0.5, 1.0, 3.0])
def test_that_part_of_those_that_come_later_is_within_the_allowance(scale: float, part: float) -> None:
    """The allowance holds, also where forecasts are too late on the whole."""
    rng = np.random.default_rng(0)
    errors = ForecastErrors(part)
    ratios = scale * rng.lognormal(0.0, 0.4, 3000)
    is_within = []
    for ratio in ratios:
        num_left, forecast_s = int(rng.integers(400, 800)), float(rng.uniform(3.0, 6.0))
        is_within.append(ratio <= errors.allowance(num_left, forecast_s))
        errors.note(num_left, forecast_s, ratio * forecast_s)
    assert np.mean(is_within[512:]) == pytest.approx(part, abs=0.03)


def test_only_requests_alike_count() -> None:
    errors = ForecastErrors(0.8)
    for _ in range(100):
        errors.note(4000, 5.0, 15.0)
        errors.note(20, 5.0, 5.0)
        errors.note(4000, 0.2, 0.1)
    assert errors.allowance(3500, 6.0) == pytest.approx(3.0)
    assert errors.allowance(25, 4.0) == pytest.approx(1.0)
    assert errors.allowance(4000, 0.3) == pytest.approx(0.5)
    assert errors.allowance(300, 60.0) == 1.0


def test_the_latest_replace_what_came_long_ago() -> None:
    errors = ForecastErrors(0.8)
    for ratio in (4.0, 1.5):
        for _ in range(512):
            errors.note(100, 1.0, ratio)
    assert errors.allowance(100, 1.0) == 1.5


def test_it_is_the_quantile_of_those_alike() -> None:
    rng = np.random.default_rng(0)
    noted: list[tuple[int, float, float]] = []
    errors = ForecastErrors(0.3)
    for _ in range(1500):
        num_left, forecast_s = int(rng.lognormal(6.0, 1.0)) + 1, float(rng.lognormal(1.0, 1.0))
        expected = naive_allowance(0.3, noted[-512:], num_left, forecast_s)
        assert errors.allowance(num_left, forecast_s) == pytest.approx(expected)
        noted.append((num_left, forecast_s, forecast_s * rng.lognormal(0.0, 0.5)))
        errors.note(*noted[-1])


def naive_allowance(part: float, noted: list[tuple[int, float, float]], num_left: int, forecast_s: float) -> float:
    alike = [
        actual_s / other_s
        for other_left, other_s, actual_s in noted
        if abs(math.log2(other_left / num_left)) + abs(math.log2(other_s / forecast_s)) < 2
    ]
    return sorted(alike)[math.ceil(part * len(alike)) - 1] if len(alike) >= 16 else 1.0
