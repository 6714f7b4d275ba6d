"""Sends an answer, whole or as server-sent events, and stops when the client goes away."""

from __future__ import annotations

import asyncio
import contextlib
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

T = TypeVar("T")

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

_encoder = msgspec.json.Encoder()


class ClientGone(Exception):
    """Raised when the client has hung up."""


def json_response(body: Struct | Sequence[Struct], status: int = 200) -> Response:
    """Return `body` as JSON. Call this in a thread for bodies that clients can make large."""
    return Response(_encoder.encode(body), status, media_type="application/json")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` and return its result, but cancel it when the client hangs up, which `receive` reports.

    Raises:
        ClientGone: the client hung up.
    """
    working = asyncio.ensure_future(work)
    listening = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, listening), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        listened = listening.cancel()  # False if it has ended by itself
        if not (working.done() and listened):  # else nothing is left to wait for
            working.cancel()
            await asyncio.gather(working, listening, return_exceptions=True)


async def whole_answer(request: Request, answer: Answer) -> Response:
    """Return the whole answer, once the generation has ended."""

    async def collect() -> None:
        async for batch in deltas(answer.generation, answer.choices):
            answer.add(batch)

    with answer.generation:
        await unless_gone(request.receive, collect())
    # Prompt logprobs of a long prompt are a million numbers.
    return await asyncio.to_thread(lambda: json_response(answer.whole()))


async def streamed_answer(request: Request, answer: Answer) -> Response:
    """Stream an answer from its first token on, so that a failure before that still gets its HTTP status."""
    batches = deltas(answer.generation, answer.choices)
    try:
        first = await unless_gone(request.receive, _next(batches))
        beginning = await _chunk_bytes(answer, first)
    except BaseException:
        answer.generation.close()
        raise
    return _EventStream(answer, beginning, batches)


async def _later_events(answer: Answer, batches: AsyncIterator[list[Delta]], *, is_first: bool) -> AsyncIterator[bytes]:
    """Yield what follows the beginning of a stream. `is_first`: nothing has been written yet."""
    try:
        async for batch in batches:
            if events := await _chunk_bytes(answer, batch):
                yield events
                if is_first:
                    answer.note_first_written()
                    is_first = False
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

    def __init__(self, answer: Answer, beginning: bytes, batches: AsyncIterator[list[Delta]]) -> None:
        """`beginning` has the events of the first batch; it is empty while the text may begin a stop string."""
        events = _later_events(answer, batches, is_first=not beginning)
        super().__init__(events, headers=STREAM_HEADERS, media_type="text/event-stream")
        self._answer = answer
        self._beginning = beginning

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the first token before anything else: starting tasks takes a millisecond while a model computes."""
        with self._answer.generation, contextlib.suppress(ClientGone):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if self._beginning:
                await send({"type": "http.response.body", "body": self._beginning, "more_body": True})
                self._answer.note_first_written()
            await unless_gone(receive, self._send_rest(send))

    async def _send_rest(self, send: Send) -> None:
        async for events in self.body_iterator:
            await send({"type": "http.response.body", "body": events, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _next(batches: AsyncIterator[list[Delta]]) -> list[Delta]:
    return await anext(batches)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
