"""A small OpenTelemetry collector as a process of its own: it receives OTLP over HTTP and prints spans as JSON lines.

``python -m tests.doubles.collector`` prints the port that it listens on first.
"""

from __future__ import annotations

import gzip
import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status


def value_of(any_value: Any) -> Any:
    kind = any_value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(each) for each in any_value.array_value.values]
    return getattr(any_value, kind)


def attributes_of(pairs: Any) -> dict[str, Any]:
    return {pair.key: value_of(pair.value) for pair in pairs}


def lines(raw: bytes) -> list[str]:
    request = ExportTraceServiceRequest.FromString(raw)
    return [
        json.dumps(
            {
                "service": attributes_of(group.resource.attributes).get("service.name"),
                "scope": scoped.scope.name,
                "name": span.name,
                "kind": Span.SpanKind.Name(span.kind),
                "trace_id": span.trace_id.hex(),
                "span_id": span.span_id.hex(),
                "parent_id": span.parent_span_id.hex(),
                "start": span.start_time_unix_nano,
                "end": span.end_time_unix_nano,
                "status": Status.StatusCode.Name(span.status.code),
                "attributes": attributes_of(span.attributes),
            }
        )
        for group in request.resource_spans
        for scoped in group.scope_spans
        for span in scoped.spans
    ]


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            raw = gzip.decompress(raw)
        right = self.path == "/v1/traces" and self.headers["Content-Type"] == "application/x-protobuf"
        if right:
            for line in lines(raw):
                print(line, flush=True)
        body = ExportTraceServiceResponse().SerializeToString()
        self.send_response(200 if right else 404)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Stay quiet: standard output is for spans."""


if __name__ == "__main__":
    server = HTTPServer(("127.0.0.1", 0), Receiver)
    print(server.server_address[1], flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        sys.exit(0)
