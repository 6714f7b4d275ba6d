"""The latest time at which each waiting prompt can begin and still have its first token in time."""

from __future__ import annotations

import heapq
import math

from swiftkv._core import ForecastErrors
from swiftkv.server.forecast import EngineForecast, Work

_PART = 0.8
"""The part of similar prompts that are computed within the allowance; benchmarks/results/forecasts.md has others."""
_MOST_ENDED = 256
"""The most outdated checks that are kept, of sequences that wait no longer, beside as many as sequences wait."""


class LastStarts:
    """Finds the waiting prompts that can no longer begin in time, before any time is spent on them.

    On arrival it is unknown which later prompts will go first. But once a prompt has waited too long, it is certain to
    be late. A prompt is allowed the time within which most similar ones were computed lately, because others may
    interrupt it. Times are by the clock of `forecast`.
    """

    def __init__(self, forecast: EngineForecast) -> None:
        self._forecast = forecast
        self._errors = ForecastErrors(_PART)
        self._due_s: dict[int, float] = {}  # of the prompts that wait
        self._checks: list[tuple[float, int]] = []  # a heap: when to look at each of them again
        self._begun: dict[int, tuple[Work, float]] = {}  # before its first token: the work expected, and its beginning

    def add(self, request_id: int, due_s: float) -> None:
        """Note when the first token of a sequence is due; do nothing while step times are unknown."""
        if self._forecast.work_of(request_id) is not None:
            self._due_s[request_id] = due_s
            heapq.heappush(self._checks, (-math.inf, request_id))
            self._drop_ended()

    def admitted(self, request_id: int, now_s: float) -> None:
        """Note that the engine has begun a sequence."""
        self._due_s.pop(request_id, None)
        work = self._forecast.work_of(request_id)
        if work is not None:
            self._begun.setdefault(request_id, (work, now_s))

    def token(self, request_id: int, now_s: float) -> None:
        """Note that a sequence has got a token."""
        self._due_s.pop(request_id, None)
        if begun := self._begun.pop(request_id, None):
            work, begun_s = begun
            self._errors.note(work.num_tokens, work.computing_s, now_s - begun_s)

    def end(self, request_id: int) -> None:
        """Forget a sequence, however it ended."""
        self._due_s.pop(request_id, None)
        self._begun.pop(request_id, None)

    def passed(self, now_s: float) -> list[int]:
        """Return the waiting sequences that can no longer begin in time, each of them once."""
        passed = []
        while self._checks and self._checks[0][0] <= now_s:
            _, request_id = heapq.heappop(self._checks)
            due_s = self._due_s.get(request_id)
            if due_s is None:
                continue
            last_start_s = self._last_start_s(request_id, due_s)
            if last_start_s > now_s:
                heapq.heappush(self._checks, (last_start_s, request_id))
            else:
                del self._due_s[request_id]
                passed.append(request_id)
        return passed

    def _drop_ended(self) -> None:
        """Forget the checks of sequences that wait no longer once they are many; some are due only in hours."""
        if len(self._checks) > 2 * len(self._due_s) + _MOST_ENDED:
            self._checks = [check for check in self._checks if check[1] in self._due_s]
            heapq.heapify(self._checks)

    def _last_start_s(self, request_id: int, due_s: float) -> float:
        work = self._forecast.work_of(request_id)
        if work is None:
            return math.inf
        allowance = max(1.0, self._errors.allowance(work.num_tokens, work.computing_s))
        return due_s - work.step_s - work.computing_s * allowance
