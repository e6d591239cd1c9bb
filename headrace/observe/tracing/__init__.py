"""Traces of requests for OpenTelemetry.

- `spans`: a fold over events that makes spans of a request: queue, prefill, decode, cache lookups.
- `attributes`: names of the GenAI semantic conventions.
- `export`: sends spans to a collector on a background thread; needs the extra ``otel``.
"""
