"""uvicorn's HTTP protocol with limits on heads, trailers, connections and every wait."""

from __future__ import annotations

import asyncio
import random
import time
from asyncio import TimerHandle
from enum import Enum, auto
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from swiftkv.server.errors import ApiError
from swiftkv.server.limits import MONITORING_PATHS, URGENT_PATHS, Admission, NodeLimits, without_model

if TYPE_CHECKING:
    from uvicorn._types import (
        ASGI3Application,
        ASGIReceiveCallable,
        ASGISendCallable,
        ASGISendEvent,
        HTTPScope,
    )

MAX_HEAD_BYTES = 64 << 10
MAX_FIELDS = 128
MAX_TRAILER_BYTES = 8 << 10
MAX_IGNORED_BYTES = 64 << 10
MAX_DRAINED_BYTES = 8 << 20
"""The most content of a body that is read after the answer, so that the client comes to read the answer."""
_SPREAD = 0.25
"""The most by which a deadline may be exceeded, as a part of it."""
_CHUNK_OVERHEAD_BYTES = 32
"""The bytes allowed for each chunk's size in hexadecimal and its two line ends."""
_TRAILERS_TOO_LONG = ApiError(431, f"the request's trailers are larger than {MAX_TRAILER_BYTES} bytes")
_HEAD_TOO_LONG = ApiError(431, f"the request's headers are larger than {MAX_HEAD_BYTES} bytes")
_TOO_MANY_FIELDS = ApiError(431, f"the request has more than {MAX_FIELDS} headers")
_TOO_SLOW = ApiError(408, "the request did not arrive in time; send it faster, or in smaller parts")
_NO_CONNECTION_LEFT = ApiError(
    503, "this node has too many connections; close some, or try again", code="too_many_connections", retry_after_s=1
)
_NOT_HTTP = ApiError(400, "this is not an HTTP request")


class _Phase(Enum):
    """The phase of a connection's life; each has its own deadline."""

    HEAD = auto()
    BODY = auto()
    ANSWER = auto()
    """The request is there; the answer is not finished."""
    DRAIN = auto()
    """The answer is finished; the request is not."""
    IDLE = auto()
    CLOSING = auto()


class _StopParsing(Exception):
    """Ends the parsing of a connection's bytes for good."""


def http_config(app: ASGIApp, limits: NodeLimits, **options: Any) -> uvicorn.Config:
    """Return the configuration of an HTTP server for `app`; `options` are uvicorn's."""
    limits.log.install()
    return uvicorn.Config(
        app,
        http=partial(BoundedHttpProtocol, limits),  # type: ignore[arg-type]  # it is called like the class
        ws="none",
        lifespan="off",
        log_config=None,  # lines with the time, as all others of the node
        log_level="warning",
        access_log=False,
        server_header=False,
        **options,
    )


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection.

    A request that is too long or too slow is answered with an error and the connection closed; a client that does not
    read is cut off. A request that is sent before the previous answer is finished is not read: the connection closes
    after that answer. So there is one request at a time, the connection is always read, and a client that hangs up is
    noticed.
    """

    def __init__(
        self,
        limits: NodeLimits,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._deadlines = limits.deadlines
        self._admission = Admission.NONE
        self._phase = _Phase.HEAD
        self._phase_timer: TimerHandle | None = None
        self._write_timer: TimerHandle | None = None
        self._is_deaf = False
        self._ignored_bytes = 0
        self._reading_head = False
        self._section_ended = False  # a head or a message, within the bytes that are being parsed
        self._num_fields = 0
        self._field_bytes = 0  # in the request line and whole fields, or in whole trailers
        self._raw_bytes = 0  # in this head, or in this body beside its content, as far as it can be told
        self._content_bytes = 0  # content of the body in the bytes that are being parsed
        self._num_chunks = 0
        self._window_bytes = 0  # content of the body since its window began
        self._drained_bytes = 0  # content of the body since its answer ended

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._admission = self._limits.admit()
        if self._admission is Admission.NONE:
            self._refuse(_NO_CONNECTION_LEFT)
        else:
            self._enter(_Phase.HEAD)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._admission is not Admission.NONE:
            self._limits.leave()
        for timer in (self._phase_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self._limits.rounds.leave(self)  # a request that has not begun never does
        super().connection_lost(exc)

    def shutdown(self) -> None:
        super().shutdown()
        if self.transport.is_closing():
            self._enter(_Phase.CLOSING)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(_spread(self._deadlines.write_s), self.transport.abort)

    def resume_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            self._ignored_bytes += len(data)
            if self._ignored_bytes > MAX_IGNORED_BYTES:
                self.transport.abort()
            return
        self._section_ended = False
        self._content_bytes = self._num_chunks = 0
        try:
            self.parser.feed_data(data)
            self._count(len(data))
        except httptools.HttpParserUpgrade:  # the request is answered as if it asked for no upgrade
            self._is_deaf = True
            self.cycle.keep_alive = False
        except httptools.HttpParserError:
            if not self._is_deaf:  # else a callback ended it
                self.logger.warning("Invalid HTTP request received.")
                self._refuse(_NOT_HTTP)

    # The parser's callbacks

    def on_message_begin(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False
            self._stop()
        self._reading_head = True
        self._num_fields = self._field_bytes = self._raw_bytes = 0
        if self._phase is not _Phase.HEAD:
            self._enter(_Phase.HEAD)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_field(len(url), MAX_HEAD_BYTES, _HEAD_TOO_LONG)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        num_bytes = len(name) + len(value) + 4
        if not self._reading_head:  # a trailer, which is ignored
            self._count_field(num_bytes, MAX_TRAILER_BYTES, _TRAILERS_TOO_LONG)
            return
        self._count_field(num_bytes, MAX_HEAD_BYTES, _HEAD_TOO_LONG)
        self._num_fields += 1
        if self._num_fields > MAX_FIELDS:
            self._refuse(_TOO_MANY_FIELDS)
            self._stop()
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._reading_head = False
        self._section_ended = True
        self._field_bytes = self._raw_bytes = self._window_bytes = self._drained_bytes = 0
        is_spare = self._admission is Admission.SPARE
        if is_spare and without_model(self.url.partition(b"?")[0].decode("latin-1")) not in MONITORING_PATHS:
            self._limits.num_refused_connections += 1
            self._refuse(_NO_CONNECTION_LEFT)
            self._stop()
        super().on_headers_complete()
        if is_spare:
            self.cycle.keep_alive = False
        self._enter(_Phase.BODY)

    def on_chunk_header(self) -> None:
        self._num_chunks += 1

    def on_body(self, body: bytes) -> None:
        self._content_bytes += len(body)
        self._window_bytes += len(body)
        if self._phase is _Phase.DRAIN:
            self._drained_bytes += len(body)
            if self._drained_bytes > MAX_DRAINED_BYTES:
                self._close()
                self._stop()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._section_ended = True
        self.cycle.scope["state"]["came_s"] = time.perf_counter()
        super().on_message_complete()
        self._enter(_Phase.IDLE if self.cycle.response_complete else _Phase.ANSWER)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        if cycle.scope["http_version"] == "1.0":
            app = partial(_answer_without_chunks, cycle, app)
        begin = partial(super()._start_asgi_task, cycle, app)
        if without_model(cycle.scope["path"]) in URGENT_PATHS:
            begin()
        else:
            self._limits.rounds.enter(self, begin)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._unset_keepalive_if_required()  # any byte would disarm that timer
        if self.transport.is_closing():
            self._enter(_Phase.CLOSING)
        else:
            self._enter(_Phase.DRAIN if self._phase is _Phase.BODY else _Phase.IDLE)

    # Limits

    def _count_field(self, num_bytes: int, limit: int, error: ApiError) -> None:
        self._field_bytes += num_bytes
        if self._field_bytes > limit:
            self._refuse(error)
            self._stop()

    def _count(self, num_bytes: int) -> None:
        """Count bytes after they were parsed, also those of fields that are not complete.

        If a head or a message ended among them, it is unknown how many came after that, and none are counted.
        """
        if self._section_ended or self.transport.is_closing():
            return
        if self._reading_head:
            self._raw_bytes += num_bytes
            if self._raw_bytes > MAX_HEAD_BYTES:
                self._refuse(_HEAD_TOO_LONG)
        elif self._phase in (_Phase.BODY, _Phase.DRAIN):
            overhead_bytes = num_bytes - self._content_bytes - _CHUNK_OVERHEAD_BYTES * self._num_chunks
            self._raw_bytes = max(0, self._raw_bytes + overhead_bytes)
            if self._raw_bytes > MAX_TRAILER_BYTES:
                self._refuse(_TRAILERS_TOO_LONG)

    def _refuse(self, error: ApiError) -> None:
        """Answer with an error if that is still possible, and close the connection."""
        self._is_deaf = True
        cycle = self.cycle
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            self.transport.abort()
            return
        # In a drain the request at fault has its answer already.
        if self._phase is not _Phase.DRAIN:
            self.transport.write(_bytes_of(error))
        self._close()

    def _stop(self) -> None:
        """End the parsing from within one of its callbacks. Raises always."""
        self._is_deaf = True
        raise _StopParsing

    def _close(self) -> None:
        self.transport.close()
        self._enter(_Phase.CLOSING)

    def _enter(self, phase: _Phase) -> None:
        if self._phase_timer is not None:
            self._phase_timer.cancel()
        self._phase = phase
        self._phase_timer = self.loop.call_later(_spread(self._allowed_s(phase)), self._expire)

    def _allowed_s(self, phase: _Phase) -> float:
        deadlines = self._deadlines
        match phase:
            case _Phase.HEAD:
                return deadlines.spare_head_s if self._admission is Admission.SPARE else deadlines.head_s
            case _Phase.BODY:
                return deadlines.body_window_s
            case _Phase.ANSWER:
                return deadlines.write_s
            case _Phase.DRAIN:
                return deadlines.drain_s
            case _Phase.IDLE:
                return deadlines.idle_s
            case _Phase.CLOSING:
                return deadlines.close_s

    def _expire(self) -> None:
        """End a phase that has lasted as long as it may, or allow it more time."""
        match self._phase:
            case _Phase.HEAD if self._reading_head:
                self._refuse(_TOO_SLOW)
            case _Phase.BODY if self._body_is_slow():
                self._refuse(_TOO_SLOW)
            case _Phase.BODY:
                self._window_bytes = 0
                self._enter(_Phase.BODY)
            case _Phase.ANSWER if not self.transport.is_closing():  # an answer may take any time, unless it failed
                self._enter(_Phase.ANSWER)
            case _Phase.ANSWER | _Phase.CLOSING:
                self.transport.abort()
            case _:
                self._close()

    def _body_is_slow(self) -> bool:
        if self.flow.read_paused:  # by us, because the application does not read
            return False
        return self._window_bytes < self._deadlines.min_body_rate * self._deadlines.body_window_s


async def _answer_without_chunks(
    cycle: RequestResponseCycle,
    app: ASGI3Application,
    scope: HTTPScope,
    receive: ASGIReceiveCallable,
    send: ASGISendCallable,
) -> None:
    """Call `app`; an answer of unknown length ends with the connection, because HTTP/1.0 has no chunks."""
    is_declared = False

    async def send_plainly(event: ASGISendEvent) -> None:
        nonlocal is_declared
        if event["type"] == "http.response.start":
            is_declared = any(name.lower() == b"content-length" for name, _ in event.get("headers", ()))
            if not is_declared:
                cycle.chunked_encoding = False
        elif event["type"] == "http.response.body" and not is_declared:
            cycle.expected_content_length = len(event.get("body", b""))  # of this piece: uvicorn counts down
        await send(event)

    await app(scope, receive, send_plainly)


def _spread(deadline_s: float) -> float:
    """Return the time for a deadline with a random delay: many connections that began at once must not end at once."""
    return deadline_s * random.uniform(1.0, 1.0 + _SPREAD)


def _bytes_of(error: ApiError) -> bytes:
    """Return the whole answer, for a connection on which nothing follows."""
    body = error.body()
    retry_after = b"retry-after: %d\r\n" % error.retry_after_s if error.retry_after_s else b""
    return (
        b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%sconnection: close\r\n\r\n%s"
        % (error.status, HTTPStatus(error.status).phrase.encode(), len(body), retry_after, body)
    )
