"""The judgement of an engine process from outside: a real process, a real page, and time that passes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from swiftkv.engine.messages import Ready
from swiftkv.progress import Progress, ProgressPage
from swiftkv.server.client import EngineClient
from swiftkv.server.engine_state import EngineState
from swiftkv.server.metrics import GatewayMetrics
from swiftkv.watch import EngineWatch

WATCHDOG_S = 1.0
DEADLINE_S = 60.0
RESTS, COMPUTES = "import time; time.sleep(600)", "while True: pass"


@pytest.fixture
def page() -> Iterator[ProgressPage]:
    page = ProgressPage.create()
    yield page
    page.close()


@pytest.fixture
def progress(page: ProgressPage) -> Progress:
    progress = Progress()
    progress.share(page.fd)
    return progress


@contextmanager
def running(program: str) -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def watched(
    page: ProgressPage,
    pid: int,
    directory: Path,
    until: Callable[[EngineClient], bool] = lambda client: False,
    waits_for_others: Callable[[], bool] = lambda: False,
    falls_asleep: bool = False,
) -> str | None:
    """Watch until the engine is hung, and return the verdict; `None` if `until` was true before."""

    async def watch() -> str | None:
        addresses = [f"ipc://{directory}/{name}" for name in ("requests", "outputs")]
        client = EngineClient("m", *addresses, GatewayMetrics().for_model("m"))
        client.expect(1)
        client.engine_up(Ready("m", pid, 16, 16, 1, 1024, 16, [], 1))
        if falls_asleep:
            assert client.status.go_to_sleep()
            client.sleep_engine()
        verdict = asyncio.create_task(
            EngineWatch(client, None, watchdog_s=WATCHDOG_S, pid=pid, page=page).until_hung(waits_for_others)
        )
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not verdict.done() and not until(client):
                    await asyncio.sleep(0.01)
            return verdict.result() if verdict.done() else None
        finally:
            verdict.cancel()
            client.close()

    return asyncio.run(watch())


def test_a_round_without_progress_is_hung(page: ProgressPage, progress: Progress, tmp_path: Path) -> None:
    progress.works()
    with running(RESTS) as pid:
        said = watched(page, pid, tmp_path)
    assert said is not None
    assert said.startswith("made no progress for ")


def test_an_endless_loop_is_hung_too(page: ProgressPage, progress: Progress, tmp_path: Path) -> None:
    """It uses its processor, and shows nothing for it."""
    progress.works()
    with running(COMPUTES) as pid:
        assert watched(page, pid, tmp_path) is not None


def test_a_long_round_with_progress_is_slow(page: ProgressPage, progress: Progress, tmp_path: Path) -> None:
    ended = threading.Event()

    def compute() -> None:
        while not ended.wait(0.01):
            progress.tick()

    page_words = progress._words
    page_words[1] = 1  # the round began when the machine did
    layers = threading.Thread(target=compute)
    layers.start()
    with running(COMPUTES) as pid:
        said = watched(page, pid, tmp_path, until=lambda client: client.state is EngineState.SLOW)
    ended.set()
    layers.join()
    assert said is None


def test_an_engine_that_waits_for_messages_is_not_hung(page: ProgressPage, progress: Progress, tmp_path: Path) -> None:
    progress.rests()
    with running(RESTS) as pid:
        said = watched(page, pid, tmp_path, until=lambda client: client.state is EngineState.NOT_RESPONDING)
    assert said is None


def test_an_engine_that_does_not_fall_asleep_is_hung(page: ProgressPage, progress: Progress, tmp_path: Path) -> None:
    progress.rests()
    with running(RESTS) as pid:
        said = watched(page, pid, tmp_path, falls_asleep=True)
    assert said is not None
    assert said.startswith("made no progress for ")


def test_an_engine_that_may_wait_for_its_lender_is_not_blamed(
    page: ProgressPage, progress: Progress, tmp_path: Path
) -> None:
    progress.works()

    def is_old(client: EngineClient) -> bool:
        age_s = client.view().progress_age_s
        return age_s is not None and age_s > 3 * WATCHDOG_S

    with running(RESTS) as pid:
        assert watched(page, pid, tmp_path, until=is_old, waits_for_others=lambda: True) is None


def test_the_longest_round_counts(page: ProgressPage, progress: Progress) -> None:
    progress.works()
    first = page.read()
    assert first.working_s is not None
    progress.works()
    progress.rests()
    last = page.read()
    assert last.working_s is None
    assert last.longest_s > 0
    assert last.ticks > first.ticks
