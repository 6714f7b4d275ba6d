"""Judge from outside whether an engine makes progress: by the page that it shares, its process, and its coordinator."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from swiftkv.processes import read_vitals
from swiftkv.progress import ProgressPage, ProgressSample
from swiftkv.server.client import EngineClient
from swiftkv.server.engine_state import EngineState, Observation
from swiftkv.server.errors import ApiError
from swiftkv.server.lending import CoordinatorClient

_INTERVAL_S = 1.0
_PING_INTERVAL_S = 10.0
_NOTICEABLE_S = 5.0
_SLOW_S = 10.0
_BUSY = 0.2  # part of a core
_TIMES_THE_LONGEST = 3.0  # the most that a round of the step loop may take, as a multiple of the longest before it


@dataclass(frozen=True, slots=True)
class _Interval:
    """The time between two looks. Time in which the node itself did not run does not count against an engine."""

    now_s: float
    elapsed_s: float


class _Clock:
    """Ticks about every `interval_s`."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._last_s = time.monotonic()

    async def tick(self) -> _Interval:
        """Wait until the interval that began with the last tick is over, and return the time since then.

        A tick that is late does not wait; it counts as two intervals at most.
        """
        await asyncio.sleep(max(0.0, self._last_s + self._interval_s - time.monotonic()))
        now_s = time.monotonic()
        elapsed_s, self._last_s = now_s - self._last_s, now_s
        return _Interval(now_s, min(elapsed_s, 2 * self._interval_s))


class EngineWatch:
    """Watches one engine process, and reports its observations to the engine's client.

    An engine is hung if it has work and makes no progress for `watchdog_s`, or for several times as long as its longest
    step if that is more. Work is a request, a step in progress, weights to give up, extents that its lenders have
    recalled, or a question to its coordinator.
    """

    def __init__(
        self,
        client: EngineClient,
        coordinator: CoordinatorClient | None,
        *,
        watchdog_s: float | None,
        pid: int,
        page: ProgressPage,
    ) -> None:
        self._client = client
        self._coordinator = coordinator
        self._watchdog_s = watchdog_s
        self._pid = pid
        self._page = page
        self._noticeable_s = _NOTICEABLE_S if watchdog_s is None else min(_NOTICEABLE_S, watchdog_s / 2)
        self._ticks = 0
        self._progress_s = time.monotonic()
        self._cpu_s = 0.0
        self._idle_s = 0.0  # without progress
        self._hung_s = 0.0  # without progress, with something to do
        self._unanswered_s = 0.0  # by the coordinator
        self._owes_extents = False

    @property
    def is_unresponsive(self) -> bool:
        """Whether other engines may be waiting for this one in vain."""
        return self._idle_s >= 2 * _INTERVAL_S or self._unanswered_s > 0

    async def until_hung(self, waits_for_others: Callable[[], bool]) -> str:
        """Look about every second; return a reason once the step loop is hung. Waiting for others does not count."""
        clock = _Clock(_INTERVAL_S if self._watchdog_s is None else min(_INTERVAL_S, self._watchdog_s / 8))
        while True:
            interval = await clock.tick()
            sample = self._page.read()
            self._count(sample, interval, waits_for_others)
            self._client.load_meter.observe(sample.loaded_bytes)
            limit_s = max(self._watchdog_s or 0.0, _TIMES_THE_LONGEST * sample.longest_s)
            vitals = read_vitals(self._pid)
            if vitals is not None and self._client.engine is not None:
                cpu_s, self._cpu_s = vitals.cpu_s - self._cpu_s, vitals.cpu_s
                may_compute = cpu_s > _BUSY * interval.elapsed_s and self._hung_s < limit_s / 2
                state, why = self._judge(sample, vitals.is_stopped, may_compute)
                self._client.status.observe(Observation(state, why, self._progress_s))
            if self._watchdog_s is not None and self._hung_s > limit_s:
                return f"made no progress for {self._hung_s:.0f} s and was ended"

    async def until_silent(self) -> str:
        """Ask the coordinator now and then, and return a reason once it has been silent for too long."""
        assert self._coordinator is not None
        watchdog_s = self._watchdog_s
        interval_s = _PING_INTERVAL_S if watchdog_s is None else min(_PING_INTERVAL_S, watchdog_s / 4)
        clock = _Clock(interval_s)
        while True:
            interval = await clock.tick()
            if self._client.engine is None:
                continue
            try:
                state = await self._coordinator.show(with_extents=False, timeout_s=interval_s)
            except ApiError:
                self._unanswered_s += interval.elapsed_s
                if watchdog_s is not None and self._unanswered_s > watchdog_s:
                    return f"did not answer about lending for {self._unanswered_s:.0f} s and was ended"
            else:
                self._unanswered_s = 0.0
                self._owes_extents = any(link.counts.get("recalled") for link in state.borrows)

    def _count(self, sample: ProgressSample, interval: _Interval, waits_for_others: Callable[[], bool]) -> None:
        """Add up the time without progress, and the part of it that counts against the engine."""
        if sample.ticks != self._ticks:
            self._ticks, self._progress_s = sample.ticks, interval.now_s
            self._idle_s = self._hung_s = 0.0
            return
        self._idle_s += interval.elapsed_s
        if not (self._client.has_work or sample.working_s is not None or self._owes_extents):
            self._hung_s = 0.0
        elif not waits_for_others():
            self._hung_s += interval.elapsed_s

    def _judge(self, sample: ProgressSample, is_stopped: bool, may_compute: bool) -> tuple[EngineState, str | None]:
        """Return the state to show, and the reason. `may_compute`: the process computes, and not for too long."""
        if is_stopped:
            return EngineState.STOPPED, "is stopped by a signal or a debugger"
        makes_no_progress = self._idle_s >= self._noticeable_s
        if makes_no_progress and not may_compute:
            return EngineState.NOT_RESPONDING, f"has made no progress for {self._idle_s:.0f} s"
        if makes_no_progress or (sample.working_s or 0.0) > _SLOW_S:
            return EngineState.SLOW, f"has computed one step for {sample.working_s or self._idle_s:.0f} s"
        if self._unanswered_s >= self._noticeable_s:
            return EngineState.NOT_RESPONDING, f"has not answered about lending for {self._unanswered_s:.0f} s"
        return EngineState.READY, None
