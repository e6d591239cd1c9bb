"""The lines of a trace file: one JSON object per moment, which a replay compares with its own.

| line | meaning |
|---|---|
| ``{"headrace_trace": 2, "version": …, "settings": {…}}`` | first line: how the engine was built |
| ``{"submit": {…}, "now": …}`` | a request: its length and the fields that scheduling uses |
| ``{"cancel": id, "why": …, "now": …}`` ``{"knobs": {…}}`` ``{"reset": "all"}`` | other inputs |
| ``{"adopted": blocks}`` | the engine loaded blocks of an earlier cache, which are not in the trace |
| ``{"step": now, "seconds": …, "out": {…}, "drafts": {…}, "events": […]}`` | a step, the runner's output, the
drafter's proposals, and the events |
| ``{"events": […]}`` | events between steps |
| ``{"raised": …, "now": …}`` | the step that ended the engine |
| ``{"stopped": why}`` | the recording ended before the engine did |

An event is its name and the fields that differ from their defaults. A trace contains no text and no tokens: tokens are
written as `fingerprints`, log-probabilities of a prompt as their number, and those of an output not at all. Drafts are
written as the number of tokens and the index of the first one that would end the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from headrace.core.events import Emitted, Event, Finished
from headrace.core.request import Request
from headrace.observe.recording.fingerprints import STOP, Fingerprints, written
from headrace.observe.recording.moments import (
    Adopted,
    Begun,
    Cancelled,
    Drafts,
    Drained,
    Moment,
    Outcome,
    Raised,
    Reset,
    Submitted,
    Took,
    Turned,
)

MAGIC = "headrace_trace"
VERSION = 2

RECORDED = (
    "id",
    "arrived",
    "tenant",
    "service_class",
    "priority",
    "deadline",
    "slo",
    "retention",
    "adapter",
)
"""Fields of a request that scheduling uses and that are written unchanged."""

RECORDED_PARAMS = ("max_tokens", "min_tokens", "ignore_eos", "prompt_logprobs")
"""Sampling parameters that scheduling uses."""

WITHHELD = (
    "tokens",
    "answered",
    "prediction",
    "cached_answer",
    "indexed",
    "params",
    "salt",
    "seed",
    "affinity",
    "peer",
    "follows",
    "eos_token_ids",
    "call_format",
    "settings",
)
"""Fields of a request that are written as fingerprints, in part, or not at all."""


class Scribe:
    """Turns the moments of one recording into lines; ``key`` is the secret of its fingerprints."""

    def __init__(self, key: bytes) -> None:
        self._fingerprints = Fingerprints(key)

    def line(self, moment: Moment) -> dict[str, Any]:
        """The line of a moment, as plain values for JSON."""
        match moment:
            case Begun(version, settings):
                return {MAGIC: VERSION, "version": version, "settings": plain(settings)}
            case Submitted(request, now):
                return {"submit": self._request(request), "now": now}
            case Cancelled(request_id, why, now):
                return {"cancel": request_id, "why": why, "now": now}
            case Turned(knobs):
                return {"knobs": asdict(knobs)}
            case Adopted(blocks):
                return {"adopted": blocks}
            case Reset(lower):
                return {"reset": "all" if lower else "device"}
            case Took(now, seconds, outcome, events, drafts):
                line: dict[str, Any] = {"step": now, "seconds": round(seconds, 7)}
                if outcome is not None:
                    line["out"] = _outcome(outcome)
                if drafts is not None:
                    line["drafts"] = self._drafts(drafts)
                return line | {"events": self._events(events)}
            case Drained(events):
                return {"events": self._events(events)}
            case Raised(now, error):
                return {"raised": error, "now": now}

    def _request(self, request: Request) -> dict[str, Any]:
        fields = {name: plain(getattr(request, name)) for name in RECORDED}
        params = {name: getattr(request.params, name) for name in RECORDED_PARAMS}
        if request.params.stop or request.params.stop_token_ids:
            params["ignore_eos"] = False  # any stop token is written as the end token
        tokens, answered = self._fingerprints.begin(request)
        group = self._fingerprints.group(request.affinity)
        return fields | params | {"tokens": written(tokens), "answered": written(answered), "affinity": group}

    def _drafts(self, drafts: Drafts) -> dict[str, Any]:
        proposals = {}
        for request_id, (tokens, confidences, source, cut) in drafts.proposals.items():
            end = self._fingerprints.first_end(request_id, tokens)
            proposals[request_id] = [len(tokens), end, confidences, source, cut]
        line: dict[str, Any] = {"proposals": plain(proposals)}
        if drafts.seconds:
            line["seconds"] = drafts.seconds
        return line | ({"failed": drafts.failed} if drafts.failed else {})

    def _events(self, events: tuple[Event, ...]) -> list[list[Any]]:
        lines = []
        for event in events:
            lines.append(event_line(event, self._fingerprints.answer))
            if isinstance(event, Finished):
                self._fingerprints.end(event.request_id)
        return lines


def event_line(event: Event, shown: Callable[[str, tuple[int, ...]], tuple[int, ...]]) -> list[Any]:
    """An event as its name and the fields that differ from their defaults; ``shown`` hashes tokens."""
    if isinstance(event, Emitted):  # the most frequent event, so it is written directly
        return [
            "Emitted",
            {"request_id": event.request_id, "tokens": written(shown(event.request_id, event.tokens))},
        ]
    fields: dict[str, Any] = {}
    for name, value in event._asdict().items():
        if name == "stop_token":
            if value is not None:
                fields[name] = STOP
        elif name == "logprobs":
            fields[name] = len(value)
        elif name == "work":
            continue  # a replay plans the same rows
        elif name not in event._field_defaults or value != event._field_defaults[name]:
            fields[name] = plain(value)
    return [type(event).__name__, fields]


def _outcome(outcome: Outcome) -> dict[str, Any]:
    return {name: plain(value) for name, value in outcome._asdict().items() if value}


def plain(value: Any) -> Any:
    """A value for JSON: tuples become lists, infinite numbers text."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
