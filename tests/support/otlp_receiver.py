"""A collector of OpenTelemetry: a small HTTP server that decodes what it is sent."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Receiver:
    """An OTLP collector: the spans that arrived, and their senders' attributes."""

    url: str
    spans: queue.Queue[Any] = field(default_factory=queue.Queue)
    resources: list[dict[str, Any]] = field(default_factory=list)
    may_answer: threading.Event = field(default_factory=threading.Event)

    def trace(self, trace_id: str, num_spans: int) -> dict[str, Any]:
        """Return the spans of one trace by name, once `num_spans` have come."""
        found = {}
        while len(found) < num_spans:
            span = self.spans.get(timeout=60)
            if span.trace_id.hex() == trace_id:
                found[span.name] = span
        return found


def values(attributes: Any) -> dict[str, Any]:
    found = {}
    for attribute in attributes:
        kind = attribute.value.WhichOneof("value")
        value = getattr(attribute.value, kind)
        found[attribute.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


@contextmanager
def receiving() -> Iterator[Receiver]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
        ExportTraceServiceRequest,
        ExportTraceServiceResponse,
    )

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            message = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
            receiver.may_answer.wait(60)
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.end_headers()
            self.wfile.write(ExportTraceServiceResponse().SerializeToString())
            for resource in message.resource_spans:
                receiver.resources.append(values(resource.resource.attributes))
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        receiver.spans.put(span)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver = Receiver(f"http://127.0.0.1:{server.server_port}/v1/traces")
    receiver.may_answer.set()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
