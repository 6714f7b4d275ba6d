"""Request heads have an end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn

from swiftkv.server.http_protocol import MAX_HEAD_BYTES, BoundedHeadProtocol


async def echo(scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]) -> None:
    """Answers with the length of the body."""
    length = 0
    while True:
        message = await receive()
        length += len(message["body"])
        if not message["more_body"]:
            break
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"8")]})
    await send({"type": "http.response.body", "body": b"%08d" % length})


async def exchange(parts: list[bytes]) -> bytes:
    """What the server says to `parts`, written one by one, until it hangs up."""
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(echo, http=BoundedHeadProtocol, lifespan="off", log_level="error")
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup([listening])
    try:
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        try:
            for part in parts:
                writer.write(part)
                await writer.drain()
            return await asyncio.wait_for(reader.read(), 30)
        finally:
            writer.close()
    finally:
        await server.shutdown()


LINE = b"POST / HTTP/1.1\r\nhost: here\r\n"


def unfinished(piece: bytes) -> list[bytes]:
    """A head that goes on with `piece` until one byte too many: with unread bytes a closing socket loses its answer."""
    whole = (LINE + piece * MAX_HEAD_BYTES)[: MAX_HEAD_BYTES + 1]
    return [whole[i : i + 8000] for i in range(0, len(whole), 8000)]


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(unfinished(b"x: y\r\n"), id="many headers"),
        pytest.param(unfinished(b"y"), id="one without end"),
        pytest.param([b"GET /" + b"y" * (MAX_HEAD_BYTES + 1) + b" HTTP/1.1\r\n\r\n"], id="long line at once"),
        pytest.param([LINE + b"x: " + b"y" * MAX_HEAD_BYTES + b"\r\n\r\n"], id="long header at once"),
    ],
)
def test_a_head_too_long_is_refused(parts: list[bytes]) -> None:
    answer = asyncio.run(exchange(parts))
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b'"message":"the request\'s headers are larger than 65536 bytes"' in answer
    assert answer.count(b"HTTP/1.1") == 1


def test_long_bodies_and_many_requests_do_not_count() -> None:
    body = b"z" * (4 * MAX_HEAD_BYTES)
    head = LINE + b"x: " + b"y" * (MAX_HEAD_BYTES // 2) + b"\r\n"
    request = head + b"content-length: %d\r\n\r\n" % len(body) + body
    last = head + b"connection: close\r\ncontent-length: 0\r\n\r\n"
    answer = asyncio.run(exchange([request, request, request, last]))
    assert answer.count(b"HTTP/1.1 200 OK") == 4
    assert answer.count(b"%08d" % len(body)) == 3
