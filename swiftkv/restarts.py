"""The number of an engine's restarts, and the delay before each."""

from __future__ import annotations

from collections import deque

from swiftkv.node_config import RestartConfig

_MAX_DELAY_S = 30.0
_MAX_DOUBLINGS = 60  # enough for any backoff to reach the longest delay; many more would overflow a float


class Restarts:
    """The restarts of one engine within the window.

    The delay doubles with each restart, up to half a minute, so that an engine serves soon after its fault has passed.
    A longer `backoff` is not doubled.
    """

    def __init__(self, config: RestartConfig) -> None:
        self._config = config
        self._times_s: deque[float] = deque()

    def __len__(self) -> int:
        return len(self._times_s)

    def next_delay_s(self, now_s: float) -> float | None:
        """Count one more restart and return the seconds to wait before it, or `None` if there were too many."""
        while self._times_s and self._times_s[0] < now_s - self._config.window:
            self._times_s.popleft()
        if len(self) >= self._config.limit:
            return None
        doubled_s = self._config.backoff * 2.0 ** min(len(self), _MAX_DOUBLINGS)
        self._times_s.append(now_s)
        return min(doubled_s, max(self._config.backoff, _MAX_DELAY_S))

    def forget(self) -> None:
        """Begin anew, as for an engine that never died."""
        self._times_s.clear()
