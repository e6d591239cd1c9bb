"""Figures of a finished run, with the same definitions as the measured ones of `lab.bench`."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.core.tenancy.fair_share import jain
from headrace.lab.bench.stats import Group, Sample, Spread, Summary, within
from headrace.lab.simulate.tally import Group as Counted
from headrace.lab.simulate.tally import Tally
from headrace.observe.sketch import Sketch

SLO_NAMES = ("ttft", "tpot", "e2e")


def spread_of(sketch: Sketch) -> Spread:
    """The percentiles of a sketched distribution."""
    p50, p95, p99 = (sketch.percentile(percent) for percent in (50.0, 95.0, 99.0))
    most = sketch.most if sketch.count else math.nan
    return Spread(sketch.count, sketch.mean, p50, p95, p99, most)


@dataclass(frozen=True, slots=True)
class Outcome:
    """All figures of a run.

    ``facts`` are figures of the engines (steps, preemptions, cache, memory, fairness). ``timeline`` has one list per
    quantity with a value per bucket; its ``seconds`` are the starts of the buckets. ``failures`` counts failed requests
    by reason.
    """

    summary: Summary
    facts: Mapping[str, Any]
    failures: Mapping[str, int]
    tenants: Sequence[Group]
    classes: Sequence[Group]
    timeline: Mapping[str, Sequence[float]]
    ttft: Sequence[float]
    tpot: Sequence[float]


def outcome(tally: Tally, slo: Mapping[str, float], busy_seconds: Sequence[float] = ()) -> Outcome:
    """The figures of a finished run; ``busy_seconds`` has the busy time of each replica's device."""
    groups = tally.groups
    seconds = max(0.0, tally.ended - tally.began) if groups else 0.0
    failures: dict[str, int] = {}
    for group in groups:
        for reason, count in group.failed.items():
            failures[reason] = failures.get(reason, 0) + count
    whole = _sample(groups, slo)
    line = timeline(tally)
    hit_share = whole.cached_tokens / whole.prompt_tokens if whole.prompt_tokens else 0.0
    return Outcome(
        whole.summary(seconds, spread_of(tally.gaps), slo),
        _facts(tally, line, busy_seconds, seconds, hit_share),
        dict(sorted(failures.items())),
        [_sample(mine, slo).group(name) for name, mine in _by(groups, "tenant").items()],
        [_sample(mine, slo).group(name) for name, mine in _by(groups, "service_class").items()],
        line,
        whole.ttft,
        whole.tpot,
    )


def _facts(
    tally: Tally,
    line: Mapping[str, Sequence[float]],
    busy_seconds: Sequence[float],
    seconds: float,
    hit_share: float,
) -> dict[str, Any]:
    """Figures of the engines."""
    stepping = sum(tally.steps.columns["seconds"])
    return {
        "steps": tally.step_count,
        "batch_rows_mean": tally.step_rows / tally.step_count if tally.step_count else 0.0,
        "computed_tokens": tally.computed_tokens,
        "preemptions": tally.preemptions,
        "preempted_tokens": tally.lost_tokens,
        "drafted_tokens": tally.drafted_tokens,
        "accepted_tokens": tally.accepted_tokens,
        "cache_hit_percent": 100.0 * hit_share,
        "kv_used_percent_mean": 100.0 * sum(tally.steps.columns["kv"]) / stepping if stepping else 0.0,
        "kv_used_percent_peak": 100.0 * tally.blocks_peak,
        "slots_full_percent": 100.0 * tally.slots_full_seconds / stepping if stepping else 0.0,
        "device_busy_percent": 100.0 * _busy(busy_seconds, seconds),
        "jain_service": jain([sum(column) for column in tally.service.columns.values()]),
        "jain_backlogged": _mean(finite(line["jain"])),
    }


def _busy(busy_seconds: Sequence[float], seconds: float) -> float:
    """Mean busy share of the devices, each at most 1 (a step may end after the run)."""
    if not seconds or not busy_seconds:
        return 0.0
    return math.fsum(min(1.0, each / seconds) for each in busy_seconds) / len(busy_seconds)


def timeline(tally: Tally) -> dict[str, list[float]]:
    """Means per bucket: running requests, waiting requests, share of used blocks, and Jain's index over the tenants
    that were backlogged for the whole bucket (NaN with fewer than two)."""
    steps = tally.steps.columns
    width = max(line.width for line in (tally.steps, tally.service, tally.waiting))
    used = math.ceil(tally.ended / width) if tally.ended else 0
    stepping = tally.steps.coarse("seconds", width)
    means = {
        name: [
            amount / seconds if seconds else 0.0
            for amount, seconds in zip(tally.steps.coarse(name, width), stepping, strict=True)
        ][:used]
        for name in steps
        if name != "seconds"
    }
    services = {name: tally.service.coarse(name, width) for name in tally.service.columns}
    waits = {name: tally.waiting.coarse(name, width) for name in tally.waiting.columns}
    fairness = []
    for place in range(used):
        backlogged = [name for name, wait in waits.items() if wait[place] >= width]
        given = [services[name][place] if name in services else 0.0 for name in backlogged]
        fairness.append(jain(given) if len(given) > 1 else math.nan)
    return {"seconds": [width * place for place in range(used)], **means, "jain": fairness}


def _joined(groups: Iterable[Counted], name: str) -> array[float]:
    values = array("d")
    for group in groups:
        values.extend(getattr(group, name))
    return values


def _numbers(values: Iterable[float]) -> array[float]:
    return array("d", (value for value in values if value == value))


def finite(values: Iterable[float]) -> list[float]:
    """The finite values."""
    return [value for value in values if math.isfinite(value)]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _sample(groups: Sequence[Counted], slo: Mapping[str, float]) -> Sample:
    """What the figures of these requests are computed from."""
    failed = sum(sum(group.failed.values()) for group in groups)
    e2e = _joined(groups, "e2e")
    prompt, output, cached = (
        sum(getattr(group, name) for group in groups)
        for name in ("prompt_tokens", "output_tokens", "cached_tokens")
    )
    return Sample(
        *(len(e2e) + failed, failed, prompt, output, cached),
        ttft=_joined(groups, "ttft"),
        tpot=_numbers(_joined(groups, "tpot")),
        e2e=e2e,
        met=sum(_met(group, slo) for group in groups) if slo else None,
    )


def _met(group: Counted, slo: Mapping[str, float]) -> int:
    """Number of requests within every target."""
    times = zip(group.ttft, group.tpot, group.e2e, strict=True)
    return sum(within(dict(zip(SLO_NAMES, each, strict=True)), slo) for each in times)


def _by(groups: Sequence[Counted], key: str) -> dict[str, list[Counted]]:
    parts: dict[str, list[Counted]] = {}
    for group in groups:
        parts.setdefault(getattr(group, key), []).append(group)
    return dict(sorted(parts.items()))
