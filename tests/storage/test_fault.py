"""Every fault that can be put in is noticed, and none becomes an answer."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from swiftkv.storage.backend import Status
from tests.support.storage import BLOCK_BYTES, block_of, check_got, key_of, opened, put, soon

KEYS = [key_of(i) for i in range(40)]


def faulty(path: Path, **faults: object) -> dict[str, object]:
    return {
        "backend": "fault",
        "inner": {"path": str(path / "cache"), "size": "64MiB", "min_free": 0},
    } | faults


@pytest.mark.parametrize("fault", ["flip", "truncate"])
def test_what_is_spoiled_on_the_way_in_is_corrupt(tmp_path: Path, fault: str) -> None:
    with opened(faulty(tmp_path, **{fault: 1.0})) as backend:
        assert set(put(backend, KEYS)) == {Status.OK}
    with opened(faulty(tmp_path)) as backend:
        assert set(check_got(backend, KEYS)) == {Status.CORRUPT}
        assert set(check_got(backend, KEYS)) == {Status.MISSING}


@pytest.mark.parametrize("fault", ["flip", "truncate"])
def test_what_is_spoiled_on_the_way_out_is_corrupt(tmp_path: Path, fault: str) -> None:
    with opened(faulty(tmp_path)) as backend:
        put(backend, KEYS)
    with opened(faulty(tmp_path, **{fault: 1.0})) as backend:
        assert set(check_got(backend, KEYS)) == {Status.CORRUPT}


def test_some_of_both_and_nothing_wrong_is_got(tmp_path: Path) -> None:
    statuses: set[Status] = set()
    with opened(faulty(tmp_path, flip=0.3, truncate=0.2, seed=7)) as backend:
        for _ in range(5):
            put(backend, KEYS)
            statuses |= set(check_got(backend, KEYS))
        assert not backend.is_degraded
    assert {Status.OK, Status.CORRUPT} <= statuses


def test_the_same_seed_makes_the_same_faults(tmp_path: Path) -> None:
    def statuses(seed: int, directory: str) -> list[list[Status]]:
        with opened(faulty(tmp_path / directory, flip=0.4, seed=seed)) as backend:
            return [put(backend, KEYS), check_got(backend, KEYS)]

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "c").mkdir()
    assert statuses(1, "a") == statuses(1, "b") != statuses(2, "c")


def test_sources_stay_as_they_are(tmp_path: Path) -> None:
    source = bytearray(block_of(KEYS[0]))
    with opened(faulty(tmp_path, flip=1.0)) as backend:
        backend.put(KEYS[:1], [memoryview(source)], soon())
    assert source == block_of(KEYS[0])


def test_failures_open_the_breaker(tmp_path: Path) -> None:
    with opened(faulty(tmp_path, fail=1.0)) as backend:
        for _ in range(5):
            assert not backend.is_degraded
            assert set(check_got(backend, KEYS)) == {Status.FAILED}
        assert backend.is_degraded
        assert backend.exists(KEYS[:2], soon()) == [False, False]


def test_a_delay_is_only_a_delay(tmp_path: Path) -> None:
    with opened(faulty(tmp_path, delay=1.0, delay_time="1ms")) as backend:
        put(backend, KEYS)
        assert set(check_got(backend, KEYS)) == {Status.OK}


def test_a_call_that_hung_is_late(tmp_path: Path) -> None:
    with opened(faulty(tmp_path, hang=1.0, hang_time="1ms")) as backend:
        assert set(check_got(backend, KEYS)) == {Status.LATE}
        for _ in range(4):
            put(backend, KEYS[:1])
        assert backend.is_degraded


def test_closing_lets_go_of_calls_that_hang(tmp_path: Path) -> None:
    statuses: list[Status] = []
    with opened(faulty(tmp_path, hang=1.0, hang_time="1h")) as backend:
        into = [memoryview(bytearray(BLOCK_BYTES))]
        caller = threading.Thread(target=lambda: statuses.extend(backend.get(KEYS[:1], into, soon())))
        caller.start()
    caller.join(60)
    assert statuses == [Status.LATE]


def test_a_narrow_medium_moves_what_fits_before_the_deadline(tmp_path: Path) -> None:
    num_bytes = 100_000
    with opened(faulty(tmp_path)) as backend:
        put(backend, KEYS[:4], num_bytes)
    with opened(faulty(tmp_path, bandwidth=100)) as backend:
        assert set(check_got(backend, KEYS[:4], num_bytes)) == {Status.LATE}
    with opened(faulty(tmp_path, bandwidth=2_000_000)) as backend:
        begun_s = time.monotonic()
        assert set(check_got(backend, KEYS[:4], num_bytes)) == {Status.OK}
        assert time.monotonic() >= begun_s + 0.2
