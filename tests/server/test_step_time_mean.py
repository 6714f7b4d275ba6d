from __future__ import annotations

import numpy as np
import pytest

from swiftkv.server.step_time_mean import StepTimeMean


def test_it_says_nothing_before_an_engine_knows() -> None:
    mean = StepTimeMean()
    mean.note([])
    assert mean.terms_s == []
    mean.note([1.0, 2.0])
    mean.note([])
    assert mean.terms_s == [1.0, 2.0]


def test_reports_are_averaged_and_first_ones_soon_count_little() -> None:
    rng = np.random.default_rng(0)
    mean = StepTimeMean()
    mean.note([100.0])
    for _ in range(200):
        mean.note([float(rng.normal(1.0, 0.2))])
    assert mean.terms_s == [pytest.approx(1.0, abs=0.1)]


def test_a_machine_that_slows_down_is_followed() -> None:
    mean = StepTimeMean()
    for seconds in (1.0, 3.0):
        for _ in range(1500):
            mean.note([seconds])
    assert mean.terms_s == [pytest.approx(3.0, rel=0.01)]
