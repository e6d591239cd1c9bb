"""Explanations of single requests from events, for ``GET /v1/requests/{id}``: what happened, when and why.

It stores counts, reasons and times, no tokens and no text, of all open and a limited number of finished requests. The
position in the queue and the predicted start come from the engine.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from headrace.core.drafting.draft_budget import Cut
from headrace.core.events import (
    AdmitReason,
    Admitted,
    Arrived,
    Chunked,
    DraftDeclined,
    Emitted,
    Event,
    Finished,
    Layer,
    LookedUp,
    Lookup,
    Moved,
    Preempted,
    Recomputed,
    RestoreDeclined,
    Skipped,
    Spared,
    TurnedAway,
    Verified,
)
from headrace.core.peers import AskReason, PeersAnswered
from headrace.core.request import FinishReason
from headrace.observe.reasons import reason_text

LOOKUPS = 1000
"""Maximum number of lookups remembered of requests that have not arrived at the engine."""

HISTORY = 256
"""Maximum number of entries in the history of a request; further ones are only counted."""


class RequestSummary(NamedTuple):
    """One request in a list. Times are on the engine's clock; ``why`` is why it waits, the reason of its end, or
    the cache layer that served it.
    """

    id: str
    state: str
    why: str
    tenant: str
    service_class: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    preemptions: int
    arrived: float
    first: float | None
    last: float | None
    ended: float | None

    @property
    def complete(self) -> bool:
        """Whether it ended with a complete, computed output."""
        return self.why in (FinishReason.STOP, FinishReason.LENGTH)


class DraftingRecord:
    """The drafts of one request: by source, and what bounded their length."""

    __slots__ = ("_cuts", "_declined", "_sources")

    def __init__(self) -> None:
        self._sources: dict[str, list[float]] | None = None  # drafts, drafted, accepted, expected tokens
        self._cuts: Counter[str] | None = None
        self._declined = ""

    def verified(self, event: Verified) -> None:
        """Drafts were verified."""
        if self._sources is None:
            self._sources = {}
        counts = self._sources.setdefault(event.source, [0, 0, 0, 0.0])
        for at, value in enumerate((1, event.drafted, event.accepted, event.expected)):
            counts[at] += value
        self._declined = ""
        self._cut(event.cut)

    def declined(self, event: DraftDeclined) -> None:
        """Proposals of the request are not verified until further notice."""
        self._declined = event.cut
        self._cut(event.cut)

    def shown(self) -> dict[str, Any] | None:
        """Plain values for JSON; None without drafts and reasons."""
        if self._sources is None and self._cuts is None:
            return None
        return {
            "sources": {
                source: {
                    "drafts": int(drafts),
                    "drafted_tokens": int(drafted),
                    "accepted_tokens": int(accepted),
                    "expected_tokens": round(expected, 3),
                }
                for source, (drafts, drafted, accepted, expected) in (self._sources or {}).items()
            },
            "bounded_by": dict(self._cuts or {}),
            "declined_because": _text(self._declined) if self._declined else None,
        }

    def _cut(self, cut: str) -> None:
        if cut:
            if self._cuts is None:
                self._cuts = Counter()
            self._cuts[str(cut)] += 1


def _text(cut: str) -> str:
    return reason_text(Cut(cut)) if cut in set(Cut) else cut


class _Record:
    """The state of one request."""

    __slots__ = (
        "admitted",
        "arrived",
        "cached_tokens",
        "computed_tokens",
        "drafting",
        "dropped",
        "end",
        "first",
        "found_tokens",
        "history",
        "images",
        "last",
        "number",
        "output_tokens",
        "preemptions",
        "priority",
        "prompt_tokens",
        "reason",
        "semantic_miss",
        "service_class",
        "slo",
        "state",
        "tenant",
    )

    def __init__(self, event: Arrived, number: int, now: float) -> None:
        self.number = number
        self.prompt_tokens = event.prompt_tokens
        self.images = event.images
        self.tenant = event.tenant
        self.service_class = event.service_class
        self.priority = event.priority
        self.slo = event.slo
        self.arrived = now
        self.admitted: float | None = None
        self.reason: StrEnum | None = None  # why it waits
        self.state = "waiting"
        self.found_tokens = 0  # of its prompt, at its first admission
        self.cached_tokens = 0  # sum over all its admissions
        self.computed_tokens = 0
        self.output_tokens = 0
        self.preemptions = 0
        self.first: float | None = None
        self.last: float | None = None
        self.end: dict[str, Any] | None = None
        self.drafting = DraftingRecord()
        self.semantic_miss: str | None = None
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

    It keeps all open requests and the last ``keep`` finished ones. ``by_priority`` says whether the queue is
    ordered by priority before arrival, which determines the ``position``.
    """

    def __init__(self, keep: int = 1000, by_priority: bool = False) -> None:
        self._keep = keep
        self._by_priority = by_priority
        self._live: dict[str, _Record] = {}
        self._finished: OrderedDict[str, _Record] = OrderedDict()
        self._arrivals = 0
        self._missed: OrderedDict[str, str] = OrderedDict()  # why the semantic cache served nothing
        self._certificates: OrderedDict[str, str] = OrderedDict()  # and by which certificate it did

    def fold_tokens(self, emitted: Sequence[Emitted], now: float) -> None:
        """Tokens of a step."""
        for request_id, tokens, _ in emitted:
            record = self._live[request_id]
            record.output_tokens += len(tokens)
            record.last = now
            record.reason = None
            if record.first is None:
                record.first = now

    def fold(self, event: Event, now: float) -> None:
        if type(event) is Emitted:
            self.fold_tokens((event,), now)
        elif type(event) is Verified:
            self._live[event.request_id].drafting.verified(event)
        elif isinstance(event, DraftDeclined):
            self._live[event.request_id].drafting.declined(event)
        elif isinstance(event, Arrived):
            arrived = now if event.at is None else event.at
            self._live[event.request_id] = record = _Record(event, self._arrivals, arrived)
            record.semantic_miss = self._missed.pop(event.request_id, None)
            self._arrivals += 1
        elif isinstance(event, LookedUp):
            if event.layer is Layer.SEMANTIC and event.outcome is Lookup.MISS:
                _remember(self._missed, event)
            elif event.layer is Layer.SEMANTIC and event.reason:
                _remember(self._certificates, event)
        elif isinstance(event, TurnedAway):
            known = Arrived(event.request_id, 0, event.tenant, 0, service_class=event.service_class)
            self._live[event.request_id] = record = _Record(known, self._arrivals, now)
            record.note(now, "turned_away", event.reason)
        elif isinstance(event, Admitted | Skipped | Chunked | Preempted):
            at = event.at if isinstance(event, Admitted) and event.at is not None else now
            self._note(self._live[event.request_id], event, at)
        elif isinstance(event, Moved):
            if event.request_id:
                record = self._live[event.request_id]
                record.note(now, "moved", event.reason, tier=event.source.value, blocks=event.blocks)
        elif isinstance(event, PeersAnswered):
            record = self._live[event.request_id]
            asked, held = event.asked_tokens, event.held_tokens
            record.note(
                now, "peers_asked", AskReason.MISSING, peer=event.peer, asked_tokens=asked, held_tokens=held
            )
        elif isinstance(event, RestoreDeclined):
            self._live[event.request_id].note(now, "not_restored", event.reason, tokens=event.tokens)
        elif isinstance(event, Recomputed):
            self._live[event.request_id].note(now, "recomputed", event.reason, tokens=event.tokens)
        elif isinstance(event, Finished):
            self._finish(event, now)
        elif isinstance(event, Spared):
            self._spare(event, now)

    def summaries(self, tenant: str | None = None) -> Iterator[RequestSummary]:
        """All open requests, then those that have ended, each newest first; of one tenant, if it is named."""
        for records in (self._live, self._finished):
            for request_id, record in reversed(records.items()):
                if tenant is None or record.tenant == tenant:
                    yield _summary(request_id, record)

    def explain(self, request_id: str, now: float | None = None) -> dict[str, Any] | None:
        """The explanation of a request, as plain values for JSON; None for an unknown request.

        Times are seconds since its arrival. With ``now``, an open request also has its age. ``position`` is the number
        of waiting requests ahead of it (null once it runs). ``waits_because`` is why the last step did not admit it,
        or why it is paused. ``images`` are those of the prompt, with ``image_tokens`` in all. ``cached_tokens`` are
        prompt tokens found in the cache; ``cost`` also counts what was found again after preemptions. ``drafting``
        (null: no drafts) has the drafts by source and what bounded them. ``semantic_miss`` is why the semantic cache
        served nothing (null: it was not looked up).
        """
        record = self._live.get(request_id) or self._finished.get(request_id)
        if record is None:
            return None
        shown: dict[str, Any] = {
            "id": request_id,
            "state": record.state,
            "position": self._position(record) if record.state == "waiting" else None,
            "waits_because": reason_text(record.reason) if record.reason and record.end is None else None,
            "tenant": record.tenant,
            "service_class": record.service_class,
            "priority": record.priority,
            "slo": {"ttft_seconds": record.slo.ttft_seconds, "tpot_seconds": record.slo.tpot_seconds},
            "prompt_tokens": record.prompt_tokens,
            "images": [{"tokens": tokens} for tokens in record.images],
            "image_tokens": sum(record.images),
            "cached_tokens": record.found_tokens,
            "computed_tokens": record.computed_tokens,
            "output_tokens": record.output_tokens,
            "preemptions": record.preemptions,
            "drafting": record.drafting.shown(),
            "semantic_miss": record.semantic_miss,
            "first_token_seconds": None if record.first is None else record.first - record.arrived,
            "last_token_seconds": None if record.last is None else record.last - record.arrived,
            "finish": record.end,
            "cost": self._cost(record, now),
            "history": [each | {"why": reason_text(each["reason"])} for each in record.history],
            "history_dropped": record.dropped,
        }
        if now is not None and record.end is None:
            shown["age_seconds"] = now - record.arrived
        return shown

    def _cost(self, record: _Record, now: float | None) -> dict[str, float]:
        until = (
            record.arrived + record.end["seconds"] if record.end else record.arrived if now is None else now
        )
        admitted = until if record.admitted is None else record.admitted
        generated = (
            0 if record.admitted is None else record.output_tokens
        )  # a cached response was generated earlier
        return {
            "computed_tokens": record.computed_tokens + max(0, generated - 1),
            "cached_tokens": record.cached_tokens,
            "generated_tokens": generated,
            "waited_seconds": max(0.0, admitted - record.arrived),
            "served_seconds": max(0.0, until - admitted),
        }

    def _rank(self, record: _Record) -> tuple[int, int]:
        return (record.priority if self._by_priority else 0, record.number)

    def _position(self, record: _Record) -> int:
        mine = self._rank(record)
        return sum(other.state == "waiting" and self._rank(other) < mine for other in self._live.values())

    def _note(self, record: _Record, event: Admitted | Skipped | Chunked | Preempted, now: float) -> None:
        reason = event.reason
        if isinstance(event, Admitted):
            record.state = "running"
            record.reason = None
            record.cached_tokens += event.cached_tokens
            if reason is AdmitReason.NEW:
                record.admitted = now
                record.found_tokens = min(event.cached_tokens, record.prompt_tokens)
            record.note(now, "admitted", reason, cached_tokens=event.cached_tokens)
        elif isinstance(event, Skipped):
            record.reason = reason
            record.note(now, "skipped", reason)
        elif isinstance(event, Chunked):
            record.computed_tokens += event.length
            record.note(now, "chunked", reason, start=event.start, length=event.length)
        else:
            record.state = "waiting"
            record.reason = reason
            record.preemptions += 1
            record.note(now, "preempted", reason, lost_tokens=event.lost_tokens)

    def _finish(self, event: Finished, now: float) -> None:
        record = self._live.pop(event.request_id, None)
        if record is None:  # rejected before it reached the engine
            record = _Record(Arrived(event.request_id, event.prompt_tokens, "", 0), self._arrivals, now)
        record.state = "finished"
        record.prompt_tokens = event.prompt_tokens
        record.end = {
            "seconds": now - record.arrived,
            "reason": event.reason.value,
            "message": event.message,
            "stop_token": event.stop_token,
        }
        self._keep_finished(event.request_id, record)

    def _spare(self, event: Spared, now: float) -> None:
        """A cache served the request, so it never reached the engine."""
        record = _Record(Arrived(event.request_id, event.prompt_tokens, event.tenant, 0), self._arrivals, now)
        record.state = "finished"
        record.found_tokens = record.cached_tokens = event.prompt_tokens
        record.output_tokens = event.output_tokens
        record.end = {
            "seconds": 0.0,
            "reason": "spared",
            "layer": event.layer.value,
            "answer_age_seconds": event.age_seconds,
        }
        if certificate := self._certificates.pop(event.request_id, ""):
            record.end["certificate"] = certificate
        self._keep_finished(event.request_id, record)

    def _keep_finished(self, request_id: str, record: _Record) -> None:
        self._finished[request_id] = record
        self._finished.move_to_end(request_id)
        while len(self._finished) > self._keep:
            self._finished.popitem(last=False)


def _remember(reasons: OrderedDict[str, str], event: LookedUp) -> None:
    reasons[event.request_id] = event.reason
    if len(reasons) > LOOKUPS:
        reasons.popitem(last=False)


def _summary(request_id: str, record: _Record) -> RequestSummary:
    end = record.end
    if end is None:
        why = record.reason.value if record.reason else ""
    else:
        why = f"{end['layer']} cache" if "layer" in end else end["reason"]
    return RequestSummary(
        request_id,
        record.state,
        why,
        record.tenant,
        record.service_class,
        record.prompt_tokens,
        record.found_tokens,
        record.output_tokens,
        record.preemptions,
        record.arrived,
        record.first,
        record.last,
        None if end is None else record.arrived + end["seconds"],
    )
