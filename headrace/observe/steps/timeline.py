"""The timeline of one request: queue, prefill chunks, tokens, cache lookups and preemptions, with their times."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, NamedTuple

from headrace.core.events import Arrived
from headrace.observe.reasons import reason_text

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
