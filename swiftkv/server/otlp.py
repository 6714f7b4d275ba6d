"""Sends traces to a collector of OpenTelemetry (OTLP over HTTP), from a thread with a bounded queue.

A collector that is slow or gone costs traces, which are counted, and nothing else.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import islice

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from swiftkv.errors import ConfigError
from swiftkv.server.tracing import RequestTrace

_MAX_WAITING = 2048
_MAX_AT_ONCE = 256
_GATHER_S = 0.5  # between two messages to the collector
_TIMEOUT_S = 5.0  # for one message, its repetitions included
_CLOSE_S = 2.0

logger = logging.getLogger(__name__)


class OtlpSink(Collector):
    """A `TraceSink` that makes spans and sends them. As a collector of metrics it counts what became of them."""

    def __init__(self, endpoint: str, *, timeout_s: float = _TIMEOUT_S, max_waiting: int = _MAX_WAITING) -> None:
        """`endpoint` is a URL, with the path; `max_waiting` traces may wait for it.

        Raises `ConfigError` where the packages of the extra `otlp` are missing.
        """
        try:
            from swiftkv.server.otlp_spans import SpanMaker, open_exporter
        except ImportError as error:
            raise ConfigError(
                f"node.otlp: the package {error.name} is missing; install it with: pip install 'swiftkv[otlp]'"
            ) from None
        self.num_sent = self.num_dropped = 0
        self._endpoint = endpoint
        self._maker = SpanMaker()
        self._export = open_exporter(endpoint, timeout_s)
        self._waiting: queue.Queue[RequestTrace] = queue.Queue(max_waiting)
        self._closing = threading.Event()
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def put(self, trace: RequestTrace) -> None:
        try:
            self._waiting.put_nowait(trace)
        except queue.Full:
            self.num_dropped += 1

    def close(self) -> None:
        """Send the traces that wait, for two seconds at most."""
        self._closing.set()
        self._thread.join(_CLOSE_S)

    def collect(self) -> Iterable[Metric]:
        traces = CounterMetricFamily("swiftkv:traces", "Traces of requests, by outcome", labels=["outcome"])
        traces.add_metric(["sent"], self.num_sent)
        traces.add_metric(["dropped"], self.num_dropped)
        yield traces

    def _run(self) -> None:
        while not self._closing.wait(_GATHER_S):
            self._send_waiting()
        self._send_waiting()

    def _send_waiting(self) -> None:
        while traces := list(islice(self._taken(), _MAX_AT_ONCE)):
            try:
                is_sent = self._export(self._maker.spans(traces))
            except Exception:  # noqa: BLE001 (whatever it is, later traces may be sent)
                self._note_lost(traces, "traces are lost: they could not be made or sent", has_error=True)
                continue
            if is_sent:
                self.num_sent += len(traces)
                self._has_failed = False
            else:
                self._note_lost(traces, f"traces are lost: {self._endpoint} does not take them")

    def _note_lost(self, traces: Sequence[RequestTrace], why: str, *, has_error: bool = False) -> None:
        """Count traces that were not sent, and log it unless those before them were lost, too."""
        self.num_dropped += len(traces)
        if not self._has_failed:
            logger.warning("%s; swiftkv:traces_total counts them", why, exc_info=has_error)
        self._has_failed = True

    def _taken(self) -> Iterator[RequestTrace]:
        while True:
            try:
                yield self._waiting.get_nowait()
            except queue.Empty:
                return


@contextmanager
def open_sink(endpoint: str | None) -> Iterator[OtlpSink | None]:
    """Yield a sink that sends traces to `endpoint`, or `None` without one. Raises as `OtlpSink` does."""
    if endpoint is None:
        yield None
        return
    with closing(OtlpSink(endpoint)) as sink:
        yield sink
