"""Traces of requests, as a collector of OpenTelemetry gets them: a real one decodes what arrives."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from echo_gateway import Gateway, start_gateway

from swiftkv.errors import ConfigError
from swiftkv.server.app import ServerSettings
from swiftkv.server.otlp import OtlpSink
from swiftkv.server.tokenizer import Tokenizer
from swiftkv.server.tracing import RequestTrace, TraceContext
from tests.support.node_process import wait_for
from tests.support.otlp_receiver import Receiver, receiving, values

pytest.importorskip("opentelemetry.sdk", reason="the extra otlp is not installed")

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY: dict[str, Any] = {"model": "chat", "prompt": "a b c", "max_tokens": 5}


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def traced(receiver: Receiver, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with closing(OtlpSink(receiver.url)) as sink:
        settings = ServerSettings(trace_sink=sink)
        gateway, stop = start_gateway(tmp_path_factory.mktemp("traced"), tokenizer, settings=settings)
        yield gateway
        stop()


def ask(gateway: Gateway, trace_id: str = TRACE_ID, flags: str = "01", **fields: Any) -> httpx.Response:
    headers = {"traceparent": f"00-{trace_id}-{PARENT_ID}-{flags}", "X-Request-Id": "mine"}
    with gateway.http() as http:
        return http.post("/v1/completions", json={**BODY, **fields}, headers=headers)


def test_the_spans_of_a_request(traced: Gateway, receiver: Receiver) -> None:
    answer = ask(traced)
    version, trace_id, span_id, flags = answer.headers["traceparent"].split("-")
    assert (version, trace_id, flags) == ("00", TRACE_ID, "01")
    spans = receiver.trace(TRACE_ID, 5)
    root = spans["POST /v1/completions"]
    assert (root.span_id.hex(), root.parent_span_id.hex()) == (span_id, PARENT_ID)
    said = values(root.attributes)
    assert said["http.response.status_code"] == 200
    assert (said["gen_ai.request.id"], said["gen_ai.response.model"]) == ("mine", "chat")
    assert (said["gen_ai.usage.completion_tokens"], said["gen_ai.response.finish_reasons"]) == (5, ["length"])
    queued, prefill, chunk, decode = (spans[name] for name in ("queue", "prefill", "prefill chunk", "decode"))
    assert {span.parent_span_id for span in (queued, prefill, decode)} == {root.span_id}
    assert chunk.parent_span_id == prefill.span_id
    moments = [
        root.start_time_unix_nano,
        queued.start_time_unix_nano,
        queued.end_time_unix_nano,
        prefill.end_time_unix_nano,
        decode.end_time_unix_nano,
        root.end_time_unix_nano,
    ]
    assert moments == sorted(moments)
    assert (prefill.start_time_unix_nano, decode.start_time_unix_nano) == (moments[2], moments[3])
    num_tokens = answer.json()["usage"]["prompt_tokens"]
    assert values(prefill.attributes)["swiftkv.prompt_tokens"] == num_tokens
    assert values(chunk.attributes)["swiftkv.prompt_tokens"] == num_tokens
    assert values(decode.attributes)["swiftkv.generated_tokens"] == 5
    assert receiver.resources[-1]["service.name"] == "swiftkv"


def test_each_sequence_has_spans(traced: Gateway, receiver: Receiver) -> None:
    trace_id = "1" * 32
    ask(traced, trace_id, prompt=[[5, 6, 7], [8]], n=2, stream=True)
    seen: list[Any] = []
    while sum(span.name == "decode" for span in seen) < 4:
        seen += [span for span in [receiver.spans.get(timeout=60)] if span.trace_id.hex() == trace_id]
    decodes = [values(span.attributes)["swiftkv.sequence"] for span in seen if span.name == "decode"]
    assert sorted(decodes) == [0, 1, 2, 3]


def test_a_request_that_fails(traced: Gateway, receiver: Receiver) -> None:
    trace_id = "2" * 32
    assert ask(traced, trace_id, model="nobody").status_code == 404
    said = values(receiver.trace(trace_id, 1)["POST /v1/completions"].attributes)
    assert said["http.response.status_code"] == 404
    assert "gen_ai.usage.num_sequences" not in said


@pytest.mark.parametrize(
    "parent", ["", "00-" + "0" * 32 + f"-{PARENT_ID}-01", f"ff-{TRACE_ID}-{PARENT_ID}-01", "nonsense"]
)
def test_without_a_sound_context_a_trace_begins_here(traced: Gateway, receiver: Receiver, parent: str) -> None:
    with traced.http() as http:
        answer = http.post("/v1/completions", json=BODY, headers={"traceparent": parent})
    trace_id = answer.headers["traceparent"].split("-")[1]
    assert trace_id not in (TRACE_ID, "0" * 32)
    assert not receiver.trace(trace_id, 5)["POST /v1/completions"].parent_span_id


def test_what_is_not_traced(traced: Gateway, receiver: Receiver) -> None:
    """A trace that its client does not record, and requests of monitoring."""
    silent = "3" * 32
    assert "traceparent" not in ask(traced, silent, flags="00").headers
    with traced.http() as http:
        assert "traceparent" not in http.get("/health").headers
    ask(traced, "4" * 32)
    names = set()
    while "POST /v1/completions" not in names:
        span = receiver.spans.get(timeout=60)
        assert span.trace_id.hex() != silent
        if span.trace_id.hex() == "4" * 32:
            names.add(span.name)


def test_a_collector_that_is_gone_costs_a_counted_drop(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with closing(OtlpSink("http://127.0.0.1:9/v1/traces", timeout_s=0.2)) as sink:
        gateway, stop = start_gateway(tmp_path, tokenizer, settings=ServerSettings(trace_sink=sink))
        gateway.metrics.registry.register(sink)
        try:
            assert ask(gateway).status_code == 200
            wait_for("the trace to be given up", lambda: sink.num_dropped)
            with gateway.http() as http:
                metrics = http.get("/metrics").text
        finally:
            stop()
    assert 'swiftkv:traces_total{outcome="dropped"} 1.0' in metrics
    assert 'swiftkv:traces_total{outcome="sent"} 0.0' in metrics


def test_a_collector_that_is_slow_holds_up_nobody(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """It answers nothing while more requests are answered than may wait for it."""
    most = 4
    with receiving() as receiver, closing(OtlpSink(receiver.url, timeout_s=60, max_waiting=most)) as sink:
        receiver.may_answer.clear()
        gateway, stop = start_gateway(tmp_path, tokenizer, settings=ServerSettings(trace_sink=sink))
        try:
            for _ in range(3 * most):
                assert ask(gateway).status_code == 200
            wait_for("traces to be dropped", lambda: sink.num_dropped)
            receiver.may_answer.set()
            wait_for("the rest to be sent", lambda: sink.num_sent + sink.num_dropped == 3 * most)
        finally:
            receiver.may_answer.set()
            stop()
    assert sink.num_sent > 0


def test_traces_go_on_after_one_that_cannot_be_sent(caplog: pytest.LogCaptureFixture) -> None:
    def trace(trace_id: int, ended_s: float) -> RequestTrace:
        context = TraceContext(trace_id, 7)
        return RequestTrace(context, None, "POST", "/v1/completions", "mine", "chat", 200, 1.0, ended_s, [], 0)

    with receiving() as receiver, closing(OtlpSink(receiver.url)) as sink:
        for num_lost in (1, 2):
            sink.put(trace(5, math.nan))
            wait_for("the trace to be given up", lambda num_lost=num_lost: sink.num_dropped == num_lost)
        sink.put(trace(6, 2.0))
        assert receiver.trace(f"{6:032x}", 1)
        wait_for("the trace to be counted", lambda: sink.num_sent == 1)
    assert receiver.spans.empty()
    [logged] = [record for record in caplog.records if record.name == "swiftkv.server.otlp"]
    assert logged.exc_info is not None
    assert "traces are lost" in logged.getMessage()


def test_without_the_packages_the_start_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "swiftkv.server.otlp_spans", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"node\.otlp: .*pip install 'swiftkv\[otlp\]'"):
        OtlpSink("http://127.0.0.1:9/v1/traces")
