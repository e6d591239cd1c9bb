"""Sends spans to an OpenTelemetry collector over OTLP/HTTP, in batches, on a background thread.

It needs the packages of the extra ``otel``. If the collector is down, spans are dropped and requests are not delayed.
"""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from headrace.observe.tracing import Span

EXPORT_SECONDS = 5.0
"""Longest time to send one batch, also at shutdown while the collector is down."""

_NANOSECONDS = 1e9


class SpanExporter:
    """Exports spans to the collector at ``endpoint``; ``resource`` describes this server."""

    def __init__(self, endpoint: str, resource: Mapping[str, str], version: str) -> None:
        self._resource = Resource.create(dict(resource))
        self._scope = InstrumentationScope("headrace", version)
        self._processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_SECONDS))

    def export(self, span: Span) -> None:
        """Queue a span; a full queue drops it."""
        context = _context(span.trace_id, span.span_id, remote=False)
        parent = _context(span.trace_id, span.parent_id, remote=span.server) if span.parent_id else None
        self._processor.on_end(
            ReadableSpan(
                span.name,
                context,
                parent,
                self._resource,
                dict(span.attributes),
                kind=SpanKind.SERVER if span.server else SpanKind.INTERNAL,
                status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
                start_time=int(span.start * _NANOSECONDS),
                end_time=int(span.end * _NANOSECONDS),
                instrumentation_scope=self._scope,
            )
        )

    def close(self) -> None:
        """Send what is queued and stop."""
        self._processor.shutdown()  # type: ignore[no-untyped-call]


def _context(trace_id: str, span_id: str, remote: bool) -> SpanContext:
    sampled = TraceFlags(TraceFlags.SAMPLED)
    return SpanContext(int(trace_id, 16), int(span_id, 16), remote, sampled)
