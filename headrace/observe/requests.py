"""The event stream told request by request: what happened to this one, when and why.

It answers ``GET /v1/requests/{id}``. It holds no tokens and no text, only counts, reasons and times, and a
bounded number of finished requests. What only the engine can tell (the place in the policy's order, a forecast) is
asked of the engine.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import StrEnum
from typing import Any

from headrace.core.events import (
    AdmitReason,
    Admitted,
    Arrived,
    Chunked,
    Emitted,
    Event,
    Finished,
    Moved,
    Preempted,
    RestoreDeclined,
    Skipped,
    Spared,
    TurnedAway,
)
from headrace.observe.reasons import reason_text

HISTORY = 256
"""Entries kept of one request's history; further ones are counted, not kept."""


class _Page:
    """One request's page in the book."""

    __slots__ = (
        "admitted",
        "arrived",
        "cached_tokens",
        "computed_tokens",
        "dropped",
        "end",
        "first",
        "found_tokens",
        "history",
        "last",
        "number",
        "output_tokens",
        "preemptions",
        "priority",
        "prompt_tokens",
        "reason",
        "service_class",
        "slo",
        "state",
        "tenant",
    )

    def __init__(self, event: Arrived, number: int, now: float) -> None:
        self.number = number
        self.prompt_tokens = event.prompt_tokens
        self.tenant = event.tenant
        self.service_class = event.service_class
        self.priority = event.priority
        self.slo = event.slo
        self.arrived = now
        self.admitted: float | None = None
        self.reason: StrEnum | None = None  # why it waits
        self.state = "waiting"
        self.found_tokens = 0  # of its prompt, when it was first admitted
        self.cached_tokens = 0  # at all its admissions
        self.computed_tokens = 0
        self.output_tokens = 0
        self.preemptions = 0
        self.first: float | None = None
        self.last: float | None = None
        self.end: dict[str, Any] | None = None
        self.history: list[dict[str, Any]] = []
        self.dropped = 0

    def note(self, now: float, what: str, reason: StrEnum, **facts: Any) -> None:
        if len(self.history) < HISTORY:
            seconds = now - self.arrived
            self.history.append({"seconds": seconds, "event": what, "reason": reason, **facts})
        else:
            self.dropped += 1


class RequestBook:
    """A `core.ports.Watcher` that explains single requests.

    Keeps all live requests and the last ``keep`` finished ones. ``by_priority`` says whether the scheduler
    ranks the queue by priority before arrival, which is what `explain`'s position follows.
    """

    def __init__(self, keep: int = 1000, by_priority: bool = False) -> None:
        self._keep = keep
        self._by_priority = by_priority
        self._live: dict[str, _Page] = {}
        self._finished: OrderedDict[str, _Page] = OrderedDict()
        self._arrivals = 0

    def fold(self, event: Event, now: float) -> None:
        if type(event) is Emitted:
            page = self._live[event.request_id]
            page.output_tokens += len(event.tokens)
            page.last = now
            page.reason = None
            if page.first is None:
                page.first = now
        elif isinstance(event, Arrived):
            arrived = now if event.at is None else event.at
            self._live[event.request_id] = _Page(event, self._arrivals, arrived)
            self._arrivals += 1
        elif isinstance(event, TurnedAway):
            known = Arrived(event.request_id, 0, event.tenant, 0, service_class=event.service_class)
            self._live[event.request_id] = page = _Page(known, self._arrivals, now)
            page.note(now, "turned_away", event.reason)
        elif isinstance(event, Admitted | Skipped | Chunked | Preempted):
            at = event.at if isinstance(event, Admitted) and event.at is not None else now
            self._note(self._live[event.request_id], event, at)
        elif isinstance(event, Moved):
            if event.request_id:
                page = self._live[event.request_id]
                page.note(now, "moved", event.reason, tier=event.source.value, blocks=event.blocks)
        elif isinstance(event, RestoreDeclined):
            self._live[event.request_id].note(now, "not_restored", event.reason, tokens=event.tokens)
        elif isinstance(event, Finished):
            self._finish(event, now)
        elif isinstance(event, Spared):
            self._spare(event, now)

    def explain(self, request_id: str, now: float | None = None) -> dict[str, Any] | None:
        """What is known of a request, as plain values for JSON; None for one that is not in the book.

        Times are seconds since its arrival. With ``now`` a live request also tells its age. ``position`` is
        the number of waiting requests ahead of it (null once it runs), ``waits_because`` why the last step passed it
        over, or why it stands still though it runs. ``cached_tokens`` are of the prompt, as its caller is told;
        ``cost`` is what it has taken so far, with what was found again after preemptions.
        """
        page = self._live.get(request_id) or self._finished.get(request_id)
        if page is None:
            return None
        told: dict[str, Any] = {
            "id": request_id,
            "state": page.state,
            "position": self._position(page) if page.state == "waiting" else None,
            "waits_because": reason_text(page.reason) if page.reason and page.end is None else None,
            "tenant": page.tenant,
            "service_class": page.service_class,
            "priority": page.priority,
            "slo": {"ttft_seconds": page.slo.ttft_seconds, "tpot_seconds": page.slo.tpot_seconds},
            "prompt_tokens": page.prompt_tokens,
            "cached_tokens": page.found_tokens,
            "computed_tokens": page.computed_tokens,
            "output_tokens": page.output_tokens,
            "preemptions": page.preemptions,
            "first_token_seconds": None if page.first is None else page.first - page.arrived,
            "last_token_seconds": None if page.last is None else page.last - page.arrived,
            "finish": page.end,
            "cost": self._cost(page, now),
            "history": [each | {"why": reason_text(each["reason"])} for each in page.history],
            "history_dropped": page.dropped,
        }
        if now is not None and page.end is None:
            told["age_seconds"] = now - page.arrived
        return told

    def _cost(self, page: _Page, now: float | None) -> dict[str, float]:
        until = page.arrived + page.end["seconds"] if page.end else page.arrived if now is None else now
        admitted = until if page.admitted is None else page.admitted
        generated = (
            0 if page.admitted is None else page.output_tokens
        )  # an answer from a cache was generated before
        return {
            "computed_tokens": page.computed_tokens + max(0, generated - 1),
            "cached_tokens": page.cached_tokens,
            "generated_tokens": generated,
            "waited_seconds": max(0.0, admitted - page.arrived),
            "served_seconds": max(0.0, until - admitted),
        }

    def _rank(self, page: _Page) -> tuple[int, int]:
        return (page.priority if self._by_priority else 0, page.number)

    def _position(self, page: _Page) -> int:
        mine = self._rank(page)
        return sum(other.state == "waiting" and self._rank(other) < mine for other in self._live.values())

    def _note(self, page: _Page, event: Admitted | Skipped | Chunked | Preempted, now: float) -> None:
        reason = event.reason
        if isinstance(event, Admitted):
            page.state = "running"
            page.reason = None
            page.cached_tokens += event.cached_tokens
            if reason is AdmitReason.NEW:
                page.admitted = now
                page.found_tokens = min(event.cached_tokens, page.prompt_tokens)
            page.note(now, "admitted", reason, cached_tokens=event.cached_tokens)
        elif isinstance(event, Skipped):
            page.reason = reason
            page.note(now, "skipped", reason)
        elif isinstance(event, Chunked):
            page.computed_tokens += event.length
            page.note(now, "chunked", reason, start=event.start, length=event.length)
        else:
            page.state = "waiting"
            page.reason = reason
            page.preemptions += 1
            page.note(now, "preempted", reason, lost_tokens=event.lost_tokens)

    def _finish(self, event: Finished, now: float) -> None:
        page = self._live.pop(event.request_id, None)
        if page is None:  # refused before it arrived in the engine
            page = _Page(Arrived(event.request_id, event.prompt_tokens, "", 0), self._arrivals, now)
        page.state = "finished"
        page.prompt_tokens = event.prompt_tokens
        page.end = {
            "seconds": now - page.arrived,
            "reason": event.reason.value,
            "message": event.message,
            "stop_token": event.stop_token,
        }
        self._keep_finished(event.request_id, page)

    def _spare(self, event: Spared, now: float) -> None:
        """It never was in the engine: one page tells all."""
        page = _Page(Arrived(event.request_id, event.prompt_tokens, event.tenant, 0), self._arrivals, now)
        page.state = "finished"
        page.found_tokens = page.cached_tokens = event.prompt_tokens
        page.output_tokens = event.output_tokens
        page.end = {
            "seconds": 0.0,
            "reason": "spared",
            "layer": event.layer.value,
            "answer_age_seconds": event.age_seconds,
        }
        self._keep_finished(event.request_id, page)

    def _keep_finished(self, request_id: str, page: _Page) -> None:
        self._finished[request_id] = page
        self._finished.move_to_end(request_id)
        while len(self._finished) > self._keep:
            self._finished.popitem(last=False)
