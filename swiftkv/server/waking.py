"""A stream that shows the progress of a model that its request wakes, before the answer begins."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fastapi import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from swiftkv.server.asked_model import awake
from swiftkv.server.errors import ApiError
from swiftkv.server.models import ModelHandle, ModelTable
from swiftkv.server.sse import END_OF_STREAM, plain_events
from swiftkv.server.streaming import STREAM_HEADERS, ClientGone
from swiftkv.units import loading_words

PROGRESS_HEADER = "x-swiftkv-progress"
_INTERVAL_S = 1.0


class WakingStream(StreamingResponse):
    """Wakes the model, with a comment in the stream at once and then every second; then sends the answer.

    Clients pass over comments, which begin with a colon. The status is sent before anything is known of the answer, so
    a failure is sent as an event.
    """

    def __init__(
        self,
        request: Request,
        models: ModelTable,
        model: ModelHandle,
        answer: Callable[[ModelHandle], Awaitable[Response]],
    ) -> None:
        """`answer` returns the stream of the answer of the model, and is called when that is awake."""
        super().__init__((), headers=STREAM_HEADERS, media_type="text/event-stream")
        self._request = request
        self._models = models
        self._model = model
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            response = await self._answer(await self._wake(send))
            await response(scope, receive, _without_head(send))
        except ApiError as error:
            await send(_body(plain_events([error.answer()]) + END_OF_STREAM, is_last=True))
        except ClientGone:
            return

    async def _wake(self, send: Send) -> ModelHandle:
        waking = asyncio.ensure_future(awake(self._request, self._models, self._model))
        try:
            while not waking.done():
                await send(_body(self._comment()))
                await asyncio.wait((waking,), timeout=_INTERVAL_S)
            return await waking
        finally:
            waking.cancel()

    def _comment(self) -> bytes:
        client = self._model.client
        words = f"model '{client.name}' is waking up"
        if (loading := client.load_meter.view(client.state)) is not None:
            words += ": " + loading_words(loading.loaded_bytes, loading.total_bytes, loading.left_s)
        return f": {words}\n\n".encode()


def _body(data: bytes, *, is_last: bool = False) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": not is_last}


def _without_head(send: Send) -> Send:
    """Return a `send` for the rest of a response whose head has been sent."""

    async def send_rest(message: Message) -> None:
        if message["type"] != "http.response.start":
            await send(message)

    return send_rest
