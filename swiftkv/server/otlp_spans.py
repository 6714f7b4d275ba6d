"""Spans of OpenTelemetry, made of requests that have ended. Needs the packages of the extra `otlp`."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from swiftkv import __version__
from swiftkv.server.finished import FinishedRequest
from swiftkv.server.tracing import RequestTrace, TraceContext

Attributes = dict[str, str | int | float | Sequence[str]]

_SERVER_ERROR = 500


def open_exporter(endpoint: str, timeout_s: float) -> Callable[[Sequence[ReadableSpan]], bool]:
    """Return a function that sends spans, and says whether they arrived within `timeout_s`."""
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it would write a line for each try
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=timeout_s)
    return lambda spans: exporter.export(spans) is SpanExportResult.SUCCESS


class _ChosenIds(IdGenerator):
    """Gives out the ids that clients were sent already, and random ones after them."""

    def __init__(self) -> None:
        self.next: TraceContext | None = None

    def generate_trace_id(self) -> int:
        return secrets.randbits(128) or 1 if self.next is None else self.next.trace_id

    def generate_span_id(self) -> int:
        if self.next is None:
            return secrets.randbits(64) or 1
        chosen, self.next = self.next, None
        return chosen.span_id


class _Ended(SpanProcessor):
    """Keeps the spans that have ended."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


class SpanMaker:
    """Makes the spans of requests: one for the whole, and below it those of each sequence.

    Sampling and the service's name follow OpenTelemetry's own variables (`OTEL_TRACES_SAMPLER`, `OTEL_SERVICE_NAME`).
    """

    def __init__(self) -> None:
        self._ids = _ChosenIds()
        self._ended = _Ended()
        name = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "swiftkv"}
        provider = TracerProvider(
            resource=Resource.create({**name, "service.version": __version__}),
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        provider.add_span_processor(self._ended)
        self._tracer = provider.get_tracer("swiftkv", __version__)

    def spans(self, traces: Sequence[RequestTrace]) -> list[ReadableSpan]:
        self._ended.spans = []  # not spans of an earlier call that failed, which count as lost
        for trace in traces:
            self._make(trace)
        return self._ended.spans

    def _make(self, trace: RequestTrace) -> None:
        self._ids.next = trace.context
        span = self._tracer.start_span(
            trace.method if trace.route is None else f"{trace.method} {trace.route}",
            context=_context(trace.parent),
            kind=SpanKind.SERVER,
            start_time=trace.unix_ns(trace.began_s),
            attributes=_request_attributes(trace),
        )
        inside = set_span_in_context(span, Context())
        for index, sequence in enumerate(trace.sequences):
            self._make_sequence(trace, index, sequence, inside)
        if trace.status >= _SERVER_ERROR:
            span.set_status(Status(StatusCode.ERROR))
        span.end(trace.unix_ns(trace.ended_s))

    def _make_sequence(self, trace: RequestTrace, index: int, sequence: FinishedRequest, inside: Context) -> None:
        arrived_s, ended_s = sequence.arrived_s, sequence.arrived_s + sequence.e2e_s
        admitted_s = ended_s if sequence.queue_s is None else arrived_s + sequence.queue_s
        first_s = ended_s if sequence.first_token_s is None else arrived_s + sequence.first_token_s
        number: Attributes = {"swiftkv.sequence": index}
        self._add(trace, "queue", (arrived_s, admitted_s), inside, number)
        if sequence.queue_s is None:
            return
        prefill = self._tracer.start_span(
            "prefill",
            context=inside,
            start_time=trace.unix_ns(admitted_s),
            attributes={
                **number,
                "swiftkv.prompt_tokens": sequence.prompt_tokens,
                "swiftkv.cached_tokens": sequence.cached_tokens,
            },
        )
        for step in sequence.chunks:
            chunk = self._tracer.start_span(
                "prefill chunk",
                context=set_span_in_context(prefill, Context()),
                start_time=step.began_ns,
                attributes={
                    "swiftkv.prompt_tokens": step.num_prompt_tokens,
                    "swiftkv.exposed_copy_seconds": step.exposed_s,
                },
            )
            chunk.end(step.ended_ns)
        prefill.end(trace.unix_ns(first_s))
        if sequence.first_token_s is not None:
            decoded: Attributes = {
                **number,
                "swiftkv.generated_tokens": sequence.generation_tokens,
                "swiftkv.exposed_copy_seconds": sequence.decode_exposed_s,
            }
            self._add(trace, "decode", (first_s, ended_s), inside, decoded)

    def _add(
        self, trace: RequestTrace, name: str, times_s: tuple[float, float], inside: Context, attributes: Attributes
    ) -> None:
        begun_s, ended_s = times_s
        span = self._tracer.start_span(name, context=inside, start_time=trace.unix_ns(begun_s), attributes=attributes)
        span.end(trace.unix_ns(ended_s))


def _context(parent: TraceContext | None) -> Context:
    if parent is None:
        return Context()
    remote = SpanContext(
        parent.trace_id,
        parent.span_id,
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
        trace_state=TraceState.from_header([parent.state] if parent.state else []),
    )
    return set_span_in_context(NonRecordingSpan(remote), Context())


def _request_attributes(trace: RequestTrace) -> Attributes:
    """Return the attributes of a request's span, under vLLM's names where it has any."""
    attributes: Attributes = {
        "http.request.method": trace.method,
        "http.response.status_code": trace.status,
        "gen_ai.request.id": trace.request_id,
    }
    if trace.route is not None:
        attributes["http.route"] = trace.route
    if trace.model is not None:
        attributes["gen_ai.response.model"] = trace.model
    sequences = trace.sequences
    if not sequences:
        return attributes
    queued = [sequence.queue_s for sequence in sequences if sequence.queue_s is not None]
    first = [sequence.first_token_s for sequence in sequences if sequence.first_token_s is not None]
    if queued:
        attributes["gen_ai.latency.time_in_queue"] = max(queued)
    if first:
        attributes["gen_ai.latency.time_to_first_token"] = min(first)
    return attributes | {
        "gen_ai.usage.num_sequences": len(sequences),
        "gen_ai.usage.prompt_tokens": sum(sequence.prompt_tokens for sequence in sequences),
        "gen_ai.usage.completion_tokens": sum(sequence.generation_tokens for sequence in sequences),
        "gen_ai.latency.e2e": max(sequence.e2e_s for sequence in sequences),
        "gen_ai.response.finish_reasons": sorted({sequence.reason for sequence in sequences}),
    }
