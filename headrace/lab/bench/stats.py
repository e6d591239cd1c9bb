"""Figures from records, each defined once.

A percentile is interpolated linearly between the two nearest ranks (type 7 of Hyndman and Fan, 1996, which
is numpy's default). Throughput counts useful tokens only: tokens of answers that were delivered, never
padding, over the time from the first arrival to the last answer's end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headrace.lab.bench.record import Record

SLO_NAMES = ("ttft", "tpot", "itl", "e2e")


def percentile(values: Sequence[float], percent: float) -> float:
    """The ``percent``-th percentile of ``values``, interpolated; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100.0
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def median(values: Sequence[float]) -> float:
    """The 50th percentile."""
    return percentile(values, 50.0)


@dataclass(frozen=True, slots=True)
class Spread:
    """How one quantity is distributed; seconds."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    most: float


def spread(values: Sequence[float]) -> Spread:
    """The distribution of ``values``; NaN figures of nothing."""
    if not values:
        return Spread(0, *([math.nan] * 5))
    ordered = sorted(values)  # once: what is sorted already is sorted again in linear time
    return Spread(
        len(ordered),
        math.fsum(ordered) / len(ordered),
        percentile(ordered, 50.0),
        percentile(ordered, 95.0),
        percentile(ordered, 99.0),
        ordered[-1],
    )


@dataclass(frozen=True, slots=True)
class Summary:
    """One run in figures. Rates are per second; ``goodput`` is requests per second that met every SLO."""

    requests: int
    failed: int
    seconds: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    ttft: Spread
    tpot: Spread
    itl: Spread
    e2e: Spread
    slo: Mapping[str, float] = field(default_factory=dict)
    goodput: float | None = None


def meets(record: Record, slo: Mapping[str, float]) -> bool:
    """Whether a request met every bound (seconds) of ``slo``; one without the quantity meets its bound.

    ``itl`` is judged by the request's own longest gap.
    """
    if record.error:
        return False
    seen = {
        "ttft": record.ttft,
        "tpot": record.tpot,
        "itl": max(record.gaps, default=None),
        "e2e": record.e2e,
    }
    return all((value := seen[name]) is None or value <= limit for name, limit in slo.items())


def summarize(records: Sequence[Record], slo: Mapping[str, float] | None = None) -> Summary:
    """All figures of a run; requests that failed count as such and in nothing else."""
    whole = [record for record in records if not record.error]
    seconds = max((r.finished for r in records), default=0.0) - min((r.arrived for r in records), default=0.0)
    per_second = 1.0 / seconds if seconds > 0 else 0.0
    prompt = sum(r.prompt_tokens for r in whole)
    output = sum(r.output_tokens for r in whole)
    return Summary(
        requests=len(records),
        failed=len(records) - len(whole),
        seconds=seconds,
        prompt_tokens=prompt,
        output_tokens=output,
        cached_tokens=sum(r.cached_tokens for r in whole),
        requests_per_second=len(whole) * per_second,
        output_tokens_per_second=output * per_second,
        total_tokens_per_second=(prompt + output) * per_second,
        ttft=spread([r.ttft for r in whole if r.ttft is not None]),
        tpot=spread([r.tpot for r in whole if r.tpot is not None]),
        itl=spread([gap for r in whole for gap in r.gaps]),
        e2e=spread([r.e2e for r in whole]),
        slo=dict(slo or {}),
        goodput=sum(meets(r, slo) for r in whole) * per_second if slo else None,
    )
