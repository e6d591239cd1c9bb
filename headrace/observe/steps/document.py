"""Steps and their requests as one JSON document for the step-by-step page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from headrace.observe.steps.record import StepRecord
from headrace.observe.steps.timeline import Stage, Timeline


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
