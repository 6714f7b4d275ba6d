"""Heads, trailers, connections and every wait have an end; requests that are as they should be never notice."""

from __future__ import annotations

import asyncio
import re
import socket
from dataclasses import replace

import pytest
from protocol_server import GET, LINE, PATIENCE_S, PATIENT, SOON, after, ask, serving

from swiftkv.server.http_protocol import (
    MAX_DRAINED_BYTES,
    MAX_FIELDS,
    MAX_HEAD_BYTES,
    MAX_IGNORED_BYTES,
    MAX_TRAILER_BYTES,
)
from swiftkv.server.limits import Deadlines

CHUNKED = LINE + b"transfer-encoding: chunked\r\n\r\n"
REFUSED = b"POST /refuse HTTP/1.1\r\nhost: here\r\ntransfer-encoding: chunked\r\n\r\n"


def in_pieces(content: bytes) -> list[bytes]:
    """Cut bytes into pieces. A socket closed with unread bytes loses its answer, so pieces are small."""
    return [content[i : i + 1000] for i in range(0, len(content), 1000)]


def unfinished(piece: bytes) -> list[bytes]:
    """A head that goes on with `piece` until one byte too many."""
    return in_pieces((LINE + piece * MAX_HEAD_BYTES)[: MAX_HEAD_BYTES + 1])


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([LINE + b"x: " + b"y" * 600 + b"\r\n"] + [b"x: " + b"y" * 995 + b"\r\n"] * 65, id="long headers"),
        pytest.param(unfinished(b"y"), id="one without end"),
        pytest.param([b"GET /" + b"y" * (MAX_HEAD_BYTES + 1) + b" HTTP/1.1\r\n\r\n"], id="long line at once"),
        pytest.param([LINE + b"x: " + b"y" * MAX_HEAD_BYTES + b"\r\n\r\n"], id="long header at once"),
    ],
)
def test_a_head_too_long_is_refused(parts: list[bytes]) -> None:
    answer = ask(*parts)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b'"message":"the request\'s headers are larger than 65536 bytes"' in answer
    assert answer.count(b"HTTP/1.1") == 1


def test_a_head_with_very_many_headers_is_refused() -> None:
    answer = ask(LINE + b"x: y\r\n" * (MAX_FIELDS + 1))
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"more than 128 headers" in answer


def test_long_bodies_and_many_requests_do_not_count() -> None:
    async def run() -> None:
        body = b"z" * (4 * MAX_HEAD_BYTES)
        chunks = b"".join(b"1\r\nz\r\n" for _ in range(3 * MAX_TRAILER_BYTES)) + b"0\r\nx: y\r\n\r\n"
        head = LINE + b"x: " + b"y" * (MAX_HEAD_BYTES // 2) + b"\r\n"
        whole = head + b"content-length: %d\r\n\r\n" % len(body) + body
        in_chunks = head + b"transfer-encoding: chunked\r\n\r\n" + chunks
        async with serving() as server:
            reader, writer = await server.connect()
            for request, length in ((whole, len(body)), (in_chunks, 3 * MAX_TRAILER_BYTES)) * 3:
                writer.write(request)
                answer = await asyncio.wait_for(reader.readuntil(b"%08d" % length), PATIENCE_S)
                assert answer.startswith(b"HTTP/1.1 200 OK")
            writer.close()

    asyncio.run(run())


TRAILERS = b"a:\r\n" * (MAX_TRAILER_BYTES // 4 + 1)
LONG_TRAILER = b"a: " + b"y" * (MAX_TRAILER_BYTES + 1000)


@pytest.mark.parametrize(
    ("head", "rest", "status"),
    [
        pytest.param(CHUNKED, b"2\r\nzz\r\n0\r\n" + TRAILERS, b"431", id="many"),
        pytest.param(CHUNKED, b"2\r\nzz\r\n0\r\n" + LONG_TRAILER, b"431", id="one without end"),
        pytest.param(CHUNKED, b"2;" + b"y" * (MAX_TRAILER_BYTES + 1000), b"431", id="an extension without end"),
        pytest.param(CHUNKED, (b"2;" + b"y" * 500 + b"\r\nzz\r\n") * 20, b"431", id="extensions"),
        pytest.param(REFUSED, b"2\r\nzz\r\n0\r\n" + TRAILERS, b"401", id="many, refused"),
        pytest.param(REFUSED, b"2\r\nzz\r\n0\r\n" + LONG_TRAILER, b"401", id="one without end, refused"),
    ],
)
def test_trailers_have_an_end(head: bytes, rest: bytes, status: bytes) -> None:
    async def run() -> bytes:
        async with serving() as server:
            # In pieces, or one read would have head and trailers.
            return await server.exchange([head, *in_pieces(rest)], pause_s=0.01)

    answer = asyncio.run(run())
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert answer.count(b"HTTP/1.1") == 1


def test_trailers_are_read_and_dropped() -> None:
    async def run() -> None:
        async with serving() as server:
            reader, writer = await server.connect()
            for _ in range(2):
                writer.write(CHUNKED + b"2\r\nzz\r\n0\r\nauthorization: Bearer x\r\nb: c\r\n\r\n")
                answer = await asyncio.wait_for(reader.readuntil(b"00000002"), PATIENCE_S)
                assert answer.startswith(b"HTTP/1.1 200 OK")
            writer.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("deadlines", "parts", "answers"),
    [
        pytest.param(replace(PATIENT, head_s=SOON), [], [], id="silent"),
        pytest.param(replace(PATIENT, head_s=SOON), [b"\r\n\r\n"], [], id="empty lines"),
        pytest.param(replace(PATIENT, head_s=SOON), [LINE], [b"408"], id="half a head"),
        pytest.param(replace(PATIENT, idle_s=SOON), [GET], [b"200"], id="idle"),
        pytest.param(replace(PATIENT, idle_s=SOON), [GET, b"\r\n"], [b"200"], id="idle, a stray byte"),
        pytest.param(replace(PATIENT, head_s=SOON), [GET, b"G"], [b"200", b"408"], id="half a second head"),
        pytest.param(
            replace(PATIENT, body_window_s=SOON, min_body_rate=100.0),
            [CHUNKED + b"5\r\nhe"],
            [b"408"],
            id="half a body",
        ),
        pytest.param(replace(PATIENT, drain_s=SOON), [REFUSED + b"5\r\nhe"], [b"401"], id="half a body, refused"),
    ],
)
def test_every_wait_for_a_client_has_an_end(deadlines: Deadlines, parts: list[bytes], answers: list[bytes]) -> None:
    async def run() -> bytes:
        async with serving(deadlines) as server:
            reader, writer = await server.connect()
            for i, part in enumerate(parts):
                writer.write(part)
                if i + 1 < len(parts):
                    await server.wait_until(lambda: bool(server.ended))
            said = await asyncio.wait_for(reader.read(), PATIENCE_S)
            await server.wait_until(lambda: server.limits.num_connections == 0)
            return said

    assert re.findall(rb"HTTP/1\.1 (\d+)", asyncio.run(run())) == answers


def refused_body(num_bytes: int) -> bytes:
    return b"POST /refuse HTTP/1.1\r\nhost: here\r\ncontent-length: %d\r\n\r\n" % num_bytes


def test_the_rest_of_a_refused_body_is_read_up_to_a_limit() -> None:
    async def run() -> None:
        async with serving() as server:
            reader, writer = await server.connect()
            writer.write(refused_body(MAX_DRAINED_BYTES) + bytes(MAX_DRAINED_BYTES) + GET)
            answers = await asyncio.wait_for(reader.readuntil(b"00000000"), PATIENCE_S)
            assert answers.count(b"HTTP/1.1 401") == answers.count(b"HTTP/1.1 200") == 1
            writer.close()
            said = await server.exchange([refused_body(1 << 40), *[bytes(1 << 20)] * (2 * MAX_DRAINED_BYTES >> 20)])
            assert said.startswith(b"HTTP/1.1 401")

    asyncio.run(run())


def test_a_body_that_keeps_coming_may_take_longer_than_a_window() -> None:
    async def run() -> bytes:
        async with serving(replace(PATIENT, body_window_s=2.0, min_body_rate=20.0)) as server:
            reader, writer = await server.connect()
            writer.write(LINE + b"content-length: 2500\r\nconnection: close\r\n\r\n")
            for _ in range(25):
                await asyncio.sleep(0.1)
                writer.write(b"z" * 100)
            return await asyncio.wait_for(reader.read(), PATIENCE_S)

    assert asyncio.run(run()).endswith(b"00002500")


def test_an_older_client_gets_no_chunks() -> None:
    async def run() -> bytes:
        async with serving() as server:
            reader, writer = await server.connect()
            writer.write(b"GET /wait HTTP/1.0\r\n\r\n")
            said = await reader.readuntil(b"begun")
            writer.write_eof()
            return said + await asyncio.wait_for(reader.read(), PATIENCE_S)

    head, _, body = asyncio.run(run()).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body == b"begun"
    assert ask(b"POST / HTTP/1.0\r\ncontent-length: 2\r\n\r\nhe").endswith(b"\r\n\r\n00000002")


def test_an_answer_may_take_longer_than_any_deadline() -> None:
    async def run() -> None:
        async with serving(after(SOON)) as server:
            reader, writer = await server.connect()
            writer.write(b"GET /wait HTTP/1.1\r\nhost: here\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            await asyncio.sleep(1.5 * SOON)
            assert server.ended == []
            writer.close()
            await server.wait_until(lambda: server.ended == ["/wait"])

    asyncio.run(run())


def test_a_client_that_does_not_read_is_cut_off() -> None:
    """The stream ends, though the client holds its connection."""

    async def run() -> None:
        async with serving(replace(PATIENT, write_s=SOON)) as server:
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.connect(server.address)
                client.sendall(b"GET /stream HTTP/1.1\r\nhost: here\r\n\r\n")
                await server.wait_until(lambda: server.ended == ["/stream"])
                assert server.limits.num_connections == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    "next_bytes", [GET, CHUNKED + b"5\r\nhe", b"\x00", b"G"], ids=["GET", "POST", "junk", "a byte"]
)
def test_a_client_that_hangs_up_is_noticed_whatever_it_sent_ahead(next_bytes: bytes) -> None:
    async def run() -> None:
        async with serving() as server:
            reader, writer = await server.connect()
            writer.write(b"GET /wait HTTP/1.1\r\nhost: here\r\n\r\n" + next_bytes)
            await reader.readuntil(b"\r\n\r\n")
            writer.close()
            await server.wait_until(lambda: server.ended == ["/wait"])

    asyncio.run(run())


def test_what_is_sent_ahead_is_not_kept() -> None:
    async def run() -> None:
        async with serving() as server:
            reader, writer = await server.connect()
            writer.write(b"GET /wait HTTP/1.1\r\nhost: here\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            for _ in range(100):  # the first read is parsed, and stops at the first of them
                writer.write(GET * (MAX_IGNORED_BYTES // len(GET)))
                await asyncio.sleep(0.01)
            await server.wait_until(lambda: server.ended == ["/wait"])

    asyncio.run(run())


def test_a_request_that_is_sent_ahead_is_not_answered() -> None:
    answer = ask(GET + GET)
    assert answer.count(b"HTTP/1.1 200 OK") == 1
    assert b"connection: close" in answer
