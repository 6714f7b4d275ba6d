"""Traces of requests: the trace context in headers, and the figures of each request, which a thread sends.

On the event loop, only a record is filled. `server.otlp` makes the spans.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swiftkv.server.finished import FinishedRequest
from swiftkv.server.limits import without_model
from swiftkv.server.request_log import SKIPPED_PATHS, RequestRecord

_HEADER, _STATE_HEADER = "traceparent", "tracestate"
_PARENT = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
_LONGEST_STATE = 512  # characters that W3C asks everybody to pass on


@dataclass(frozen=True, slots=True)
class TraceContext:
    """One span's place in its trace, as W3C's `traceparent` says it."""

    trace_id: int
    span_id: int
    is_sampled: bool = True
    state: str = ""

    @classmethod
    def sent(cls, headers: Headers) -> TraceContext | None:
        """Return the context that a client sent; `None` without a sound one."""
        found = _PARENT.fullmatch(headers.get(_HEADER, ""))
        if found is None or (found[1] == "00" and found[5]):
            return None
        context = cls(
            int(found[2], 16),
            int(found[3], 16),
            bool(int(found[4], 16) & _SAMPLED),
            headers.get(_STATE_HEADER, "")[:_LONGEST_STATE],
        )
        return context if context.trace_id and context.span_id else None

    @classmethod
    def below(cls, parent: TraceContext | None) -> TraceContext:
        """Return the context of a new span below `parent`, or in a trace of its own."""
        trace_id = secrets.randbits(128) or 1 if parent is None else parent.trace_id
        return cls(trace_id, secrets.randbits(64) or 1, state="" if parent is None else parent.state)

    def header(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{_SAMPLED if self.is_sampled else 0:02x}"


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """One request that has ended, for a trace. Seconds are by `time.perf_counter`."""

    context: TraceContext
    parent: TraceContext | None
    method: str
    route: str | None
    request_id: str
    model: str | None
    status: int
    began_s: float
    ended_s: float
    sequences: Sequence[FinishedRequest]
    offset_ns: int
    """The Unix time in nanoseconds at which `time.perf_counter` was 0."""

    def unix_ns(self, moment_s: float) -> int:
        return int(moment_s * 1e9) + self.offset_ns


class TraceSink(Protocol):
    """Takes traces; never waits, and never fails."""

    def put(self, trace: RequestTrace) -> None: ...


class TraceMiddleware:
    """Traces requests, except those of monitoring and those whose client says that its trace is not recorded.

    Stands within `RequestIdMiddleware`, whose record it reads. The answer has the context of its span.
    """

    def __init__(self, app: ASGIApp, sink: TraceSink) -> None:
        self.app = app
        self._sink = sink

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or without_model(scope["path"]) in SKIPPED_PATHS:
            await self.app(scope, receive, send)
            return
        parent = TraceContext.sent(Headers(scope=scope))
        if parent is not None and not parent.is_sampled:
            await self.app(scope, receive, send)
            return
        context = TraceContext.below(parent)
        record: RequestRecord = scope["state"]["record"]
        record.is_traced = True

        async def send_with_context(event: Message) -> None:
            if event["type"] == "http.response.start":
                MutableHeaders(scope=event)[_HEADER] = context.header()
            await send(event)

        try:
            await self.app(scope, receive, send_with_context)
        finally:
            ended_s = time.perf_counter()
            self._sink.put(
                RequestTrace(
                    context=context,
                    parent=parent,
                    method=scope["method"],
                    route=_route(scope),
                    request_id=record.request_id,
                    model=record.model,
                    status=record.status,
                    began_s=record.began_s,
                    ended_s=ended_s,
                    sequences=tuple(record.finished),
                    offset_ns=time.time_ns() - int(ended_s * 1e9),
                )
            )


def _route(scope: Scope) -> str | None:
    """Return the template of the path that was asked for, without the model; `None` if there is no such path."""
    path: str | None = getattr(scope.get("route"), "path", None)
    return None if path is None else without_model(path)
