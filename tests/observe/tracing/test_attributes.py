"""Attributes are those of the semantic conventions, as the published package spells them."""

from __future__ import annotations

import pytest

from headrace.api.operations.access_log import FIELDS
from headrace.observe.tracing.attributes import NAMES, span_attributes, span_name

FIELDS_OF_A_CALL = {
    "method": "POST",
    "path": "/v1/chat/completions",
    "status": 200,
    "request_id": "mine",
    "id": "chatcmpl-1",
    "tenant": "acme",
    "model": "fox",
    "stream": True,
    "prompt_tokens": 12,
    "completion_tokens": 3,
    "cached_tokens": 4,
    "cache": None,
    "finish_reason": "stop,length",
    "ttft_seconds": 0.5,
}


def test_a_call_has_the_attributes_of_the_conventions() -> None:
    assert span_attributes("/v1/chat/completions", FIELDS_OF_A_CALL) == {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "http.route": "/v1/chat/completions",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "headrace",
        "gen_ai.request.model": "fox",
        "gen_ai.request.stream": True,
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.response.model": "fox",
        "gen_ai.response.finish_reasons": ("stop", "length"),
        "gen_ai.response.time_to_first_chunk": 0.5,
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "headrace.request_id": "mine",
        "headrace.tenant": "acme",
    }
    assert span_name("POST", "/v1/chat/completions", "fox") == "chat fox"
    assert span_name("POST", "/v1/completions", "fox") == "text_completion fox"
    assert span_name("GET", "/v1/models", "") == "GET /v1/models"


def test_every_gen_ai_name_is_in_the_published_conventions() -> None:
    published = pytest.importorskip("opentelemetry.semconv._incubating.attributes.gen_ai_attributes")
    known = {value for name, value in vars(published).items() if name.startswith("GEN_AI_")}
    used = {
        name for name in span_attributes("/v1/completions", FIELDS_OF_A_CALL) if name.startswith("gen_ai.")
    }
    assert used <= known


def test_every_source_is_a_field_of_the_access_log() -> None:
    assert NAMES.keys() <= FIELDS.keys()
