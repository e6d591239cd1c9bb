"""Attributes are those of the semantic conventions, as the published package spells them."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from headrace.api.exchange import Exchange, Hooks
from headrace.api.operations.access_log import FIELDS
from headrace.core.events import (
    AdmitReason,
    Admitted,
    Arrived,
    Chunked,
    ChunkReason,
    Emitted,
    Event,
    Finished,
    Layer,
    LookedUp,
    Lookup,
    Preempted,
    PreemptReason,
    Skipped,
    SkipReason,
    Spared,
)
from headrace.core.request import FinishReason
from headrace.observe import tracing as spans_file
from headrace.observe.tracing import NAMES, RequestSpans, Span, begun, span_attributes, span_name
from headrace.wiring.observability import Traces, begin_span

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


TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CLIENT = f"00-{TRACE}-{PARENT}-01"
OFFSET = 1000.0

STORY = (
    (10.0, LookedUp("a", Layer.EXACT, Lookup.MISS, 0.25)),
    (10.0, Arrived("a", 40, "acme", 0)),
    (10.5, Skipped("a", SkipReason.NO_BLOCKS)),
    (11.0, Admitted("a", AdmitReason.NEW, 16, 40)),
    (11.0, Chunked("a", 16, 12, ChunkReason.BUDGET)),
    (11.5, Chunked("a", 28, 12, ChunkReason.REST)),
    (12.0, Emitted("a", (7,))),
    (12.5, Preempted("a", PreemptReason.NO_BLOCKS, 41)),
    (13.0, Admitted("a", AdmitReason.RESUMED, 32, 42)),
    (14.0, Emitted("a", (9, 10))),
    (15.0, Finished("a", FinishReason.STOP, 40, 3, 16)),
)


def traced(story: tuple[tuple[float, Event], ...], traceparent: str = CLIENT) -> tuple[list[Span], str]:
    made: list[Span] = []
    fold = RequestSpans(made.append, OFFSET)
    own, parent_id = begun(traceparent)
    assert parent_id is not None
    fold.follow(own, ["a"])
    for now, event in story:
        fold.fold(event, now)
    fold.end(own, parent_id, "chat fox", 9.5, 15.5, {"gen_ai.operation.name": "chat"})
    return made, own


def test_a_request_has_the_spans_of_its_phases() -> None:
    made, own = traced(STORY)
    assert [(span.name, span.start - OFFSET, span.end - OFFSET) for span in made] == [
        ("cache_lookup", 9.75, 10.0),
        ("queue", 10.0, 11.0),
        ("prefill", 11.0, 12.0),
        ("queue", 12.5, 13.0),
        ("decode", 12.0, 15.0),
        ("chat fox", 9.5, 15.5),
    ]
    root = made[-1]
    assert (root.trace_id, root.parent_id, root.server) == (TRACE, PARENT, True)
    assert own == f"00-{TRACE}-{root.span_id}-01"
    assert all((span.trace_id, span.parent_id) == (TRACE, root.span_id) for span in made[:-1])
    assert len({span.span_id for span in made} | {PARENT}) == len(made) + 1
    assert not any(span.error for span in made)


def test_spans_say_what_happened_in_them() -> None:
    lookup, queue, prefill, again, decode, _ = traced(STORY)[0]
    assert lookup.attributes == {"headrace.cache.layer": "exact", "headrace.cache.outcome": "miss"}
    assert queue.attributes == {"headrace.queue.wait_reason": "no_blocks"}
    assert prefill.attributes == {
        "headrace.prefill.chunks": 2,
        "headrace.prefill.computed_tokens": 24,
        "gen_ai.usage.cache_read.input_tokens": 16,
    }
    assert again.attributes == {"headrace.queue.wait_reason": "preempted_no_blocks"}
    assert decode.attributes == {"gen_ai.usage.output_tokens": 3}


@pytest.mark.parametrize(("events", "last"), [(3, "queue"), (5, "prefill"), (7, "decode")])
def test_a_request_that_fails_ends_the_phase_it_is_in_with_its_reason(events: int, last: str) -> None:
    story = (*STORY[:events], (20.0, Finished("a", FinishReason.TIMEOUT, 40, 0, 0)))
    span = traced(story)[0][-2]
    assert (span.name, span.end - OFFSET, span.error) == (last, 20.0, "timeout")


def test_a_cached_response_has_a_lookup_and_nothing_else() -> None:
    story = (
        (10.0, LookedUp("a", Layer.EXACT, Lookup.HIT, 0.25)),
        (10.0, Spared("a", "acme", Layer.EXACT, 40, 3, 5.0)),
    )
    assert [span.name for span in traced(story)[0]] == ["cache_lookup", "chat fox"]


def test_without_a_client_s_context_a_new_trace_begins() -> None:
    made, own = traced(STORY, "")
    assert made[-1].parent_id == ""
    assert len(made[-1].trace_id) == 32
    assert own.split("-")[1] == made[-1].trace_id


def test_what_the_client_does_not_sample_is_passed_on_and_makes_no_spans() -> None:
    unsampled = f"00-{TRACE}-{PARENT}-00"
    assert begun(unsampled) == (unsampled, None)
    made: list[Span] = []
    traces = Traces(RequestSpans(made.append, OFFSET), lambda: None)
    headers = Headers({"traceparent": unsampled})
    exchange = Exchange({"method": "POST", "path": "/x"}, headers, 0.0, Hooks((), (traces.follow,)))
    begin_span(exchange)
    exchange.opened("a", "fox", "acme", ["a"])
    for now, event in STORY:
        traces.spans.fold(event, now)
    traces.end(exchange)
    assert not made
    assert exchange.traceparent == unsampled


def test_requests_of_the_server_itself_make_no_spans() -> None:
    made: list[Span] = []
    fold = RequestSpans(made.append, OFFSET)
    for now, event in STORY:
        fold.fold(event, now)
    assert not made


def test_a_lookup_reported_after_the_end_is_kept() -> None:
    lookup, *rest = STORY
    made, _ = traced((*rest, (10.0, lookup[1])))
    assert "cache_lookup" in {span.name for span in made}


def test_an_ended_request_is_forgotten_in_time() -> None:
    fold = RequestSpans(lambda span: None, OFFSET)
    own, _ = begun(CLIENT)
    for number in range(100):
        fold.follow(own, [f"r{number}"])
        fold.fold(Finished(f"r{number}", FinishReason.STOP, 1, 1, 0), float(number))
    assert len(fold._requests) <= 2
    assert len(fold._ended) <= 2


def test_ids_that_never_come_to_an_end_do_not_fill_the_memory(monkeypatch) -> None:
    monkeypatch.setattr(spans_file, "MOST_REQUESTS", 10)
    fold = RequestSpans(lambda span: None, OFFSET)
    for number in range(100):
        own, _ = begun(CLIENT)
        fold.follow(own, [f"r{number}"])
        fold.end(own, PARENT, "x", 0.0, 1.0, {})
    assert len(fold._requests) == 10
