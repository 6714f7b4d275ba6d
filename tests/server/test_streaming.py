"""Work for a client goes on only while the client is there, and leaves no task behind."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from swiftkv.server.streaming import ClientGone, unless_gone


class Client:
    """A client whose side of the connection the test ends."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def _work(begun: asyncio.Event, ended: list[str]) -> None:
    begun.set()
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        ended.append("work")
        raise


async def _tasks_left() -> int:
    """Return how many tasks there are beside our own, once those that are cancelled have ended."""
    await asyncio.sleep(0)
    return len(asyncio.all_tasks()) - 1


def test_a_result_leaves_no_task() -> None:
    async def scenario() -> None:
        async def work() -> int:
            return 7

        assert await unless_gone(Client().receive, work()) == 7
        assert not await _tasks_left()

    asyncio.run(scenario())


def test_an_error_of_the_work_is_raised() -> None:
    async def scenario() -> None:
        async def work() -> None:
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            await unless_gone(Client().receive, work())
        assert not await _tasks_left()

    asyncio.run(scenario())


def test_work_ends_with_its_client() -> None:
    async def scenario() -> None:
        client, begun, ended = Client(), asyncio.Event(), list[str]()
        waiting = asyncio.ensure_future(unless_gone(client.receive, _work(begun, ended)))
        await begun.wait()
        client.gone.set()
        with pytest.raises(ClientGone):
            await waiting
        assert ended == ["work"]
        assert not await _tasks_left()

    asyncio.run(scenario())


def test_a_caller_that_is_cancelled_waits_for_no_client() -> None:
    async def scenario() -> None:
        begun, ended = asyncio.Event(), list[str]()
        waiting = asyncio.ensure_future(unless_gone(Client().receive, _work(begun, ended)))
        await begun.wait()
        waiting.cancel()
        await asyncio.wait([waiting], timeout=60)
        assert waiting.cancelled()
        assert ended == ["work"]
        assert not await _tasks_left()

    asyncio.run(scenario())
