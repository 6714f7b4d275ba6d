"""The breaker, in a time that the tests make, and calls that do not come back, in real time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftkv.storage.backend import Capabilities, Parts, Status
from swiftkv.storage.breaker import FAILURES_IN_A_ROW, OPEN_S, WINDOW_CALLS, Breaker, GuardedMedium
from tests.support.storage import Clock, MemoryMedium

PARTS = (memoryview(bytearray(2)), memoryview(bytearray(3)))


class PlannedMedium(MemoryMedium):
    """Takes as long as it is told, and answers as it is told."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(name=str(id(self)))
        self.clock = clock
        self.takes_s = 0.01
        self.answer: Status | Exception = Status.OK
        self.calls = 0

    def read(self, keys: Sequence[bytes], into: Sequence[Parts], deadline_s: float) -> list[Status]:
        return self._answer_for(keys)

    def write(self, keys: Sequence[bytes], sources: Sequence[Parts], deadline_s: float) -> list[Status]:
        return self._answer_for(keys)

    def _answer_for(self, keys: Sequence[bytes]) -> list[Status]:
        self.calls += 1
        self.clock.now_s += self.takes_s
        if isinstance(self.answer, Exception):
            raise self.answer
        return [self.answer] * len(keys)


class BreakingMedium(MemoryMedium):
    """Tells of one object, and then raises."""

    def read(self, keys: Sequence[bytes], into: Sequence[Parts], deadline_s: float) -> Iterator[Status]:
        yield Status.OK
        raise OSError("disk")


class HurriedMedium(MemoryMedium):
    """Has time for one object in each call."""

    def read(self, keys: Sequence[bytes], into: Sequence[Parts], deadline_s: float) -> list[Status]:
        return [Status.OK] + [Status.LATE] * (len(keys) - 1)


class HangingMedium(MemoryMedium):
    """Reads end when they are let go."""

    def __init__(self) -> None:
        super().__init__(name=str(id(self)))
        self.has_begun = threading.Semaphore(0)
        self.may_end = threading.Event()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(is_durable=False, is_shared=False, max_calls=2)

    def read(self, keys: Sequence[bytes], into: Sequence[Parts], deadline_s: float) -> list[Status]:
        self.has_begun.release()
        self.may_end.wait()
        return [Status.OK] * len(keys)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def medium(clock: Clock) -> PlannedMedium:
    return PlannedMedium(clock)


@pytest.fixture
def guard(medium: PlannedMedium, clock: Clock) -> GuardedMedium:
    return GuardedMedium(medium, Breaker(clock), clock)


def read(guard: GuardedMedium, given_s: float = 1.0) -> Status:
    (status,) = guard.read([b"key"], [PARTS], guard.clock() + given_s)
    return status


def write(guard: GuardedMedium) -> Status:
    (status,) = guard.write([b"key"], [PARTS], guard.clock() + 1.0)
    return status


def fail(guard: GuardedMedium, medium: PlannedMedium, times: int) -> None:
    medium.answer = OSError("planned")
    assert [read(guard) for _ in range(times)] == [Status.FAILED] * times
    medium.answer = Status.OK


def test_five_failures_in_a_row_open_it(guard: GuardedMedium, medium: PlannedMedium) -> None:
    fail(guard, medium, FAILURES_IN_A_ROW - 1)
    assert read(guard) is Status.OK
    fail(guard, medium, FAILURES_IN_A_ROW - 1)
    assert not guard.is_degraded
    fail(guard, medium, 1)
    assert guard.is_degraded
    calls = medium.calls
    assert read(guard) is Status.FAILED
    assert guard.exists([b"key"], guard.clock() + 1.0) == [False]
    assert guard.write([b"key"], [PARTS], guard.clock() + 1.0) == [Status.FAILED]
    assert guard.usage() is None
    assert medium.calls == calls


def test_one_probe_closes_it(guard: GuardedMedium, medium: PlannedMedium, clock: Clock) -> None:
    fail(guard, medium, FAILURES_IN_A_ROW)
    clock.now_s += OPEN_S - 0.1
    assert read(guard) is Status.FAILED
    clock.now_s += 0.1
    assert guard.is_degraded
    assert read(guard) is Status.OK
    assert not guard.is_degraded
    fail(guard, medium, FAILURES_IN_A_ROW - 1)
    assert not guard.is_degraded


def test_a_probe_that_fails_opens_it_again(guard: GuardedMedium, medium: PlannedMedium, clock: Clock) -> None:
    fail(guard, medium, FAILURES_IN_A_ROW)
    clock.now_s += OPEN_S
    fail(guard, medium, 1)
    clock.now_s += OPEN_S - 0.1
    assert read(guard) is Status.FAILED
    clock.now_s += 0.1
    assert read(guard) is Status.OK


def test_only_one_probe_at_a_time(clock: Clock) -> None:
    breaker = Breaker(clock)
    breaker.trip()
    clock.now_s += OPEN_S
    era = breaker.admit()
    assert era is not None
    assert breaker.admit() is None
    breaker.forget(era)
    assert breaker.admit() == era
    breaker.record(era, False, 0.1)
    assert not breaker.is_open


def test_results_from_before_it_opened_do_not_count(clock: Clock) -> None:
    breaker = Breaker(clock)
    old = breaker.admit()
    assert old is not None
    breaker.trip()
    clock.now_s += OPEN_S
    assert breaker.admit() is not None
    breaker.record(old, False, 0.1)
    assert breaker.is_open


@pytest.mark.parametrize("error", [OSError("disk"), TimeoutError("slow"), ValueError("others' code"), KeyError(1)])
def test_whatever_a_medium_raises_is_a_status(guard: GuardedMedium, medium: PlannedMedium, error: Exception) -> None:
    medium.answer = error
    expected = Status.LATE if isinstance(error, TimeoutError) else Status.FAILED
    assert [read(guard) for _ in range(FAILURES_IN_A_ROW)] == [expected] * FAILURES_IN_A_ROW
    assert guard.is_degraded


class CarelessMedium(MemoryMedium):
    """Has as many answers as it is told, as numbers, and does not close."""

    def __init__(self, answers: list[int] | None) -> None:
        super().__init__(name=str(id(self)))
        self.answers: Any = answers

    def exists(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        return self.answers  # type: ignore[no-any-return]

    def read(self, keys: Sequence[bytes], into: Sequence[Parts], deadline_s: float) -> list[Status]:
        return self.answers  # type: ignore[no-any-return]

    def write(self, keys: Sequence[bytes], sources: Sequence[Parts], deadline_s: float) -> list[Status]:
        return self.answers  # type: ignore[no-any-return]

    def close(self) -> None:
        raise RuntimeError("others' code")


@pytest.mark.parametrize(
    ("answers", "as_read", "as_written", "found"),
    [
        ([0, 1], [Status.OK, Status.MISSING], [Status.OK, Status.MISSING], [False, True]),
        ([0], [Status.OK, Status.FAILED], [Status.FAILED] * 2, [False] * 2),
        ([0, 0, 0], [Status.OK] * 2, [Status.FAILED] * 2, [False] * 2),
        ([0, 99], [Status.OK, Status.FAILED], [Status.FAILED] * 2, [False, True]),
        (None, [Status.FAILED] * 2, [Status.FAILED] * 2, [False] * 2),
    ],
)
def test_answers_that_are_no_answers_are_failures(
    clock: Clock, answers: list[int] | None, as_read: list[Status], as_written: list[Status], found: list[bool]
) -> None:
    """Threads of the tier count on one status for each key, and would end without."""
    guard, keys = GuardedMedium(CarelessMedium(answers), Breaker(clock), clock), [b"a", b"b"]
    told = list(guard.read(keys, [PARTS] * 2, guard.clock() + 1.0))
    written = guard.write(keys, [PARTS] * 2, guard.clock() + 1.0)
    assert (told, written) == (as_read, as_written)
    assert all(isinstance(status, Status) for status in told + written)
    assert guard.exists(keys, guard.clock() + 1.0) == found


def test_a_medium_that_cannot_be_closed_holds_up_no_other(clock: Clock) -> None:
    GuardedMedium(CarelessMedium([]), Breaker(clock), clock).close()


def test_what_was_told_before_a_medium_raised_stands(clock: Clock) -> None:
    guard = GuardedMedium(BreakingMedium(), Breaker(clock), clock)
    for _ in range(FAILURES_IN_A_ROW):
        assert not guard.is_degraded
        told = guard.read([b"a", b"b", b"c"], [PARTS] * 3, guard.clock() + 1.0)
        assert list(told) == [Status.OK, Status.FAILED, Status.FAILED]
    assert guard.is_degraded


@pytest.mark.parametrize("call", [read, write])
@pytest.mark.parametrize("status", [Status.FAILED, Status.LATE])
def test_failures_that_a_medium_tells_open_it_too(
    guard: GuardedMedium, medium: PlannedMedium, status: Status, call: Callable[[GuardedMedium], Status]
) -> None:
    medium.answer = status
    for _ in range(FAILURES_IN_A_ROW):
        assert not guard.is_degraded
        assert call(guard) is status
    assert guard.is_degraded


def test_a_call_for_more_than_there_was_time_for_is_no_failure(clock: Clock) -> None:
    guard = GuardedMedium(HurriedMedium(), Breaker(clock), clock)
    for _ in range(2 * FAILURES_IN_A_ROW):
        told = guard.read([b"a", b"b", b"c"], [PARTS] * 3, guard.clock() + 1.0)
        assert list(told) == [Status.OK, Status.LATE, Status.LATE]
    assert not guard.is_degraded


@pytest.mark.parametrize("status", [Status.OK, Status.MISSING, Status.CORRUPT])
def test_what_is_missing_or_corrupt_is_no_failure(guard: GuardedMedium, medium: PlannedMedium, status: Status) -> None:
    medium.answer = status
    assert {read(guard) for _ in range(2 * WINDOW_CALLS)} == {status}
    assert not guard.is_degraded


def test_one_call_in_fifty_may_be_a_little_late_and_two_may_not(guard: GuardedMedium, medium: PlannedMedium) -> None:
    def calls(number: int, takes_s: float) -> None:
        medium.takes_s = takes_s
        for _ in range(number):
            read(guard)

    calls(WINDOW_CALLS, 0.01)
    calls(1, 1.5)
    calls(WINDOW_CALLS - 2, 0.01)
    assert not guard.is_degraded
    calls(1, 1.5)
    assert guard.is_degraded


def test_before_fifty_calls_slowness_alone_opens_nothing(guard: GuardedMedium, medium: PlannedMedium) -> None:
    medium.takes_s = 3.0
    for _ in range(WINDOW_CALLS - 1):
        assert read(guard) is Status.OK
    assert not guard.is_degraded
    read(guard)
    assert guard.is_degraded


def test_a_call_that_was_given_no_time_says_nothing(guard: GuardedMedium, medium: PlannedMedium, clock: Clock) -> None:
    medium.answer = Status.LATE
    for _ in range(2 * WINDOW_CALLS):
        assert read(guard, given_s=0.05) is Status.LATE
    assert not guard.is_degraded
    fail(guard, medium, FAILURES_IN_A_ROW)
    clock.now_s += OPEN_S
    medium.answer = Status.LATE
    read(guard, given_s=0.05)  # a probe without a result
    medium.answer = Status.OK
    assert read(guard) is Status.OK
    assert not guard.is_degraded


@given(st.lists(st.booleans(), max_size=60))
def test_it_opens_exactly_after_five_failures_in_a_row(results: list[bool]) -> None:
    breaker = Breaker(Clock())
    row = 0
    for has_failed in results:
        era = breaker.admit()
        if row == FAILURES_IN_A_ROW:
            assert era is None
            return
        assert era is not None
        breaker.record(era, has_failed, 0.1)
        row = row + 1 if has_failed else 0


def test_waiting_for_a_place_is_late_and_does_not_count(clock: Clock) -> None:
    """The calls that hold the places are still within their time."""
    medium = HangingMedium()
    guard = GuardedMedium(medium, Breaker(clock), clock)
    readers = [threading.Thread(target=read, args=(guard, 60.0), daemon=True) for _ in range(2)]
    for reader in readers:
        reader.start()
        assert medium.has_begun.acquire(timeout=60)
    for _ in range(2 * FAILURES_IN_A_ROW):
        assert read(guard, given_s=0.001) is Status.LATE
    assert not guard.is_degraded
    medium.may_end.set()
    for reader in readers:
        reader.join()
    assert read(guard) is Status.OK


def test_a_call_that_does_not_come_back_is_seen_though_there_are_places_left(clock: Clock) -> None:
    medium = HangingMedium()
    guard = GuardedMedium(medium, Breaker(clock), clock)
    reader = threading.Thread(target=read, args=(guard, 60.0), daemon=True)
    reader.start()
    assert medium.has_begun.acquire(timeout=60)
    clock.now_s += 60.5
    assert not guard.is_degraded
    clock.now_s += 1.0
    assert guard.is_degraded
    medium.may_end.set()
    reader.join()
    assert not guard.is_degraded
    assert read(guard) is Status.OK


def test_calls_that_do_not_come_back_open_it(clock: Clock) -> None:
    medium = HangingMedium()
    guard = GuardedMedium(medium, Breaker(clock), clock)
    readers = [threading.Thread(target=read, args=(guard, 60.0), daemon=True) for _ in range(2)]
    for reader in readers:
        reader.start()
        assert medium.has_begun.acquire(timeout=60)
    clock.now_s += 62.0
    assert read(guard, given_s=0.001) is Status.LATE
    assert guard.is_degraded
    assert read(guard) is Status.FAILED
    medium.may_end.set()
    for reader in readers:
        reader.join()
    assert guard.is_degraded
    clock.now_s += OPEN_S
    assert read(guard) is Status.OK
    assert not guard.is_degraded
