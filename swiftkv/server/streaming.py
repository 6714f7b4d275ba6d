"""Sends an answer, whole or as server-sent events, and stops when the client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from swiftkv.server.answer import Answer
from swiftkv.server.choices import Delta, deltas
from swiftkv.server.errors import ApiError
from swiftkv.server.generation import Generation

T = TypeVar("T")

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

_encoder = msgspec.json.Encoder()


class ClientGone(Exception):
    """Raised when the client has hung up."""


def json_response(body: Struct | Sequence[Struct], status: int = 200) -> Response:
    """Return `body` as JSON. Call this in a thread for bodies that clients can make large."""
    return Response(_encoder.encode(body), status, media_type="application/json")


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` and return its result, but cancel it when the client hangs up.

    Raises:
        ClientGone: the client hung up.
    """
    working = asyncio.ensure_future(work)
    listening = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((working, listening), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        working.cancel()
        listening.cancel()
        await asyncio.gather(working, listening, return_exceptions=True)


async def whole_answer(request: Request, answer: Answer) -> Response:
    """Return the whole answer, once the generation has ended."""

    async def collect() -> None:
        async for batch in deltas(answer.generation, answer.choices):
            answer.add(batch)

    with answer.generation:
        await unless_gone(request, collect())
    # Prompt logprobs of a long prompt are a million numbers.
    return await asyncio.to_thread(lambda: json_response(answer.whole()))


async def streamed_answer(request: Request, answer: Answer) -> Response:
    """Stream an answer from its first token on, so that a failure before that still gets its HTTP status."""
    batches = deltas(answer.generation, answer.choices)
    try:
        first = await unless_gone(request, _next(batches))
    except BaseException:
        answer.generation.close()
        raise
    return _EventStream(_events(answer, first, batches), answer.generation)


async def _events(answer: Answer, first: Sequence[Delta], batches: AsyncIterator[list[Delta]]) -> AsyncIterator[bytes]:
    batch: Sequence[Delta] | None = first
    is_written = False
    try:
        while batch is not None:
            if events := await _chunk_bytes(answer, batch):  # none while the text may begin a stop string
                yield events
                if not is_written:
                    answer.note_first_written()
                    is_written = True
            batch = await anext(batches, None)
        if events := await _event_bytes(answer, answer.closing, is_small=answer.has_small_closing):
            yield events
    except ApiError as error:
        yield answer.encode([answer.failure(error)])
    if answer.end_of_stream:
        yield answer.end_of_stream


async def _chunk_bytes(answer: Answer, batch: Sequence[Delta]) -> bytes:
    return await _event_bytes(answer, lambda: answer.chunks(batch), is_small=answer.is_small(batch))


async def _event_bytes(answer: Answer, make: Callable[[], list[Struct]], *, is_small: bool) -> bytes:
    """Return events as bytes, made in a thread if that may take longer than a millisecond."""
    if is_small:
        return answer.encode(make())
    return await asyncio.to_thread(lambda: answer.encode(make()))


class _EventStream(StreamingResponse):
    """Ends the generation however the response ends: done, failed, or the client gone."""

    def __init__(self, events: AsyncIterator[bytes], generation: Generation) -> None:
        super().__init__(events, headers=STREAM_HEADERS, media_type="text/event-stream")
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._generation:
            await super().__call__(scope, receive, send)


async def _next(batches: AsyncIterator[list[Delta]]) -> list[Delta]:
    return await anext(batches)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
