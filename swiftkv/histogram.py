"""Durations, counted in buckets: engines keep them, messages carry them, the gateway shows them to Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

import msgspec


class Histogram(msgspec.Struct, array_like=True):
    """`counts[i]` durations were longer than bound `i - 1` and at most bound `i`; the last bucket has no bound."""

    bounds_s: tuple[float, ...]
    counts: list[int] = []
    sum_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds_s) + 1)

    def add(self, duration_s: float) -> None:
        self.counts[bisect_left(self.bounds_s, duration_s)] += 1
        self.sum_s += duration_s

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> list[int]:
        """Return how many durations were at most each bound, and at last the number of all."""
        return list(accumulate(self.counts))
