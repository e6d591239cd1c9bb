"""A fold that keeps the timeline of each request, for ``GET /v1/requests/{id}/timeline`` and exported traces.

It stores times, counts and reasons, no tokens and no text, of all open and a limited number of ended requests. The
total number of token times is limited.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

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
from headrace.observe.steps.life import MOST_MARKS, Chunk, Life, Stage
from headrace.observe.steps.record import Waiting

MOST_TIMES = 1 << 20
"""Maximum number of token times over all requests (4 MB). Beyond it, the oldest ended requests are dropped."""

MOST_TIMES_EACH = 1 << 14
"""Maximum number of token times of one request."""


class Timelines:
    """A `core.ports.Watcher` that keeps the timelines of open requests, and of the last ``keep`` ended ones."""

    def __init__(self, keep: int = 1000) -> None:
        self._keep = keep
        self._live: dict[str, Life] = {}
        self._ended: OrderedDict[str, Life] = OrderedDict()
        self._asked: OrderedDict[str, Life] = (
            OrderedDict()
        )  # requests that were looked up in a cache and are not in the engine
        self._times = 0  # number of token times of ended requests
        self._planned: dict[str, dict[int, Chunk]] = {}  # chunks whose step has not ended, by position
        self._step_end = 0.0
        self._folds: Mapping[type, Callable[[Life, Any, float], None]] = {
            Admitted: _admitted,
            Skipped: _skipped,
            Chunked: self._chunked,
            Preempted: self._preempted,
            Verified: _verified,
            Moved: _moved,
            RestoreDeclined: _declined,
        }

    def fold(self, event: Event, now: float) -> None:
        kind = type(event)
        if kind is Emitted:
            life = self._live.get(event.request_id)  # type: ignore[union-attr]
            if life is not None:
                _emitted(life, len(event.tokens), now)  # type: ignore[arg-type, union-attr]
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
            life = self._live.get(event.request_id)  # type: ignore[union-attr]
            if life is not None:
                fold(life, event, now)

    def get(self, request_id: str) -> Life | None:
        """The timeline of a request; None if it is unknown or dropped."""
        return self._live.get(request_id) or self._ended.get(request_id) or self._asked.get(request_id)

    def lives(self) -> Iterator[tuple[str, Life]]:
        """All timelines with request ids: ended ones first, then open ones."""
        yield from self._ended.items()
        yield from self._live.items()

    def waiting(self) -> list[Waiting]:
        """The requests that wait now, in order of arrival."""
        return [
            Waiting(name, life.spans[-1][1], life.wait)
            for name, life in self._live.items()
            if life.spans[-1][0] is Stage.QUEUE
        ]

    def copies(self, block_size: int) -> dict[str, int]:
        """For each running request that started with a copied block, the index of that block in its block table.

        Full cached blocks are shared; cached tokens beyond them were copied into a new block.
        """
        return {
            name: life.found // block_size
            for name, life in self._live.items()
            if life.found % block_size and life.spans[-1][0] is not Stage.QUEUE
        }

    # -- start and end -------------------------------------------------------------------------------

    def _arrived(self, event: Arrived, now: float) -> None:
        arrived = now if event.at is None else event.at
        if arrived == -math.inf:  # the server's own request for warming up
            return
        life = self._live[event.request_id] = Life(event, arrived)
        if (asked := self._asked.pop(event.request_id, None)) is not None:
            life.marks = asked.marks

    def _outside(self, event: TurnedAway | LookedUp | Spared, began: float) -> Life:
        """The timeline of a request that is not in the engine."""
        life = self.get(event.request_id)
        if life is None:
            known = Arrived(event.request_id, 0, getattr(event, "tenant", ""), 0)
            life = self._asked[event.request_id] = Life(known, began)
            if len(self._asked) > self._keep:
                self._asked.popitem(last=False)
        return life

    def _turned_away(self, event: TurnedAway, now: float) -> None:
        life = self._outside(event, now)
        life.tenant, life.service_class = event.tenant, event.service_class
        life.mark(now, "rejected", why=reason_text(event.reason))

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
        life = self._outside(event, now)
        life.mark(now, "served_from_cache", layer=event.layer.value, age_seconds=event.age_seconds)
        if event.layer is not Layer.PARTIAL:  # of a partial response, the engine computes the rest
            life.tenant, life.prompt_tokens = event.tenant, event.prompt_tokens
            life.output_tokens = event.output_tokens
            self._end(event.request_id, life, now, "cached")

    def _finished(self, event: Finished, now: float) -> None:
        life = self._live.get(event.request_id) or self._asked.get(event.request_id)
        if life is not None:
            self._end(event.request_id, life, now, event.reason.value, event.message)

    def _end(self, request_id: str, life: Life, now: float, reason: str, message: str = "") -> None:
        self._live.pop(request_id, None)
        self._asked.pop(request_id, None)
        life.end = now
        life.finish = {"seconds": round(now - life.arrived, 6), "reason": reason, "message": message}
        older = self._ended.pop(request_id, None)
        self._ended[request_id] = life
        self._times += len(life.tokens) - (len(older.tokens) if older else 0)
        while self._ended and (len(self._ended) > self._keep or self._times > MOST_TIMES):
            self._times -= len(self._ended.popitem(last=False)[1].tokens)

    # -- running -------------------------------------------------------------------------------------

    def _chunked(self, life: Life, event: Chunked, now: float) -> None:
        if len(life.chunks) >= MOST_MARKS:
            life.dropped += 1
            return
        chunk = Chunk(now, event.start, event.length, event.reason)
        planned = self._planned.setdefault(event.request_id, {})
        if event.start in planned:  # the step was interrupted, so its rows are planned again
            life.chunks.remove(planned[event.start])
        life.chunks.append(chunk)
        planned[event.start] = chunk

    def _preempted(self, life: Life, event: Preempted, now: float) -> None:
        self._planned.pop(event.request_id, None)
        life.enter(Stage.QUEUE, now)
        why = reason_text(event.reason)
        life.wait = f"preempted: {why}"
        life.mark(now, "preempted", lost_tokens=event.lost_tokens, why=why)

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


def _emitted(life: Life, count: int, now: float) -> None:
    """This runs once per generated token."""
    if not life.decodes:
        life.enter(Stage.DECODE, now)
    life.output_tokens += count
    if count == 1 and life.output_tokens <= MOST_TIMES_EACH:
        life.tokens.append(now - life.arrived)
    else:
        life.tokens.extend([now - life.arrived] * min(count, MOST_TIMES_EACH - len(life.tokens)))


def _admitted(life: Life, event: Admitted, now: float) -> None:
    at = now if event.at is None else event.at
    life.enter(Stage.PREFILL, at)
    life.found = event.cached_tokens
    what = "admitted" if event.reason is AdmitReason.NEW else "resumed"
    life.mark(at, what, cached_tokens=event.cached_tokens, known_tokens=event.known_tokens)


def _skipped(life: Life, event: Skipped, now: float) -> None:
    life.wait = reason_text(event.reason)
    life.mark(now, "waits", reason=event.reason.value, why=life.wait)


def _verified(life: Life, event: Verified, now: float) -> None:
    life.mark(now, "drafts", source=event.source, drafted=event.drafted, accepted=event.accepted)


def _moved(life: Life, event: Moved, now: float) -> None:
    what = "restored" if event.reason is MoveReason.RESTORED else "fetched"
    life.mark(now, what, tier=event.source.value, blocks=event.blocks)


def _declined(life: Life, event: RestoreDeclined, now: float) -> None:
    life.mark(now, "not_restored", tokens=event.tokens, why=reason_text(event.reason))
