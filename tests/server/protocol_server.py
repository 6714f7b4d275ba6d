"""A server of the node's HTTP protocol with a small application, and its clients, on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from swiftkv.server.http_protocol import http_config
from swiftkv.server.limits import Deadlines, NodeLimits

PATIENCE_S = 60
"""A deadline for events that happen at once, on a machine that may be busy."""

LINE = b"POST / HTTP/1.1\r\nhost: here\r\n"
GET = b"GET / HTTP/1.1\r\nhost: here\r\n\r\n"
SOON = 1.0
"""A deadline that is waited for, and that a client on a busy machine keeps."""


def after(seconds: float) -> Deadlines:
    """Every deadline, and bodies as slow as they like."""
    return Deadlines(seconds, seconds, seconds, 0.0, seconds, seconds, seconds, seconds)


PATIENT = after(3600.0)


Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


@dataclass
class Server:
    """An application on a port of its own, and how each of its requests ended."""

    listening: socket.socket
    limits: NodeLimits
    ended: list[str] = field(default_factory=list)

    @property
    def address(self) -> Any:
        return self.listening.getsockname()

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Answer with the body's length, refuse without reading it, or stream until the client is gone, by path."""
        path = scope["path"]
        if path == "/refuse":
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body"})
        elif path in ("/stream", "/wait"):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"begun", "more_body": True})
            leaving = asyncio.create_task(leave(receive))
            while path == "/stream" and not leaving.done():
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
                await asyncio.sleep(0)
            await leaving
        else:
            length = 0
            while (message := await receive())["type"] == "http.request":
                length += len(message["body"])
                if not message["more_body"]:
                    break
            else:
                self.ended.append(f"{path} without its body")
                return
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"8")]})
            await send({"type": "http.response.body", "body": b"%08d" % length})
        self.ended.append(path)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(*self.address)

    async def exchange(self, parts: Sequence[bytes], pause_s: float = 0.0) -> bytes:
        """Return what the server says to `parts`, written one by one, until it hangs up."""
        reader, writer = await self.connect()
        said = bytearray()

        async def listen() -> None:
            with contextlib.suppress(ConnectionError):  # it hangs up while more is on its way
                while data := await reader.read(65536):
                    said.extend(data)

        listening = asyncio.create_task(listen())
        for part in parts:
            if not listening.done():
                writer.write(part)
                await asyncio.sleep(pause_s)
        await asyncio.wait_for(listening, PATIENCE_S)
        writer.close()
        return bytes(said)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.005)


async def leave(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def serving(deadlines: Deadlines = PATIENT, max_connections: int = 4096) -> AsyncIterator[Server]:
    """The deadlines that a test is not about never come."""
    limits = NodeLimits(max_connections=max_connections, deadlines=deadlines)
    running = Server(socket.create_server(("127.0.0.1", 0), backlog=1024), limits)
    config = http_config(running, limits)
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup([running.listening])
    try:
        yield running
    finally:
        for connection in list(server.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]
        await server.shutdown()


def ask(*parts: bytes, **options: Any) -> bytes:
    async def run() -> bytes:
        async with serving(**options) as server:
            return await server.exchange(parts)

    return asyncio.run(run())
