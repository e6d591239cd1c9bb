"""A trace file, read and checked: calls to the engine and steps in order, and the output of each request.

`exact` replays it as recorded, `rerun` with other settings.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from headrace.core.drafting.proposal import Proposal
from headrace.core.knobs import Knobs
from headrace.core.plan import Arrival, Move, Tier
from headrace.core.request import FinishReason, Request, Retention, SamplingParams, Slo
from headrace.observe.trace_file import (
    MAGIC,
    RECORDED,
    RECORDED_PARAMS,
    STOP,
    VERSION,
    Adopted,
    Background,
    Cancelled,
    Drafts,
    Outcome,
    Raised,
    Reset,
    Spent,
    Submitted,
    Turned,
    read,
)

DRAFTED = -1
"""Id that stands for a drafted token; fingerprints are never negative."""


class BadTrace(ValueError):
    """A file that is not a trace, or a line that cannot be read; the message names file and line."""


class Step(NamedTuple):
    """One recorded call of `Engine.step`; ``events`` are as in the file. Drafted tokens have placeholder ids."""

    now: float
    seconds: float
    outcome: Outcome | None
    events: list[list[Any]]
    drafts: Drafts | None = None


class Drained(NamedTuple):
    """Events that the engine emitted between two steps."""

    events: list[list[Any]]


Happening = Adopted | Submitted | Cancelled | Turned | Reset | Spent | Background | Step | Drained | Raised


class Line(NamedTuple):
    """One line of the file; lines count from 1."""

    number: int
    happening: Happening


@dataclass(slots=True)
class Answer:
    """The output of a request, as fingerprints, and its finish reason (None: it did not end in this trace).

    ``tokens`` include output tokens that the request was submitted with.
    """

    tokens: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole recording. ``cut`` says why it ended before the engine stopped; empty if it did not."""

    path: Path
    version: str
    settings: Mapping[str, Any]
    lines: tuple[Line, ...]
    answers: Mapping[str, Answer]
    cut: str

    def of(self, kind: type) -> list[Any]:
        """All entries of a kind, in order."""
        return [line.happening for line in self.lines if isinstance(line.happening, kind)]


def read_trace(path: Path) -> Trace:
    """The trace in a file, compressed or not.

    If the last line is incomplete (the server was killed), the trace ends before it.

    Raises:
        BadTrace: the file is not a trace, or a line cannot be read.
        OSError: no such file.
    """
    raw = _lines(path)
    number, first = next(raw, (1, ""))
    header = _object(path, number, first)
    if header.get(MAGIC) != VERSION:
        wrong = (
            f"trace has version {header[MAGIC]}; this Headrace reads version {VERSION}"
            if MAGIC in header
            else "is not a trace"
        )
        raise BadTrace(f"{path}:1: this {wrong} (expected a first line with {MAGIC!r}: {VERSION})")
    lines: list[Line] = []
    answers: dict[str, Answer] = {}
    cut = ""
    for number, text in raw:
        if not text.endswith("\n"):
            cut = f"line {number} is incomplete"
            break
        fields = _object(path, number, text)
        if "stopped" in fields:
            cut = str(fields["stopped"])
            break
        try:
            happening = _happening(fields)
            if isinstance(happening, Submitted):
                answers.setdefault(happening.request.id, Answer(list(happening.request.answered)))
            elif isinstance(happening, Step | Drained):
                _collect(happening.events, answers)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            why = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise BadTrace(f"{path}:{number}: this line cannot be read: {why}") from None
        lines.append(Line(number, happening))
    return Trace(path, str(header.get("version", "")), header.get("settings", {}), tuple(lines), answers, cut)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The file's lines with their numbers; a truncated compressed file ends at its last complete data."""
    opened: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        number = 0
        while True:
            number += 1
            try:
                line = file.readline()
            except EOFError:
                return
            except (UnicodeDecodeError, gzip.BadGzipFile, zlib.error) as error:
                raise BadTrace(f"{path}:{number}: this is not text: {error}") from None
            if not line:
                return
            yield number, line


def _object(path: Path, number: int, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadTrace(f"{path}:{number}: this is not JSON: {error.msg}") from None
    if not isinstance(value, dict):
        raise BadTrace(f"{path}:{number}: expected a JSON object")
    return value


def _happening(line: Mapping[str, Any]) -> Happening:
    match line:
        case {"submit": request, "now": now}:
            return Submitted(_request(request), float(now))
        case {"cancel": request_id, "why": why, "now": now}:
            return Cancelled(str(request_id), FinishReason(why), float(now))
        case {"knobs": knobs}:
            return Turned(Knobs(**knobs))
        case {"adopted": blocks}:
            return Adopted(int(blocks))
        case {"reset": "all" | "device" as what}:
            return Reset(what == "all")
        case {"spent": seconds}:
            return Spent(float(seconds))
        case {"background": change}:
            return Background(int(change))
        case {"step": now, "seconds": seconds, "events": events}:
            drafts = _drafts(line.get("drafts"))
            return Step(float(now), float(seconds), _outcome(line.get("out")), _events(events), drafts)
        case {"events": events}:
            return Drained(_events(events))
        case {"raised": error, "now": now}:
            return Raised(float(now), str(error))
    raise ValueError(f"unknown kind of line with the fields {', '.join(line)}")


def _request(recorded: Mapping[str, Any]) -> Request:
    unknown = recorded.keys() - {*RECORDED, *RECORDED_PARAMS, "tokens", "answered", "affinity"}
    if unknown:
        raise ValueError(f"a request has no field {', '.join(sorted(unknown))}")
    fields = {name: value for name, value in recorded.items() if name in RECORDED}
    return Request(
        **fields
        | {
            "arrived": float(recorded["arrived"]),
            "deadline": None if recorded["deadline"] is None else float(recorded["deadline"]),
            "slo": Slo(*recorded["slo"]),
            "retention": tuple(Retention(*each) for each in recorded["retention"]),
            "tokens": read(recorded["tokens"]),
            "answered": read(recorded["answered"]),
            "affinity": recorded["affinity"],
            "params": SamplingParams(**{name: recorded[name] for name in RECORDED_PARAMS}),
            "eos_token_ids": frozenset({STOP}),
        }
    )


def _outcome(recorded: Mapping[str, Any] | None) -> Outcome | None:
    if recorded is None:
        return None
    by_row = {
        name: {int(row): value for row, value in recorded.get(name, {}).items()}
        for name in ("counts", "scores", "failures")
    }
    arrivals = tuple(
        Arrival(Move(source, target, Tier(here), Tier(there)), bool(ok), float(seconds))
        for (source, target, here, there), ok, seconds in recorded.get("arrivals", ())
    )
    return Outcome(**by_row, arrivals=arrivals, broken_off=bool(recorded.get("broken_off", False)))


def _drafts(recorded: Mapping[str, Any] | None) -> Drafts | None:
    if recorded is None:
        return None
    proposals = {}
    for request_id, (count, end, confidences, source, cut) in recorded["proposals"].items():
        tokens = tuple(STOP if at == end else DRAFTED for at in range(int(count)))
        proposals[request_id] = Proposal(tokens, tuple(map(float, confidences)), str(source), str(cut))
    failed = recorded.get("failed")
    return Drafts(
        proposals,
        float(recorded.get("seconds", 0.0)),
        None if failed is None else (int(failed[0]), str(failed[1]), str(failed[2])),
    )


def _events(recorded: Any) -> list[list[Any]]:
    for event in recorded:
        name, fields = event
        if not isinstance(name, str) or not isinstance(fields, dict):
            raise ValueError(f"{event!r:.80} is not an event")
    return list(recorded)


def _collect(events: list[list[Any]], answers: dict[str, Answer]) -> None:
    for name, fields in events:
        if name == "Emitted":
            answers[fields["request_id"]].tokens.extend(read(fields["tokens"]))
        elif name == "Finished":
            answer = answers[fields["request_id"]]
            answer.reason = FinishReason(fields["reason"])
            answer.message = fields.get("message", "")
