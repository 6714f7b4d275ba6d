"""Policies that say how many blocks of a KV group a lender keeps, by the recent demand of its own requests.

They read no clock: the caller passes the time, of any clock that does not run backwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

_BUCKETS = 16
"""The number of pieces in which a window is remembered: a value is forgotten after 1 to 1 + 1/16 windows."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The demand for one KV group since the last look, in blocks."""

    total_peak: int  # the most that running and waiting requests wanted together
    longest: int  # the most that one request wanted
    total_now: int
    shortfall: int  # the part of `total_now` that fits neither the pool, less what is lent, nor the borrowed extents


class LendPolicy(Protocol):
    def observe(self, now_s: float, demand: Demand) -> None:
        """Note the demand up to now."""

    def keep_blocks(self, now_s: float) -> int:
        """Return the number of blocks to keep; the others may be lent, in whole extents and within the budget."""


class TotalDemandPolicy:
    """Keep the blocks that all requests together needed at the busiest moment of the window, and a reserve.

    The reserve is a part of that peak, at least `min_reserve_blocks`, so that a slightly larger request finds its
    blocks free and needs no recall. A lender without a request in the window keeps nothing.
    The number of blocks kept does not follow every change of the peak:

    - it rises at once, to the peak and a whole reserve, when less than half a reserve would be left above the peak;
    - it falls to the same number only when more than two reserves would be left above the peak. A peak counts for a
      whole window.

    So demand that swings by less than half a reserve, or faster than the window, moves no extent.
    """

    def __init__(self, window_s: float, reserve_part: float = 1 / 16, min_reserve_blocks: int = 4) -> None:
        assert 0 <= reserve_part <= 1
        assert min_reserve_blocks >= 0
        self._reserve_part = reserve_part
        self._min_reserve_blocks = min_reserve_blocks
        self._peaks = _WindowMaximum(window_s)
        self._kept = 0

    def observe(self, now_s: float, demand: Demand) -> None:
        self._peaks.add(now_s, max(demand.total_peak, demand.total_now))

    def keep_blocks(self, now_s: float) -> int:
        peak = self._peaks.value(now_s)
        reserve = max(self._min_reserve_blocks, int(peak * self._reserve_part)) if peak else 0
        if not peak + reserve // 2 <= self._kept <= peak + 2 * reserve:
            self._kept = peak + reserve
        return self._kept


class LongestRequestPolicy:
    """Keep the blocks that the longest single request of the window needed: the paper's Algorithm 1.

    It ignores that several requests run at once. Nothing but the window damps its changes.
    """

    def __init__(self, window_s: float) -> None:
        self._longest = _WindowMaximum(window_s)

    def observe(self, now_s: float, demand: Demand) -> None:
        self._longest.add(now_s, demand.longest)

    def keep_blocks(self, now_s: float) -> int:
        return self._longest.value(now_s)


class _WindowMaximum:
    """The largest value of the last `window_s`, in constant memory and time.

    Time is cut into buckets; the ring has one for each bucket of the window and one for the bucket that has begun.
    """

    def __init__(self, window_s: float) -> None:
        assert window_s > 0
        self._bucket_s = window_s / _BUCKETS
        self._ring = [0] * (_BUCKETS + 1)
        self._newest = 0  # number of the newest bucket, from time 0 on

    def add(self, now_s: float, value: int) -> None:
        self._advance(now_s)
        index = self._newest % len(self._ring)
        self._ring[index] = max(self._ring[index], value)

    def value(self, now_s: float) -> int:
        """Return the largest value, 0 if there was none."""
        self._advance(now_s)
        return max(self._ring)

    def _advance(self, now_s: float) -> None:
        bucket = int(now_s // self._bucket_s)
        first = max(self._newest + 1, bucket - _BUCKETS)
        for passed in range(first, bucket + 1):
            self._ring[passed % len(self._ring)] = 0
        self._newest = max(self._newest, bucket)
