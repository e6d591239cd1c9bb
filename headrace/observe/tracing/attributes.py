"""Span names and attributes of an HTTP request, named as in OpenTelemetry's semantic conventions for GenAI and HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
}
"""Routes that generate, and their ``gen_ai.operation.name``."""

PROVIDER = "headrace"

NAMES = {
    "method": "http.request.method",
    "status": "http.response.status_code",
    "id": "gen_ai.response.id",
    "stream": "gen_ai.request.stream",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "ttft_seconds": "gen_ai.response.time_to_first_chunk",
    "error": "error.type",
    "request_id": "headrace.request_id",
    "tenant": "headrace.tenant",
    "service_class": "headrace.service_class",
    "cache": "headrace.cache",
}
"""Fields of an access record and the attributes that carry them."""


def span_name(method: str, route: str, model: str) -> str:
    """The name of the span of an HTTP request: operation and model where it generates, else method and route."""
    operation = OPERATIONS.get(route)
    return f"{operation} {model}" if operation and model else f"{method} {route}"


def span_attributes(route: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of the span of an HTTP request, from the fields of its access record."""
    attributes = {name: fields[field] for field, name in NAMES.items() if fields.get(field) is not None}
    attributes["http.route"] = route
    if route in OPERATIONS:
        attributes["gen_ai.operation.name"] = OPERATIONS[route]
        attributes["gen_ai.provider.name"] = PROVIDER
    if fields.get("model"):
        attributes["gen_ai.request.model"] = attributes["gen_ai.response.model"] = fields["model"]
    if fields.get("finish_reason"):
        attributes["gen_ai.response.finish_reasons"] = tuple(fields["finish_reason"].split(","))
    return attributes
