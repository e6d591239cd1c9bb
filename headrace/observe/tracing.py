"""Spans of requests from events, with names and attributes as in OpenTelemetry's conventions for GenAI and HTTP."""

from __future__ import annotations

import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from headrace.core.events import (
    AdmitReason,
    Admitted,
    Arrived,
    Chunked,
    Emitted,
    Event,
    Finished,
    Layer,
    LookedUp,
    Lookup,
    Preempted,
    Skipped,
    Spared,
)
from headrace.core.request import FinishReason

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


# Makes the spans of a request from events.

MOST_REQUESTS = 20_000
"""Maximum number of concurrently traced requests. Beyond it, the oldest is dropped and loses its spans."""

LATE_SECONDS = 1.0
"""Events from outside the engine, such as cache lookups, may arrive this long after the end of their request."""

_WHOLE = (FinishReason.STOP, FinishReason.LENGTH)


class Span(NamedTuple):
    """One operation. Ids are lower-case hexadecimal text, times are Unix seconds; ``parent_id`` may be empty.

    ``server`` marks the span of an HTTP request, and ``remote`` one whose parent is the client's. ``error`` is empty if
    the operation succeeded.
    """

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start: float
    end: float
    attributes: Mapping[str, Any]
    server: bool = False
    error: str = ""


class _Request:
    """A sequence in the engine, until it ends."""

    __slots__ = (
        "admitted",
        "cached",
        "chunks",
        "computed",
        "first",
        "output",
        "parent_id",
        "trace_id",
        "wait",
        "waits",
    )

    def __init__(self, trace_id: str, parent_id: str) -> None:
        self.trace_id = trace_id
        self.parent_id = parent_id
        self.waits: float | None = None  # since when it is in the queue
        self.wait = ""  # why it was not admitted
        self.admitted: float | None = None
        self.first: float | None = None
        self.cached = self.computed = self.chunks = self.output = 0


def begun(traceparent: str) -> tuple[str, str | None]:
    """The trace context of a new span of an HTTP request, and the id of the span above it (empty: it has none).

    It is below the client's trace context ``traceparent``, or in a new trace if that is empty. If the client does not
    sample it, there is no span (None), and the context is the client's.
    """
    if not traceparent:
        return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01", ""
    _, trace_id, parent_id, flags = traceparent.split("-")[:4]
    if not int(flags, 16) & 1:
        return traceparent, None
    return f"00-{trace_id}-{secrets.token_hex(8)}-01", parent_id


class RequestSpans:
    """A `core.ports.Watcher` that calls ``export`` with each span when it ends.

    ``clock_offset`` is Unix time minus the clock of the events. `begun`, `follow` and `end` frame an HTTP request;
    requests without that frame have no spans.
    """

    def __init__(self, export: Callable[[Span], None], clock_offset: float) -> None:
        self._export = export
        self._offset = clock_offset
        self._requests: OrderedDict[str, _Request] = OrderedDict()
        self._ended: deque[tuple[float, str]] = deque()
        self._folds: dict[type, Callable[[_Request, Any, float], None]] = {
            Arrived: self._arrived,
            Admitted: self._admitted,
            Skipped: self._skipped,
            Chunked: self._chunked,
            Emitted: self._emitted,
            Preempted: self._preempted,
            Finished: self._finished,
            LookedUp: self._looked_up,
            Spared: self._spared,
        }

    def follow(self, traceparent: str, request_ids: Sequence[str]) -> None:
        """Make spans of the engine's requests ``request_ids`` below the HTTP request's span."""
        _, trace_id, span_id, _ = traceparent.split("-")
        for request_id in request_ids:
            self._requests[request_id] = _Request(trace_id, span_id)
        while len(self._requests) > MOST_REQUESTS:
            self._requests.popitem(last=False)

    def end(
        self,
        traceparent: str,
        parent_id: str,
        name: str,
        start: float,
        end: float,
        attributes: Mapping[str, Any],
        error: str = "",
    ) -> None:
        """End the span of an HTTP request; ``start`` and ``end`` are on the clock of the events."""
        _, trace_id, span_id, _ = traceparent.split("-")
        start, end = start + self._offset, end + self._offset
        self._export(Span(name, trace_id, span_id, parent_id, start, end, attributes, True, error))

    def fold(self, event: Event, now: float) -> None:
        fold = self._folds.get(type(event))
        if fold is not None:
            request = self._requests.get(event.request_id)  # type: ignore[union-attr]
            if request is not None:
                fold(request, event, now)

    def _child(
        self,
        request: _Request,
        name: str,
        start: float,
        end: float,
        attributes: dict[str, Any],
        error: str = "",
    ) -> None:
        start, end = start + self._offset, max(start, end) + self._offset
        span_id = secrets.token_hex(8)
        self._export(
            Span(name, request.trace_id, span_id, request.parent_id, start, end, attributes, error=error)
        )

    def _arrived(self, request: _Request, event: Arrived, now: float) -> None:
        request.waits = now if event.at is None else event.at

    def _skipped(self, request: _Request, event: Skipped, now: float) -> None:
        request.wait = event.reason.value

    def _admitted(self, request: _Request, event: Admitted, now: float) -> None:
        request.admitted = now if event.at is None else event.at
        if event.reason is AdmitReason.NEW:
            request.cached = event.cached_tokens
        self._queued(request, request.admitted)

    def _queued(self, request: _Request, until: float, error: str = "") -> None:
        if request.waits is not None:
            waited = {"headrace.queue.wait_reason": request.wait} if request.wait else {}
            self._child(request, "queue", request.waits, until, waited, error)
        request.waits, request.wait = None, ""

    def _chunked(self, request: _Request, event: Chunked, now: float) -> None:
        request.chunks += 1
        request.computed += event.length

    def _emitted(self, request: _Request, event: Emitted, now: float) -> None:
        request.output += len(event.tokens)
        if request.first is None:
            request.first = now
            self._prefilled(request, now)

    def _prefilled(self, request: _Request, until: float, error: str = "") -> None:
        if request.admitted is None:
            return
        attributes = {
            "headrace.prefill.chunks": request.chunks,
            "headrace.prefill.computed_tokens": request.computed,
            "gen_ai.usage.cache_read.input_tokens": request.cached,
        }
        self._child(request, "prefill", request.admitted, until, attributes, error)

    def _preempted(self, request: _Request, event: Preempted, now: float) -> None:
        request.waits, request.wait = now, f"preempted_{event.reason.value}"

    def _finished(self, request: _Request, event: Finished, now: float) -> None:
        error = "" if event.reason in _WHOLE else event.reason.value
        if request.first is not None:
            self._child(
                request, "decode", request.first, now, {"gen_ai.usage.output_tokens": request.output}, error
            )
        elif request.waits is not None:
            self._queued(request, now, error)
        else:
            self._prefilled(request, now, error)
        self._forget(event.request_id, now)

    def _forget(self, request_id: str, now: float) -> None:
        """Drop an ended request after its late events have arrived."""
        self._ended.append((now, request_id))
        while self._ended[0][0] < now - LATE_SECONDS:
            self._requests.pop(self._ended.popleft()[1], None)

    def _looked_up(self, request: _Request, event: LookedUp, now: float) -> None:
        if event.outcome is Lookup.BYPASS:
            return
        attributes = {
            "headrace.cache.layer": event.layer.value,
            "headrace.cache.outcome": event.outcome.value,
        }
        if event.reason:
            attributes["headrace.cache.reason"] = event.reason
        self._child(request, "cache_lookup", now - event.seconds, now, attributes)

    def _spared(self, request: _Request, event: Spared, now: float) -> None:
        if event.layer is not Layer.PARTIAL:  # the engine computes the rest of a partial answer
            self._forget(event.request_id, now)
