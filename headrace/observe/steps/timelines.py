"""The timeline of one request (queue, prefill chunks, tokens, cache lookups and preemptions, with their times), and a
fold that keeps that of each request, for ``GET /v1/requests/{id}/timeline`` and exported traces.

It stores times, counts and reasons, no tokens and no text, of all open and a limited number of ended requests. The
total number of token times is limited.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
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
    Moved,
    MoveReason,
    Preempted,
    RestoreDeclined,
    Skipped,
    Spared,
    Stepped,
    TurnedAway,
    Verified,
)
from headrace.observe.reasons import reason_text
from headrace.observe.steps.record import Waiting

MOST_MARKS = 1024
"""Maximum number of marks of a request (chunks, drafts, lookups, waits); further ones are only counted."""


ARRIVED = "no step has considered it yet; it waits behind other requests"
"""Why a new request waits."""


class Stage(StrEnum):
    """What a request does at a time."""

    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"


class Span(NamedTuple):
    """A stage from ``start`` to ``end``, in seconds of the engine's clock."""

    stage: Stage
    start: float
    end: float


class Chunk:
    """A part of the prompt: positions ``[position, position + tokens)``. ``end`` is None until its step has ended."""

    __slots__ = ("end", "position", "reason", "start", "tokens")

    def __init__(self, start: float, position: int, tokens: int, reason: StrEnum) -> None:
        self.start = start
        self.end: float | None = None
        self.position = position
        self.tokens = tokens
        self.reason = reason


class Mark(NamedTuple):
    """Something that happened to a request at one time; ``facts`` are plain values."""

    at: float
    event: str
    facts: dict[str, Any]


class Timeline:
    """The timeline of one request. Times are on the engine's clock; token times count from the arrival.

    ``wait`` is its last waiting reason, ``found`` the number of cached tokens at its last admission.
    """

    __slots__ = (
        "arrived",
        "chunks",
        "decodes",
        "dropped",
        "end",
        "finish",
        "found",
        "image_tokens",
        "marks",
        "output_tokens",
        "prompt_tokens",
        "service_class",
        "spans",
        "tenant",
        "tokens",
        "wait",
    )

    def __init__(self, event: Arrived, arrived: float) -> None:
        self.tenant = event.tenant
        self.service_class = event.service_class
        self.prompt_tokens, self.image_tokens = event.prompt_tokens, sum(event.images)
        self.arrived = arrived
        self.wait = ARRIVED
        self.spans: list[tuple[Stage, float]] = [(Stage.QUEUE, arrived)]
        self.chunks: list[Chunk] = []
        self.marks: list[Mark] = []
        self.tokens = array("f")
        self.output_tokens = self.dropped = self.found = 0
        self.decodes = False
        self.end: float | None = None
        self.finish: dict[str, Any] | None = None

    def enter(self, stage: Stage, at: float) -> None:
        """A stage begins, and the one before it ends."""
        if self.spans[-1][0] is not stage:
            self.spans.append((stage, max(at, self.spans[-1][1])))
            self.decodes = stage is Stage.DECODE

    def mark(self, at: float, event: str, **facts: Any) -> None:
        """Add a mark."""
        if len(self.marks) < MOST_MARKS:
            self.marks.append(Mark(at, event, facts))
        else:
            self.dropped += 1

    def stages(self, now: float | None = None) -> Iterator[Span]:
        """The stages in order, without empty ones; the last one ends ``now`` if the request is open."""
        end = self.end if self.end is not None else self.last if now is None else now
        for i, (stage, start) in enumerate(self.spans):
            until = self.spans[i + 1][1] if i + 1 < len(self.spans) else end
            if until > start:
                yield Span(stage, start, until)

    @property
    def last(self) -> float:
        """The time of the last token, or the start of the last stage."""
        return max(self.spans[-1][1], self.arrived + self.tokens[-1] if self.tokens else -math.inf)

    def shown(self, now: float | None = None) -> dict[str, Any]:
        """The timeline as plain values for JSON; all times are seconds since the arrival."""

        def since(at: float | None) -> float | None:
            return None if at is None else round(at - self.arrived, 6)

        return {
            "tenant": self.tenant,
            "service_class": self.service_class,
            "prompt_tokens": self.prompt_tokens,
            "image_tokens": self.image_tokens,
            "output_tokens": self.output_tokens,
            "stages": [
                {"stage": span.stage.value, "start": since(span.start), "end": since(span.end)}
                for span in self.stages(now)
            ],
            "chunks": [
                {
                    "start": since(chunk.start),
                    "end": since(chunk.end),
                    "position": chunk.position,
                    "tokens": chunk.tokens,
                    "why": reason_text(chunk.reason),
                }
                for chunk in self.chunks
            ],
            "token_seconds": [round(value, 6) for value in self.tokens],
            "token_seconds_dropped": self.output_tokens - len(self.tokens) if self.tokens else 0,
            "events": [{"seconds": since(mark.at), "event": mark.event, **mark.facts} for mark in self.marks],
            "events_dropped": self.dropped,
            "finish": self.finish,
        }


MOST_TIMES = 1 << 20
"""Maximum number of token times over all requests (4 MB). Beyond it, the oldest ended requests are dropped."""

MOST_TIMES_EACH = 1 << 14
"""Maximum number of token times of one request."""


class Timelines:
    """A `core.ports.Watcher` that keeps the timelines of open requests, and of the last ``keep`` ended ones."""

    def __init__(self, keep: int = 1000) -> None:
        self._keep = keep
        self._live: dict[str, Timeline] = {}
        self._ended: OrderedDict[str, Timeline] = OrderedDict()
        self._asked: OrderedDict[str, Timeline] = (
            OrderedDict()
        )  # requests that were looked up in a cache and are not in the engine
        self._times = 0  # number of token times of ended requests
        self._planned: dict[str, dict[int, Chunk]] = {}  # chunks whose step has not ended, by position
        self._step_end = 0.0
        self._folds: Mapping[type, Callable[[Timeline, Any, float], None]] = {
            Admitted: _admitted,
            Skipped: _skipped,
            Chunked: self._chunked,
            Preempted: self._preempted,
            Verified: _verified,
            Moved: _moved,
            RestoreDeclined: _declined,
        }

    def fold_tokens(self, emitted: Sequence[Emitted], now: float) -> None:
        """Tokens of a step."""
        for request_id, tokens, _ in emitted:
            timeline = self._live.get(request_id)
            if timeline is None:
                continue
            if not timeline.decodes:
                timeline.enter(Stage.DECODE, now)
            count = len(tokens)
            timeline.output_tokens += count
            times, at = timeline.tokens, now - timeline.arrived
            if count == 1 and timeline.output_tokens <= MOST_TIMES_EACH:
                times.append(at)
            else:
                times.extend([at] * min(count, MOST_TIMES_EACH - len(times)))

    def fold(self, event: Event, now: float) -> None:
        kind = type(event)
        if kind is Emitted:
            self.fold_tokens((event,), now)  # type: ignore[arg-type]
        elif kind is Stepped:
            self._stepped(event, now)  # type: ignore[arg-type]
        elif kind is Arrived:
            self._arrived(event, now)  # type: ignore[arg-type]
        elif kind is TurnedAway:
            self._turned_away(event, now)  # type: ignore[arg-type]
        elif kind is LookedUp:
            self._looked_up(event, now)  # type: ignore[arg-type]
        elif kind is Spared:
            self._spared(event, now)  # type: ignore[arg-type]
        elif kind is Finished:
            self._finished(event, now)  # type: ignore[arg-type]
        elif (fold := self._folds.get(kind)) is not None:
            timeline = self._live.get(event.request_id)  # type: ignore[union-attr]
            if timeline is not None:
                fold(timeline, event, now)

    def get(self, request_id: str) -> Timeline | None:
        """The timeline of a request; None if it is unknown or dropped."""
        return self._live.get(request_id) or self._ended.get(request_id) or self._asked.get(request_id)

    def items(self) -> Iterator[tuple[str, Timeline]]:
        """All timelines with request ids: ended ones first, then open ones."""
        yield from self._ended.items()
        yield from self._live.items()

    def waiting(self) -> list[Waiting]:
        """The requests that wait now, in order of arrival."""
        return [
            Waiting(name, timeline.spans[-1][1], timeline.wait)
            for name, timeline in self._live.items()
            if timeline.spans[-1][0] is Stage.QUEUE
        ]

    def copies(self, block_size: int) -> dict[str, int]:
        """For each running request that started with a copied block, the index of that block in its block table.

        Full cached blocks are shared; cached tokens beyond them were copied into a new block.
        """
        return {
            name: timeline.found // block_size
            for name, timeline in self._live.items()
            if timeline.found % block_size and timeline.spans[-1][0] is not Stage.QUEUE
        }

    # -- start and end -------------------------------------------------------------------------------

    def _arrived(self, event: Arrived, now: float) -> None:
        arrived = now if event.at is None else event.at
        if arrived == -math.inf:  # the server's own request for warming up
            return
        timeline = self._live[event.request_id] = Timeline(event, arrived)
        if (asked := self._asked.pop(event.request_id, None)) is not None:
            timeline.marks = asked.marks

    def _outside(self, event: TurnedAway | LookedUp | Spared, began: float) -> Timeline:
        """The timeline of a request that is not in the engine."""
        timeline = self.get(event.request_id)
        if timeline is None:
            known = Arrived(event.request_id, 0, getattr(event, "tenant", ""), 0)
            timeline = self._asked[event.request_id] = Timeline(known, began)
            if len(self._asked) > self._keep:
                self._asked.popitem(last=False)
        return timeline

    def _turned_away(self, event: TurnedAway, now: float) -> None:
        timeline = self._outside(event, now)
        timeline.tenant, timeline.service_class = event.tenant, event.service_class
        timeline.mark(now, "rejected", why=reason_text(event.reason))

    def _looked_up(self, event: LookedUp, now: float) -> None:
        if event.outcome is not Lookup.BYPASS:
            began = now - event.seconds
            self._outside(event, began).mark(
                began,
                "cache_lookup",
                layer=event.layer.value,
                outcome=event.outcome.value,
                duration=round(event.seconds, 6),
                **({"reason": event.reason} if event.reason else {}),
            )

    def _spared(self, event: Spared, now: float) -> None:
        timeline = self._outside(event, now)
        timeline.mark(now, "served_from_cache", layer=event.layer.value, age_seconds=event.age_seconds)
        if event.layer is not Layer.PARTIAL:  # of a partial response, the engine computes the rest
            timeline.tenant, timeline.prompt_tokens = event.tenant, event.prompt_tokens
            timeline.output_tokens = event.output_tokens
            self._end(event.request_id, timeline, now, "cached")

    def _finished(self, event: Finished, now: float) -> None:
        timeline = self._live.get(event.request_id) or self._asked.get(event.request_id)
        if timeline is not None:
            self._end(event.request_id, timeline, now, event.reason.value, event.message)

    def _end(self, request_id: str, timeline: Timeline, now: float, reason: str, message: str = "") -> None:
        self._live.pop(request_id, None)
        self._asked.pop(request_id, None)
        timeline.end = now
        timeline.finish = {"seconds": round(now - timeline.arrived, 6), "reason": reason, "message": message}
        older = self._ended.pop(request_id, None)
        self._ended[request_id] = timeline
        self._times += len(timeline.tokens) - (len(older.tokens) if older else 0)
        while self._ended and (len(self._ended) > self._keep or self._times > MOST_TIMES):
            self._times -= len(self._ended.popitem(last=False)[1].tokens)

    # -- running -------------------------------------------------------------------------------------

    def _chunked(self, timeline: Timeline, event: Chunked, now: float) -> None:
        if len(timeline.chunks) >= MOST_MARKS:
            timeline.dropped += 1
            return
        chunk = Chunk(now, event.start, event.length, event.reason)
        planned = self._planned.setdefault(event.request_id, {})
        if event.start in planned:  # the step was interrupted, so its rows are planned again
            timeline.chunks.remove(planned[event.start])
        timeline.chunks.append(chunk)
        planned[event.start] = chunk

    def _preempted(self, timeline: Timeline, event: Preempted, now: float) -> None:
        self._planned.pop(event.request_id, None)
        timeline.enter(Stage.QUEUE, now)
        why = reason_text(event.reason)
        timeline.wait = f"preempted: {why}"
        timeline.mark(now, "preempted", lost_tokens=event.lost_tokens, why=why)

    def _stepped(self, event: Stepped, now: float) -> None:
        """Ends the chunks of this step, which began at its planning, or at the end of the previous step if later."""
        work = event.work
        began, self._step_end = max(work.began, self._step_end), now
        if not self._planned:
            return
        for request_id, row in zip(work.request_ids, work.rows, strict=True):
            planned = self._planned.get(request_id)
            if planned is not None and (chunk := planned.pop(row.start, None)) is not None:
                chunk.start, chunk.end = began, now
        self._planned = {
            request_id: planned
            for request_id, planned in self._planned.items()
            if planned and request_id in self._live
        }


def _admitted(timeline: Timeline, event: Admitted, now: float) -> None:
    at = now if event.at is None else event.at
    timeline.enter(Stage.PREFILL, at)
    timeline.found = event.cached_tokens
    what = "admitted" if event.reason is AdmitReason.NEW else "resumed"
    timeline.mark(at, what, cached_tokens=event.cached_tokens, known_tokens=event.known_tokens)


def _skipped(timeline: Timeline, event: Skipped, now: float) -> None:
    timeline.wait = reason_text(event.reason)
    timeline.mark(now, "waits", reason=event.reason.value, why=timeline.wait)


def _verified(timeline: Timeline, event: Verified, now: float) -> None:
    timeline.mark(now, "drafts", source=event.source, drafted=event.drafted, accepted=event.accepted)


def _moved(timeline: Timeline, event: Moved, now: float) -> None:
    what = "restored" if event.reason is MoveReason.RESTORED else "fetched"
    timeline.mark(now, what, tier=event.source.value, blocks=event.blocks)


def _declined(timeline: Timeline, event: RestoreDeclined, now: float) -> None:
    timeline.mark(now, "not_restored", tokens=event.tokens, why=reason_text(event.reason))
