"""Steps and their requests as one JSON document for the step-by-step page, and in the trace-event format for
https://ui.perfetto.dev and chrome://tracing.

```
process "engine"     track "steps":  |step 0|step 1|step 2| …     counters: running, waiting, blocks held
process "requests"   track "req-a":  |queue|prefill       |decode             |
                                           |chunk |chunk  |
                                                           .  .  .  .  .  .  tokens, drafts, preemptions
```
Times of a trace are microseconds since the first of them. Slices of a track nest; tracks of requests are in order of
arrival.
The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU ("Trace Event Format").
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from headrace.observe.reasons import reason_text
from headrace.observe.steps.record import RowKind, StepRecord
from headrace.observe.steps.timelines import Stage, Timeline


def document(
    source: str,
    records: Iterable[StepRecord],
    timelines: Iterable[tuple[str, Timeline]],
    settings: Mapping[str, Any],
    *,
    cut: bool = False,
    origin: float | None = None,
) -> dict[str, Any]:
    """The document. Times are seconds since ``origin`` (None: since the first arrival or step).

    ``source`` is ``server``, ``simulation`` or ``recording``. ``settings`` are shown on the page. ``cut``: there were
    further steps.
    """
    steps = list(records)
    known = dict(sorted(timelines, key=lambda each: (each[1].arrived, each[0])))
    if origin is None:
        begins = [step.began for step in steps[:1]] + [
            timeline.arrived for timeline in list(known.values())[:1]
        ]
        origin = min(begins, default=0.0)
    return {
        "object": "steps",
        "source": source,
        "settings": dict(settings),
        "cut": cut,
        "steps": [step.shown(origin) for step in steps],
        "requests": [_request(name, timeline, origin) for name, timeline in known.items()],
        "summary": summary(steps, list(known.values())),
    }


def _request(name: str, timeline: Timeline, origin: float) -> dict[str, Any]:
    waited = sum(span.end - span.start for span in timeline.stages() if span.stage is Stage.QUEUE)
    found = next((mark.facts["cached_tokens"] for mark in timeline.marks if mark.event == "admitted"), 0)
    return {
        "id": name,
        "arrived": round(timeline.arrived - origin, 6),
        "ended": None if timeline.end is None else round(timeline.end - origin, 6),
        "prompt_tokens": timeline.prompt_tokens,
        "cached_tokens": found,
        "output_tokens": timeline.output_tokens,
        "waited_seconds": round(waited, 6),
        "first_token_seconds": round(timeline.tokens[0], 6) if timeline.tokens else None,
        "preemptions": sum(mark.event == "preempted" for mark in timeline.marks),
        "finish": timeline.finish and timeline.finish["reason"],
    }


def summary(steps: list[StepRecord], timelines: list[Timeline]) -> dict[str, float]:
    """Figures for comparing runs; means are over the requests with a first token, or that ended."""
    firsts = [timeline.tokens[0] for timeline in timelines if timeline.tokens]
    wholes = [timeline.end - timeline.arrived for timeline in timelines if timeline.end is not None]
    busy = sum(step.ended - step.began for step in steps)
    begin = min((timeline.arrived for timeline in timelines), default=0.0)
    seconds = max((timeline.end for timeline in timelines if timeline.end is not None), default=begin) - begin
    output = sum(timeline.output_tokens for timeline in timelines)
    return {
        "steps": len(steps),
        "seconds": round(seconds, 6),
        "output_tokens": output,
        "output_tokens_per_second": round(output / seconds, 3) if seconds else 0.0,
        "mean_ttft_seconds": round(sum(firsts) / len(firsts), 6) if firsts else 0.0,
        "mean_e2e_seconds": round(sum(wholes) / len(wholes), 6) if wholes else 0.0,
        "mean_rows": round(sum((step.ended - step.began) * len(step.rows) for step in steps) / busy, 3)
        if busy
        else 0.0,
        "preemptions": sum(note.event == "preempted" for step in steps for note in step.notes),
        "computed_tokens": sum(row.length for step in steps for row in step.rows),
    }


ENGINE, REQUESTS = 1, 2
"""Ids of the two processes."""

STEPS_TRACK = 1

_COUNTERS = ("running", "waiting", "blocks_held")


def trace(
    steps: Iterable[StepRecord],
    timelines: Iterable[tuple[str, Timeline]],
    now: float | None = None,
    since: float = -math.inf,
) -> dict[str, Any]:
    """A trace of steps and requests; open requests end ``now``. Tokens before ``since`` and requests that ended before
    it are omitted."""
    steps = list(steps)
    timelines = [each for each in timelines if each[1].end is None or each[1].end >= since]
    timelines.sort(key=lambda each: each[1].arrived)
    begins = [step.began for step in steps[:1]] + [timeline.arrived for _, timeline in timelines[:1]]
    begins += [mark.at for _, timeline in timelines for mark in timeline.marks[:1]]
    clock = _Clock(min(begins, default=0.0))
    events: list[dict[str, Any]] = []
    if steps:
        events += [
            _name("process_name", ENGINE, 0, "engine"),
            _name("thread_name", ENGINE, STEPS_TRACK, "steps"),
        ]
        for step in steps:
            events += _step(step, clock)
    if timelines:
        events.append(_name("process_name", REQUESTS, 0, "requests"))
    for track, (request_id, timeline) in enumerate(timelines, 1):
        events.append(_name("thread_name", REQUESTS, track, request_id))
        events += _events(timeline, track, clock, now, since)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"producer": "headrace"}}


class _Clock:
    """Converts seconds of the engine's clock to whole microseconds of the trace, and preserves their order."""

    def __init__(self, origin: float) -> None:
        self._origin = origin

    def at(self, seconds: float) -> int:
        return round(1e6 * (seconds - self._origin))

    def slice(
        self, name: str, process: int, track: int, start: float, end: float, **facts: Any
    ) -> dict[str, Any]:
        begin = self.at(start)
        return {
            "name": name,
            "ph": "X",
            "pid": process,
            "tid": track,
            "ts": begin,
            "dur": max(0, self.at(end) - begin),
            "args": facts,
        }

    def instant(self, name: str, track: int, at: float, **facts: Any) -> dict[str, Any]:
        return {
            "name": name,
            "ph": "i",
            "s": "t",
            "pid": REQUESTS,
            "tid": track,
            "ts": self.at(at),
            "args": facts,
        }


def _name(kind: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": track, "args": {"name": name}}


def _step(step: StepRecord, clock: _Clock) -> Iterator[dict[str, Any]]:
    prefills = [row for row in step.rows if row.kind is RowKind.PREFILL]
    yield clock.slice(
        f"step {step.step}",
        ENGINE,
        STEPS_TRACK,
        step.began,
        step.ended,
        prefill_rows=len(prefills),
        decode_rows=len(step.rows) - len(prefills),
        tokens=sum(row.length for row in step.rows),
        drafted=sum(row.drafted for row in step.rows),
        accepted=sum(row.accepted for row in step.rows),
    )
    for counter in _COUNTERS:
        yield {
            "name": counter,
            "ph": "C",
            "pid": ENGINE,
            "tid": 0,
            "ts": clock.at(step.ended),
            "args": {"value": getattr(step, counter)},
        }


def _events(
    timeline: Timeline, track: int, clock: _Clock, now: float | None, since: float
) -> Iterator[dict[str, Any]]:
    for span in timeline.stages(now):
        yield clock.slice(span.stage.value, REQUESTS, track, span.start, span.end)
        if span.stage is not Stage.PREFILL:
            continue
        mark = span.start
        for chunk in timeline.chunks:
            end = span.end if chunk.end is None else min(chunk.end, span.end)
            if span.start <= chunk.start < span.end:
                mark = max(mark, chunk.start)
                end = max(mark, end)
                yield clock.slice(
                    f"positions {chunk.position} to {chunk.position + chunk.tokens - 1}",
                    REQUESTS,
                    track,
                    mark,
                    end,
                    tokens=chunk.tokens,
                    why=reason_text(chunk.reason),
                )
                mark = end
    for number, seconds in enumerate(timeline.tokens, 1):
        if timeline.arrived + seconds >= since:
            yield clock.instant("token", track, timeline.arrived + seconds, number=number)
    for each in timeline.marks:
        yield clock.instant(each.event.replace("_", " "), track, each.at, **each.facts)
    if timeline.finish is not None and timeline.end is not None:
        yield clock.instant("finished", track, timeline.end, **timeline.finish)
