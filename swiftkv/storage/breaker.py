"""Keeps calls away from a medium that fails or is slow, until a probe succeeds."""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TypeVar

from swiftkv.storage.backend import Capabilities, Medium, Parts, Status, Usage

FAILURES_IN_A_ROW = 5
WINDOW_CALLS = 50
OPEN_S = 30.0
_QUANTILE = 0.99
_FAIR_S = 0.1
"""The shortest time limit of a call that counts for the speed of a medium."""
HUNG_S = 1.0
"""The time beyond its deadline after which a call counts as hung."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Breaker:
    """Lets calls pass while closed, and none for `OPEN_S` once open. Then one probe passes, and closes or reopens it.

    It opens after `FAILURES_IN_A_ROW`. It also opens if calls are late: if the 99th percentile of (time taken ÷ time
    given) over the last `WINDOW_CALLS` calls, interpolated, is above 1. One call that is a little late does not open
    it, two do. Results of calls that began before it last opened or closed are ignored.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._era = 0  # counts openings and closings
        self._open_until_s: float | None = None
        self._is_probing = False
        self._failures = 0
        self._shares: deque[float] = deque(maxlen=WINDOW_CALLS)

    @property
    def is_open(self) -> bool:
        """Whether calls other than a probe are refused."""
        return self._open_until_s is not None

    def would_admit(self) -> bool:
        """Return whether `admit` would let a call pass now."""
        with self._lock:
            return self._would_admit()

    def admit(self) -> int | None:
        """Let a call pass, and return the era for `record`; `None` if it may not pass."""
        with self._lock:
            if not self._would_admit():
                return None
            self._is_probing = self.is_open
            return self._era

    def record(self, era: int, has_failed: bool, share: float) -> None:
        """Note the result of a call: whether it failed, and the part that it took of the time given to it."""
        with self._lock:
            if era != self._era:
                return
            if self._is_probing:
                self._open() if has_failed else self._close()
                return
            self._failures = self._failures + 1 if has_failed else 0
            self._shares.append(share)
            if self._failures >= FAILURES_IN_A_ROW or self._is_slow():
                self._open()

    def forget(self, era: int) -> None:
        """Ignore a call; if it was the probe, the next call is the probe."""
        with self._lock:
            if era == self._era:
                self._is_probing = False

    def trip(self) -> None:
        """Open the breaker, because calls do not return."""
        with self._lock:
            self._open()

    def _would_admit(self) -> bool:
        if self._open_until_s is None:
            return True
        return not self._is_probing and self._clock() >= self._open_until_s

    def _is_slow(self) -> bool:
        if len(self._shares) < WINDOW_CALLS:
            return False
        ranked = sorted(self._shares)
        rank = _QUANTILE * (WINDOW_CALLS - 1)
        below = ranked[math.floor(rank)]
        return below + (rank - math.floor(rank)) * (ranked[math.ceil(rank)] - below) > 1.0

    def _open(self) -> None:
        if not self.is_open:
            _log.warning("storage: too many calls failed or were late; it is not used for %.0f s", OPEN_S)
        self._open_until_s = self._clock() + OPEN_S
        self._begin_era()

    def _close(self) -> None:
        _log.info("storage: in use again")
        self._open_until_s = None
        self._begin_era()

    def _begin_era(self) -> None:
        self._era += 1
        self._is_probing = False
        self._failures = 0
        self._shares.clear()


class GuardedMedium:
    """A medium behind a breaker, with at most `max_calls` calls at once. It raises nothing.

    Waiting until fewer calls run does not count against the medium, unless all running calls hang.
    """

    def __init__(self, medium: Medium, breaker: Breaker, clock: Callable[[], float] = time.monotonic) -> None:
        self.breaker = breaker
        self.clock = clock
        self.places = threading.Semaphore(medium.capabilities.max_calls)
        self.running: dict[int, float] = {}  # when each call should end, by its `id`
        self._medium = medium

    @property
    def capabilities(self) -> Capabilities:
        return self._medium.capabilities

    @property
    def is_degraded(self) -> bool:
        """Whether calls are refused for now, or one hangs."""
        return self.breaker.is_open or any(self._are_hung())

    def exists(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        """Return for each key whether it is there: False, too, if that is not known."""
        with _Call(self, deadline_s) as call:
            if call.is_admitted:
                return _one_each(keys, map(bool, self._medium.exists(keys, deadline_s)))
        return [False] * len(keys)

    def read(self, keys: Sequence[bytes], into: Sequence[Parts], deadline_s: float) -> Iterator[Status]:
        """Fill the parts of keys that are OK, and yield the statuses, each as soon as the medium yields it.

        The call is over when all statuses have been taken.
        """
        statuses: list[Status] = []
        with _Call(self, deadline_s) as call:
            if call.is_admitted:
                for status in map(Status, self._medium.read(keys, into, deadline_s)):
                    if len(statuses) == len(keys):
                        raise ValueError(f"the medium gave more answers than there are keys: {len(keys)}")
                    statuses.append(status)
                    yield status
                call.note(statuses)
        yield from itertools.repeat(call.refusal, len(keys) - len(statuses))

    def write(self, keys: Sequence[bytes], sources: Sequence[Parts], deadline_s: float) -> list[Status]:
        """Keep copies of the parts."""
        with _Call(self, deadline_s) as call:
            if call.is_admitted:
                return call.note(_one_each(keys, map(Status, self._medium.write(keys, sources, deadline_s))))
        return [call.refusal] * len(keys)

    def drop(self, keys: Sequence[bytes]) -> None:
        """Remove objects. If the medium fails, they stay, and will be found corrupt again."""
        with _Call(self, self.clock() + HUNG_S) as call:
            if call.is_admitted:
                self._medium.drop(keys)

    def ask(self, question: Callable[[], T], deadline_s: float, otherwise: T) -> T:
        """Return the answer to a question that only this kind of medium has, or `otherwise` if it cannot answer."""
        with _Call(self, deadline_s) as call:
            if call.is_admitted:
                return question()
        return otherwise

    def usage(self) -> Usage | None:
        """Return the size of the medium; `None` if it is not known."""
        with _Call(self, self.clock() + HUNG_S) as call:
            if call.is_admitted:
                return self._medium.usage()
        return None

    def trip_if_hung(self) -> None:
        """Open the breaker if every place is taken by a call that hangs."""
        are_hung = self._are_hung()
        if are_hung and all(are_hung):
            self.breaker.trip()

    def close(self) -> None:
        """Close the medium. An error is only logged, so that other media are closed, too."""
        try:
            self._medium.close()
        except Exception as error:  # noqa: BLE001 (a medium may be a user's class)
            _log.warning("storage was not closed in order: %s", error, exc_info=error)

    def _are_hung(self) -> list[bool]:
        """Return whether each running call hangs."""
        now_s = self.clock()
        return [now_s > end_s + HUNG_S for end_s in list(self.running.values())]


def _one_each(keys: Sequence[bytes], answers: Iterable[T]) -> list[T]:
    """Return the answers of a medium. Raises `ValueError` unless there is one for each key."""
    listed = list(answers)
    if len(listed) != len(keys):
        raise ValueError(f"the medium gave {len(listed)} answers for {len(keys)} keys")
    return listed


class _Call:
    """One call: takes a place, asks the breaker, and reports the outcome to it."""

    def __init__(self, guard: GuardedMedium, deadline_s: float) -> None:
        self._guard = guard
        self._deadline_s = deadline_s
        self._given_s = deadline_s - guard.clock()
        self._era: int | None = None
        self._begin_s = 0.0
        self._has_place = False
        self._has_failed = False
        self._is_late = False
        self.refusal = Status.FAILED

    @property
    def is_admitted(self) -> bool:
        return self._era is not None

    def note(self, statuses: list[Status]) -> list[Status]:
        """Note failures. The call counts as late only if all keys are late: otherwise there were too many keys."""
        self._has_failed = Status.FAILED in statuses
        self._is_late = all(status is Status.LATE for status in statuses)
        return statuses

    def __enter__(self) -> _Call:
        guard = self._guard
        if not guard.breaker.would_admit():
            return self
        self._has_place = guard.places.acquire(timeout=max(0.0, self._given_s))
        if not self._has_place:
            self.refusal = Status.LATE
            guard.trip_if_hung()
            return self
        self._era = guard.breaker.admit()
        self._begin_s = guard.clock()
        guard.running[id(self)] = max(self._deadline_s, self._begin_s)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        guard = self._guard
        if self._has_place:
            del guard.running[id(self)]
            guard.places.release()
        is_told = isinstance(error, Exception) and not isinstance(error, AssertionError)
        if is_told:
            # A medium may be a user's class, and its errors must not end a thread of the tier.
            _log.warning("storage: %s", error, exc_info=None if isinstance(error, OSError) else error)
            self._is_late = isinstance(error, TimeoutError)
            self._has_failed = not self._is_late
            self.refusal = Status.LATE if self._is_late else Status.FAILED
        if self._era is not None:
            self._tell(self._era)
        return is_told

    def _tell(self, era: int) -> None:
        is_fair = self._given_s >= _FAIR_S
        if not is_fair and not self._has_failed:
            self._guard.breaker.forget(era)
            return
        share = (self._guard.clock() - self._begin_s) / self._given_s if is_fair else 0.0
        self._guard.breaker.record(era, self._has_failed or self._is_late, share)
