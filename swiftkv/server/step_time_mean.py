"""The times of steps that an engine has reported of late, on average."""

from __future__ import annotations

from collections.abc import Sequence

_REPORTS = 300
"""A busy engine reports ten times a second."""


class StepTimeMean:
    """Averages the reports of about half a minute of work, and of less at first, later ones more.

    An engine fits its step times to its latest hundred steps or so, which may take a second, so that its scheduler
    follows a machine that becomes slower. A simulation of minutes needs what holds for minutes.
    """

    def __init__(self) -> None:
        self.terms_s: list[float] = []
        """Seconds of each of STEP_TIME_TERMS; empty before the first report that has any."""
        self._count = 0

    def note(self, step_time_s: Sequence[float]) -> None:
        """Take a report; an empty one says nothing."""
        if not step_time_s:
            return
        self._count += 1
        part = max(2 / (self._count + 1), 1 / _REPORTS)
        before = self.terms_s or step_time_s
        self.terms_s = [old + part * (new - old) for old, new in zip(before, step_time_s, strict=True)]
