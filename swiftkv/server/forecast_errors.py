"""How far off forecasts of the time to the first token were of late, so that a refusal can allow for it."""

from __future__ import annotations

import math

import numpy as np

_RECENT = 512
_LEAST_ALIKE = 16  # before so many have come, nothing is known
_ALIKE_OCTAVES = 2.0
_PART = 0.8
"""The part of requests alike that is not later than allowed for; benchmarks/README.md has what others do."""


class ForecastErrors:
    """Remembers the latest forecasts beside what came.

    Requests alike err alike: with `hrrn` shorter prompts that come later overtake a long one, and hardly anybody
    overtakes a short one. So a request is compared with those whose prompt and whose forecast were about as long.
    """

    def __init__(self) -> None:
        self._rows = np.zeros((_RECENT, 3))  # binary logarithms of tokens and of seconds forecast; actual over forecast
        self._num_noted = 0

    def note(self, num_left: int, foretold_s: float, actual_s: float) -> None:
        """Note when a first token came, of a prompt with so many tokens left to compute."""
        row = (math.log2(num_left), math.log2(foretold_s), actual_s / foretold_s)
        self._rows[self._num_noted % _RECENT] = row
        self._num_noted += 1

    def allowance(self, num_left: int, foretold_s: float) -> float:
        """Return how many times the forecast a request may take: most of those alike took less. 1 while few came."""
        rows = self._rows[: self._num_noted]
        octaves = np.abs(rows[:, 0] - math.log2(num_left)) + np.abs(rows[:, 1] - math.log2(foretold_s))
        ratios = rows[octaves < _ALIKE_OCTAVES, 2]
        if len(ratios) < _LEAST_ALIKE:
            return 1.0
        rank = math.ceil(_PART * len(ratios)) - 1
        return float(np.partition(ratios, rank)[rank])
