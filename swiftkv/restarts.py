"""How often and how soon an engine that died is started again."""

from __future__ import annotations

from collections import deque

from swiftkv.node_config import RestartConfig

_MAX_DELAY_S = 30.0
_MAX_DOUBLINGS = 60  # more of them reach the longest delay too, and make numbers that a float cannot hold


class Restarts:
    """The restarts of one engine within the window.

    The delay doubles with each of them, up to half a minute: then an engine whose fault has passed serves soon, however
    often it died before. A `backoff` that is longer than that is the delay of all.
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
        """Begin anew, as with an engine that never died."""
        self._times_s.clear()
