"""Spans arrive at a collector that runs as another process, over OTLP/HTTP."""

from __future__ import annotations

import pytest

from headrace.observe.tracing import Span
from tests.doubles.collecting import collecting

pytest.importorskip("opentelemetry.sdk")

TRACE, PARENT, OWN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", "00f067aa0ba902b7"


def test_a_collector_receives_spans_as_they_were_made() -> None:
    from headrace.observe.span_exporter import SpanExporter

    with collecting() as collector:
        exporter = SpanExporter(collector.url, {"service.name": "headrace"}, "1.0")
        finish = {"gen_ai.response.finish_reasons": ("stop",), "http.response.status_code": 200}
        exporter.export(Span("chat fox", TRACE, OWN, PARENT, 1000.5, 1001.25, finish, True))
        exporter.export(Span("decode", TRACE, PARENT, OWN, 1000.75, 1001.0, {}, error="timeout"))
        exporter.close()
        root, child = collector.spans(2)
    assert root == {
        "service": "headrace",
        "scope": "headrace",
        "name": "chat fox",
        "kind": "SPAN_KIND_SERVER",
        "trace_id": TRACE,
        "span_id": OWN,
        "parent_id": PARENT,
        "start": 1_000_500_000_000,
        "end": 1_001_250_000_000,
        "status": "STATUS_CODE_UNSET",
        "attributes": {"gen_ai.response.finish_reasons": ["stop"], "http.response.status_code": 200},
    }
    assert (child["kind"], child["parent_id"], child["status"]) == (
        "SPAN_KIND_INTERNAL",
        OWN,
        "STATUS_CODE_ERROR",
    )


def test_without_a_collector_export_returns_at_once_and_raises_nothing(caplog) -> None:
    from headrace.observe.span_exporter import SpanExporter

    exporter = SpanExporter("http://127.0.0.1:9/v1/traces", {}, "1.0")
    for _ in range(10):
        exporter.export(Span("chat fox", TRACE, OWN, "", 1.0, 2.0, {}, True))
    exporter.close()
