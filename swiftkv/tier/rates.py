"""How fast storage reads, as measured, and what is worth loading by that."""

from __future__ import annotations

import math

_DECAY = 0.8  # of what was measured before, with each new measurement
_TRIAL_INTERVAL_S = 30.0


class Rate:
    """An amount per second, from measurements of which older ones count less."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        self._amount = _DECAY * self._amount + amount
        self._seconds = _DECAY * self._seconds + seconds

    def seconds_for(self, amount: float) -> float | None:
        """Return the time that an amount takes; `None` before the first measurement."""
        if self._seconds == 0:
            return None
        return amount * self._seconds / self._amount if self._amount > 0 else math.inf


class LoadPlanner:
    """Decides whether to load a prefix or to compute it: the one that is expected to be over sooner.

    What has not been measured yet is tried. A storage that was too slow is tried again now and then, or nobody would
    notice that it has become faster.
    """

    def __init__(self) -> None:
        self._read = Rate()  # bytes
        self._measured_s: float | None = None  # when something was read

    def note_read(self, num_bytes: int, seconds: float, now_s: float) -> None:
        """Note that storage read `num_bytes` in `seconds`; 0 bytes if its time was over before the first came."""
        self._read.add(num_bytes, seconds)
        self._measured_s = now_s

    def is_worth_loading(self, num_bytes: int, queued_bytes: int, compute_s: float | None) -> bool:
        """Return whether loading, behind `queued_bytes` for others, is expected to take less than `compute_s`.

        `None`: it is not known yet how long computing would take.
        """
        load_s = self._read.seconds_for(num_bytes + queued_bytes)
        return load_s is None or compute_s is None or load_s < compute_s

    def begins_trial(self, now_s: float) -> bool:
        """Return whether nothing has been read for so long that one load should find out how fast storage is now."""
        if self._measured_s is not None and now_s - self._measured_s < _TRIAL_INTERVAL_S:
            return False
        self._measured_s = now_s
        return True
