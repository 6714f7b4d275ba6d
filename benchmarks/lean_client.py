"""Streams a completion over a socket, doing as little work as possible meanwhile.

A client on the same machine shares the cores and caches of the server that it measures: while a model computes, httpx
sees a first token 4 to 13 ms later than this. Here a request is bytes before it is timed, and its answer is read as
bytes and taken apart once it has ended.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from swiftkv.bench.client import Target, TimedAnswer, request_body, take_event

_READ_BYTES = 1 << 16
_END = b"data: [DONE]\n\n"


def request_bytes(target: Target, prompt: list[int], output_len: int) -> bytes:
    """Return a whole request, for a connection that carries no other."""
    url = urlsplit(target.url)
    body = json.dumps(request_body(target, prompt, output_len)).encode()
    head = f"POST {url.path} HTTP/1.0\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def exchange(target: Target, request: bytes) -> TimedAnswer:
    """Send a request of `request_bytes` and read its answer. A failure is described in the answer's `error`."""
    url = urlsplit(target.url)
    assert url.hostname
    answer = TimedAnswer(start_s=time.perf_counter())
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write(request)
    pieces: list[tuple[float, bytes]] = []
    while piece := await reader.read(_READ_BYTES):
        pieces.append((time.perf_counter(), piece))
    writer.close()
    _take_apart(pieces, answer)
    return answer


def _take_apart(pieces: Sequence[tuple[float, bytes]], answer: TimedAnswer) -> None:
    """Enter an answer's times and counts: an event came when its last byte did."""
    text = b"".join(piece for _, piece in pieces)
    if not (text.startswith(b"HTTP/1.1 200 ") and text.endswith(_END)):
        answer.error = text.decode(errors="replace")[:500]
        return
    num_bytes = 0
    ends = []  # of the pieces, in bytes from the start
    for came_s, piece in pieces:
        num_bytes += len(piece)
        ends.append((num_bytes, came_s))
    begin = text.index(b"\r\n\r\n") + 4
    while not text.startswith(_END, begin):
        end = text.index(b"\n\n", begin) + 2
        event = json.loads(text[begin + len(b"data: ") : end])
        take_event(answer, event, next(came_s for last, came_s in ends if last >= end))
        begin = end
