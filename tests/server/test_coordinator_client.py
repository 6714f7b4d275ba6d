"""Questions to a coordinator whose model goes away meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from swiftkv.server.errors import ApiError
from swiftkv.server.lending import CoordinatorClient


@pytest.mark.parametrize("is_taken", [False, True], ids=["nobody-took-it", "without-an-answer"])
def test_a_question_ends_with_the_model(tmp_path: Path, is_taken: bool) -> None:
    async def ask() -> None:
        address = f"ipc://{tmp_path}/leases"
        client = CoordinatorClient("small", address)
        with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as coordinator:
            question = asyncio.create_task(client.show(with_extents=False, timeout_s=60))
            if is_taken:
                coordinator.bind(address)
                await coordinator.recv_multipart()
            else:
                await asyncio.sleep(0)  # until it waits in the socket
            client.close()
            with pytest.raises(ApiError, match="'small' was removed meanwhile"):
                await question
            with pytest.raises(ApiError, match="'small' was removed meanwhile"):
                await client.show(with_extents=False)

    asyncio.run(ask())


def test_a_question_ends_with_the_engine_that_took_it(tmp_path: Path) -> None:
    async def ask() -> None:
        address = f"ipc://{tmp_path}/leases"
        client = CoordinatorClient("small", address)
        with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as coordinator:
            question = asyncio.create_task(client.show(with_extents=False, timeout_s=60))
            coordinator.bind(address)
            await coordinator.recv_multipart()
            client.engine_ended()
            with pytest.raises(ApiError, match="'small' ended meanwhile"):
                await question
            question = asyncio.create_task(client.show(with_extents=False, timeout_s=60))
            await coordinator.recv_multipart()  # the client serves the next engine
            client.close()
            with pytest.raises(ApiError):
                await question

    asyncio.run(ask())


def test_a_question_that_is_cancelled_stays_so(tmp_path: Path) -> None:
    async def ask() -> None:
        client = CoordinatorClient("small", f"ipc://{tmp_path}/leases")
        question = asyncio.create_task(client.show(with_extents=False, timeout_s=60))
        await asyncio.sleep(0)
        question.cancel()
        client.close()
        with pytest.raises(asyncio.CancelledError):
            await question

    asyncio.run(ask())
