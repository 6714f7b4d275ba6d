"""The errors of recent forecasts of the time to the first token, so that a refusal can allow for them."""

from __future__ import annotations

import math

import numpy as np

_RECENT = 512
_LEAST_ALIKE = 16  # similar requests; with fewer there is no allowance
_ALIKE_OCTAVES = 2.0


class ForecastErrors:
    """Remembers the latest forecasts, and how long each first token then took.

    Forecasts for similar requests have similar errors: with `hrrn`, shorter prompts that come later overtake a long
    one, but hardly ever a short one. So a request is compared with those whose prompt and forecast were about as long.
    """

    def __init__(self, part: float) -> None:
        """`part` of similar requests have their first token within the allowance."""
        self._part = part
        self._rows = np.zeros((_RECENT, 3))  # binary logarithms of tokens and of seconds forecast; actual over forecast
        self._num_noted = 0

    def note(self, num_left: int, forecast_s: float, actual_s: float) -> None:
        """Note when a first token came, of a prompt with so many tokens left to compute."""
        row = (math.log2(num_left), math.log2(forecast_s), actual_s / forecast_s)
        self._rows[self._num_noted % _RECENT] = row
        self._num_noted += 1

    def allowance(self, num_left: int, forecast_s: float) -> float:
        """Return the factor on the forecast within which `part` of similar requests had a token; 1 if they are few."""
        rows = self._rows[: self._num_noted]
        octaves = np.abs(rows[:, 0] - math.log2(num_left)) + np.abs(rows[:, 1] - math.log2(forecast_s))
        ratios = rows[octaves < _ALIKE_OCTAVES, 2]
        if len(ratios) < _LEAST_ALIKE:
            return 1.0
        rank = math.ceil(self._part * len(ratios)) - 1
        return float(np.partition(ratios, rank)[rank])
