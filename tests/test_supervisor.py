"""Starting an engine process fails in a way that its supervisor deals with."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from swiftkv.engine.messages import EngineConfig
from swiftkv.errors import EngineError
from swiftkv.node_config import NodeConfig
from swiftkv.server.client import EngineClient
from swiftkv.server.metrics import GatewayMetrics
from swiftkv.supervisor import EngineSupervisor
from swiftkv.units import PoolBytes
from tests.support.open_files import no_more_files


def test_an_engine_without_a_descriptor_is_not_started(tmp_path: Path) -> None:
    async def start() -> None:
        addresses = [f"ipc://{tmp_path}/{name}" for name in ("requests", "outputs")]
        client = EngineClient("m", *addresses, GatewayMetrics().for_model("m"))
        config = EngineConfig("m", str(tmp_path), *addresses, PoolBytes(1 << 20), 512)
        supervisor = EngineSupervisor(config, client, None, node=NodeConfig(), say=print, environment={})
        try:
            with no_more_files(), pytest.raises(EngineError, match="m: the engine cannot be started: Too many open"):
                await supervisor.start()
        finally:
            client.close()

    asyncio.run(start())
