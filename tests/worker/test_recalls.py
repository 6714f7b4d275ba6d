"""Recalls end when their extents are home, and their durations are counted."""

from __future__ import annotations

import numpy as np

from swiftkv.worker.recalls import RECALL_SECONDS_BOUNDS, Recalls


def extents(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_a_batch_is_home_with_its_last_extent() -> None:
    recalls = Recalls([4, 4])
    serial, batch = recalls.begin("budget", 10.0)
    recalls.add(serial, 0, extents(0, 2), 100)
    recalls.add(serial, 1, extents(3), 1000)
    other_serial, other = recalls.begin("demand", 11.0)
    recalls.add(other_serial, 0, extents(1), 100)
    assert (batch.missing, batch.num_bytes, other.missing) == (3, 1200, 1)
    recalls.came_home(0, extents(2, 1, 3), 12.0)  # one of each, and one that was given back unasked
    assert (batch.missing, other.missing) == (2, 0)
    recalls.came_home(1, extents(3), 12.0)
    recalls.came_home(0, extents(0), 10.5 + 2)
    assert batch.missing == 0
    assert recalls.total == {"budget": 1, "demand": 1}
    histogram = recalls.seconds
    assert (histogram.count, histogram.total) == (2, 1.0 + 2.5)
    assert histogram.bounds == RECALL_SECONDS_BOUNDS
    by_bound = dict(zip(histogram.bounds, histogram.cumulative(), strict=False))
    assert [by_bound[bound] for bound in (0.5, 1.0, 2.0, 5.0, 30.0)] == [0, 1, 1, 2, 2]


def test_what_takes_longer_than_every_bound_is_counted_and_no_more() -> None:
    recalls = Recalls([1])
    for _ in range(2):
        serial, _batch = recalls.begin("budget", 0.0)
        recalls.add(serial, 0, extents(0), 1)
        recalls.came_home(0, extents(0), 1000.0)
    recalls.came_home(0, extents(0), 2000.0)
    assert (recalls.seconds.cumulative()[-2], recalls.seconds.count, recalls.seconds.total) == (0, 2, 2000.0)
