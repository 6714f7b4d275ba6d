"""Requests that still run when their port closes."""

from __future__ import annotations

import asyncio
import logging
import socket

import httpx
import pytest
from echo_gateway import PATIENCE_S, FixedModels

from swiftkv import ports as ports_module
from swiftkv.ports import Ports
from swiftkv.server.app import ServerSettings
from swiftkv.server.lending import NodeLending
from swiftkv.server.metrics import GatewayMetrics
from swiftkv.server.models import ModelTable
from swiftkv.tasks import Tasks


class SlowModels(FixedModels):
    """Adds a model for ever."""

    def __init__(self) -> None:
        self.has_begun = asyncio.Event()

    async def add(self, section: object) -> str:
        self.has_begun.set()
        return await asyncio.Future[str]()


def test_a_change_that_is_cut_off_is_answered_503(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports_module, "_CLOSE_TIMEOUT_S", 0)

    async def run() -> httpx.Response:
        settings, models, tasks = ServerSettings(admin_key="key"), SlowModels(), Tasks()
        ports = Ports(settings, GatewayMetrics(), NodeLending([], False, "shm"), tasks)
        listening = socket.create_server(("127.0.0.1", 0))
        ports.serve_node(listening, ModelTable({}), models)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=url, headers={"Authorization": "Bearer key"}) as http:
            asked = asyncio.create_task(http.post("/admin/models", json={"name": "code"}, timeout=PATIENCE_S))
            await asyncio.wait_for(models.has_begun.wait(), PATIENCE_S)
            await ports.close()
            answer = await asked
        await tasks.close()
        return answer

    with caplog.at_level(logging.INFO):
        answer = asyncio.run(run())
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "server_stopped"
    assert "may have happened" in answer.json()["error"]["message"]
    assert answer.headers["x-request-id"]
    assert not [record for record in caplog.records if record.exc_info]
