"""The HTTP servers of a node: one for its own port, and one for each model that has a port."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import uvicorn

from swiftkv.model_config import ModelConfig
from swiftkv.server.http_protocol import http_config
from swiftkv.server.lending import NodeLending
from swiftkv.server.metrics import GatewayMetrics
from swiftkv.sockets import BACKLOG
from swiftkv.tasks import Tasks

if TYPE_CHECKING:
    from fastapi import FastAPI

    from swiftkv.server.admin import ModelChanges
    from swiftkv.server.app import ServerSettings
    from swiftkv.server.models import ModelHandle, ModelTable

_CLOSE_TIMEOUT_S = 5
ACCEPTS_PER_ROUND = 16
"""The connections that one round of the event loop accepts: one for each descriptor of the socket."""
_FILES_PER_MODEL = 24
"""Descriptors for the sockets and pipes of a model, which lends and has storage."""


def files_of(model: ModelConfig) -> int:
    """Return the descriptors that a model takes in the node's process, those of its own port included."""
    return _FILES_PER_MODEL + (ACCEPTS_PER_ROUND if model.endpoint is not None else 0)


class Ports:
    """Serves HTTP on sockets that listen. Imports, which take a while, are made when the first port is served."""

    def __init__(self, settings: ServerSettings, metrics: GatewayMetrics, lending: NodeLending, tasks: Tasks) -> None:
        self._settings = settings
        self._metrics = metrics
        self._lending = lending
        self._tasks = tasks
        self._tables: dict[str, ModelTable] = {}  # by model that has a port
        self._serving: dict[str, tuple[_HttpServer, asyncio.Task[None]]] = {}  # by model, the node's under ""

    def serve_node(self, listening: socket.socket, table: ModelTable, changes: ModelChanges) -> None:
        from swiftkv.server.app import create_app

        self._serve("", listening, create_app(table, self._settings, self._metrics, self._lending, changes))

    def serve_model(self, listening: socket.socket, model: ModelHandle) -> None:
        """Serve a model at its own port. Raises `OSError` if no more descriptors can be opened."""
        from swiftkv.server.app import create_model_app
        from swiftkv.server.models import ModelTable

        table = ModelTable({model.name: model})
        app = create_model_app(table, model.name, self._settings, self._metrics, self._lending)
        self._serve(model.name, listening, app)
        self._tables[model.name] = table

    def renew(self, model: ModelHandle) -> None:
        """Have a model's own port, if it has one, serve the new handle of the model."""
        if model.name in self._tables:
            self._tables[model.name].add(model)

    async def close_model(self, name: str) -> None:
        """Close the port of a model, if it has one."""
        if name in self._serving:
            del self._tables[name]
            await self._close([name])

    async def close(self) -> None:
        await self._close(list(self._serving))

    def _serve(self, name: str, listening: socket.socket, app: FastAPI) -> None:
        limits = self._settings.limits
        with ExitStack() as opened:  # all or none
            others = [opened.enter_context(listening.dup()) for _ in range(ACCEPTS_PER_ROUND - 1)]
            opened.pop_all()
        server = _HttpServer(http_config(app, limits, backlog=BACKLOG, timeout_graceful_shutdown=_CLOSE_TIMEOUT_S))
        port = listening.getsockname()[1]
        serving = self._tasks.start(server.serve_until_told([listening, *others]), f"the HTTP server of port {port}")
        self._serving[name] = server, serving

    async def _close(self, names: list[str]) -> None:
        closing = [self._serving.pop(name) for name in names]
        for server, _ in closing:
            server.should_exit = True
        await asyncio.gather(*(task for _, task in closing), return_exceptions=True)


class _HttpServer(uvicorn.Server):
    """A uvicorn server that leaves signals to the node."""

    async def serve_until_told(self, sockets: list[socket.socket]) -> None:
        """Serve until `should_exit` is set. Raises `RuntimeError` if uvicorn ends earlier."""
        await self.serve(sockets)
        if not self.should_exit:
            raise RuntimeError("uvicorn ended on its own")

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
