"""When a prompt that arrives interrupts others, against a simulation in small steps."""

from __future__ import annotations

import numpy as np
import pytest

from swiftkv.server.response_ratio import Waiting, part_before

TICK_S = 1e-3


def naive_part(left: float, waited_s: float, speed: float, own_left: int) -> float:
    """Return the part of a single prompt that is computed until the newcomer's ratio is as high."""
    time_s = 0.0
    while left - speed * time_s > 0:
        if time_s / own_left >= (waited_s + time_s) / (left - speed * time_s):
            return time_s * speed / left
        time_s += TICK_S
    return 1.0


@pytest.mark.parametrize("seed", range(20))
def test_a_long_prompt_is_computed_until_it_is_interrupted(seed: int) -> None:
    rng = np.random.default_rng(seed)
    left, waited_s, speed = float(rng.integers(500, 8000)), float(rng.uniform(0.1, 30)), float(rng.uniform(300, 900))
    own_left = int(rng.integers(10, int(left) // 4))
    waiting = Waiting(np.array([left, 0.0]), np.array([waited_s, 0.0]), np.array([left / speed, 0.0]))
    used = np.array([True, False])
    [part, nothing] = part_before(waiting, own_left, np.zeros(2, bool), used, step_s=0.0)
    assert part == pytest.approx(naive_part(left, waited_s, speed, own_left), abs=2 * TICK_S * speed / left + 1e-6)
    assert nothing == 0


def test_the_more_urgent_are_computed_whole_and_so_are_the_shorter() -> None:
    waiting = Waiting(np.array([5000.0, 50.0, 5000.0]), np.array([0.1, 9.0, 0.1]), np.array([7.0, 0.1, 7.0]))
    more_urgent, equal = np.array([True, False, False]), np.array([False, True, True])
    before = part_before(waiting, 200, more_urgent, equal, step_s=0.25)
    assert before.tolist() == [1.0, 1.0, 0.0]
