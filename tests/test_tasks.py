"""A long-lived task that fails is noticed, whoever holds a reference to it."""

from __future__ import annotations

import asyncio
import logging

import pytest

from swiftkv.tasks import Tasks


async def fail() -> None:
    raise ValueError("a defect")


async def go_on() -> None:
    await asyncio.Event().wait()


def test_a_task_that_raises_is_the_failure_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        tasks = Tasks()
        tasks.start(go_on(), "one that goes on")
        held = tasks.start(fail(), "the second")
        with pytest.raises(ValueError, match="a defect"):
            await tasks.failure
        assert held.done()
        await tasks.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(run())
    assert "the second failed, which ends the node" in caplog.text
    assert "a defect" in caplog.text


def test_a_task_that_somebody_else_cancels_has_failed() -> None:
    async def run() -> None:
        tasks = Tasks()
        tasks.start(go_on(), "it").cancel()
        with pytest.raises(RuntimeError, match="cancelled"):
            await tasks.failure

    asyncio.run(run())


def test_the_end_of_a_task_and_closing_are_no_failure() -> None:
    async def run() -> bool:
        tasks = Tasks()
        await tasks.start(asyncio.sleep(0), "one that ends")
        tasks.start(go_on(), "one that goes on")
        await tasks.close()
        return tasks.failure.done()

    assert not asyncio.run(run())
