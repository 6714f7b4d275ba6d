"""The gateway's end of an engine that reads late: real sockets, and at the other end one that the test reads from."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from swiftkv.engine.messages import (
    HIGH_WATER_MARK,
    Abort,
    AddRequest,
    FromEngine,
    Ready,
    SamplingParams,
    StepOutput,
    ToEngine,
)
from swiftkv.server.client import EngineClient
from swiftkv.server.errors import ApiError
from swiftkv.server.generation import SequenceRequest
from swiftkv.server.metrics import GatewayMetrics

INCARNATION = 1


class LateReader:
    """Speaks as an engine does, and reads when it is told to."""

    def __init__(self, client: EngineClient) -> None:
        self._context = zmq.asyncio.Context()
        self._pull = self._context.socket(zmq.PULL)
        self._push = self._context.socket(zmq.PUSH)
        for socket in (self._pull, self._push):
            socket.setsockopt(zmq.LINGER, 0)
            socket.set_hwm(HIGH_WATER_MARK)
        self._pull.connect(client.requests_address)
        self._push.connect(client.outputs_address)
        self.added: list[int] = []
        self.aborted: list[int] = []
        self.num_taken = 0

    async def say(self, message: FromEngine) -> None:
        await self._push.send(msgspec.msgpack.encode(message))

    async def take_until(self, condition: Callable[[], bool]) -> None:
        """Read what comes, and say how much that was, until `condition` holds."""
        async with asyncio.timeout(60):
            while not condition():
                while await self._pull.poll(10):
                    self._note(msgspec.msgpack.decode(await self._pull.recv(), type=ToEngine))
                    if self.num_taken % 500 == 0:
                        await self.say_taken()
                await self.say_taken()

    def _note(self, message: ToEngine) -> None:
        self.num_taken += 1
        if isinstance(message, AddRequest):
            self.added.append(message.request_id)
        elif isinstance(message, Abort):
            self.aborted += message.request_ids

    async def say_taken(self) -> None:
        await self.say(StepOutput(b"", b"", b"", messages_taken=self.num_taken))

    def close(self) -> None:
        self._context.destroy(linger=0)


@asynccontextmanager
async def client_and_reader(directory: Path) -> AsyncIterator[tuple[EngineClient, LateReader]]:
    addresses = [f"ipc://{directory}/{end}" for end in ("requests", "outputs")]
    client = EngineClient("late", *addresses, GatewayMetrics().for_model("late"))
    client.start()
    client.expect(INCARNATION)
    receiving = asyncio.create_task(client.receive())
    reader = LateReader(client)
    try:
        await reader.say(Ready("late", os.getpid(), 4096, 1024, 100, 1 << 20, 16, [], INCARNATION))
        await client.wait_ready()
        yield client, reader
    finally:  # a context that is left to the garbage collector waits for its sockets for ever
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)
        reader.close()
        client.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def come_and_go(client: EngineClient, prompt: bytes, attempts: int) -> int:
    """Begin requests and give each up at once; how many the client took."""
    taken = 0
    for _ in range(attempts):
        try:
            with client.generate([SequenceRequest(prompt, SamplingParams(16))]):
                taken += 1
        except ApiError as error:
            if error.status != 429:
                raise
    return taken


def test_no_abort_is_lost_on_an_engine_that_reads_late(tmp_path: Path) -> None:
    """More clients come and hang up than the sockets hold messages."""

    async def run() -> None:
        async with client_and_reader(tmp_path) as (client, reader):
            taken = come_and_go(client, b"\0" * 4, attempts=2 * HIGH_WATER_MARK)
            assert 0 < taken < HIGH_WATER_MARK
            await reader.take_until(lambda: len(reader.added) == len(reader.aborted) == taken)
            assert sorted(reader.aborted) == sorted(reader.added)
            await until(lambda: client.num_in_flight == 0)
            assert come_and_go(client, b"\0" * 4, attempts=1) == 1

    asyncio.run(run())


def test_bytes_that_an_engine_has_not_read_are_bounded(tmp_path: Path) -> None:
    async def run() -> None:
        async with client_and_reader(tmp_path) as (client, reader):
            prompt = b"\0" * (1 << 20)
            taken = come_and_go(client, prompt, attempts=200)
            assert 32 <= taken <= 64
            await reader.take_until(lambda: come_and_go(client, prompt, attempts=1) == 1)

    asyncio.run(run())


def test_an_abort_that_cannot_be_sent_keeps_its_place_until_it_is(tmp_path: Path) -> None:
    """The engine's sockets are gone for a moment."""

    async def run() -> None:
        async with client_and_reader(tmp_path) as (client, reader):
            generation = client.generate([SequenceRequest(b"\0" * 4, SamplingParams(16))] * 3)
            await reader.take_until(lambda: len(reader.added) == 3)
            reader._pull.disconnect(client.requests_address)
            await until(lambda: not client._push.poll(0, zmq.POLLOUT))
            generation.close()
            assert client.num_in_flight == 3
            reader._pull.connect(client.requests_address)
            await reader.take_until(lambda: len(reader.aborted) == 3)
            assert sorted(reader.aborted) == reader.added
            await until(lambda: client.num_in_flight == 0)

    asyncio.run(run())


def test_an_engine_that_comes_back_begins_with_nothing_unread(tmp_path: Path) -> None:
    async def run() -> None:
        async with client_and_reader(tmp_path) as (client, reader):
            prompt = b"\0" * (1 << 20)
            assert come_and_go(client, prompt, attempts=200) < 200
            client.engine_down("was killed by SIGKILL")
            assert client.num_in_flight == 0
            client.expect(INCARNATION + 1)
            await reader.say(Ready("late", os.getpid(), 4096, 1024, 100, 1 << 20, 16, [], INCARNATION + 1))
            await client.wait_ready()
            assert come_and_go(client, prompt, attempts=1) == 1

    asyncio.run(run())
