"""Values, counted in buckets: engines keep them, messages carry them, the gateway shows them to Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

import msgspec


class Histogram(msgspec.Struct, array_like=True):
    """`counts[i]` values were above bound `i - 1` and at most bound `i`; the last bucket has no bound."""

    bounds: tuple[float, ...]
    counts: list[int] = []
    total: float = 0.0

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> list[int]:
        """Return how many values were at most each bound, and at last the number of all."""
        return list(accumulate(self.counts))
