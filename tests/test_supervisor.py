"""The supervisor of an engine: a start that fails, and an end that nobody waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from swiftkv.engine.messages import EngineConfig
from swiftkv.errors import EngineError
from swiftkv.node_config import NodeConfig
from swiftkv.server.client import EngineClient
from swiftkv.server.metrics import GatewayMetrics
from swiftkv.supervisor import EngineSupervisor
from swiftkv.units import PoolBytes
from tests.support.open_files import no_more_files

DEADLINE_S = 60.0


@contextmanager
def supervising(directory: Path) -> Iterator[tuple[EngineSupervisor, EngineClient]]:
    """Yield the supervisor of an engine that has not been started, and its client."""
    addresses = [f"ipc://{directory}/{name}" for name in ("requests", "outputs")]
    client = EngineClient("m", *addresses, GatewayMetrics().for_model("m"))
    config = EngineConfig("m", str(directory), *addresses, PoolBytes(1 << 20), 512)
    try:
        yield EngineSupervisor(config, client, None, node=NodeConfig(), say=print, environment={}), client
    finally:
        client.close()


def test_an_engine_without_a_descriptor_is_not_started(tmp_path: Path) -> None:
    async def start() -> None:
        says = "m: the engine cannot be started: Too many open"
        with supervising(tmp_path) as (supervisor, _), no_more_files(), pytest.raises(EngineError, match=says):
            await supervisor.start()

    asyncio.run(start())


def test_an_engine_that_dies_before_it_has_its_configuration_fails_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = asyncio.create_subprocess_exec

    async def make_and_kill(*command: str, **options: Any) -> asyncio.subprocess.Process:
        process = await make(*command, **options)
        process.kill()
        await process.wait()
        assert process.stdin is not None
        while not process.stdin.is_closing():
            await asyncio.sleep(0.01)
        return process

    async def start() -> None:
        with supervising(tmp_path) as (supervisor, client):
            client.start()
            with pytest.raises(EngineError, match="before it was ready"):
                await asyncio.wait_for(supervisor.start(), DEADLINE_S)

    monkeypatch.setattr("swiftkv.supervisor.asyncio.create_subprocess_exec", make_and_kill)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(start())


def test_nobody_waits_for_the_rest_of_a_model_that_is_given_up(tmp_path: Path) -> None:
    async def rest() -> None:
        with supervising(tmp_path) as (supervisor, client):
            resting = asyncio.create_task(supervisor.put_to_rest())
            await asyncio.sleep(0.05)
            assert not resting.done()
            client.status.drain()
            await asyncio.wait_for(resting, DEADLINE_S)

    asyncio.run(rest())
