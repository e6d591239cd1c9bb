"""``headrace bench sweep``: throughput, latency and memory at each value of a setting, and where the plateau begins.

In this order: the `Trial` values of three axes under each batching policy, coarse ones first, within a time budget;
the `Point` of each trial, as medians over its rounds; the `Knee` of a curve, the smallest value that has reached the
plateau; its `Fit`, the values that keep latency targets; and the roofline, the maximum output tokens per second at a
device's peaks in a steady state:

```
 a step   n sequences generate a token each; n / output of them end, and as many prompts begin
 tokens   n x (1 + prompt / output), at most the chunk size, which bounds n
 bound    n / max(operations / peak rate, bytes / bandwidth)
```
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import NamedTuple

from headrace.lab.bench.record import Record
from headrace.lab.bench.report import Run
from headrace.lab.bench.stats import Spread, median, met_by_target, ratio, slo_share, slo_text
from headrace.lab.plan.roofline import Load, Replica
from headrace.lab.workload.work import Work

GENERATIONS = 4
"""Requests of a trial per concurrent request, so that ramp-up and drain have the same share in all trials."""

LEAST_REQUESTS = 16
"""Minimum number of requests of a trial."""


class Axis(StrEnum):
    """The varied setting: engine slots with all requests waiting, open requests of a closed loop, tokens per step."""

    BATCH = "batch-size"
    CONCURRENCY = "concurrency"
    CHUNK = "chunk-size"

    @property
    def words(self) -> str:
        """The name in tables and sentences."""
        return self.value.replace("-", " ")


class Trial(NamedTuple):
    """One value of one axis under one policy, ``continuous`` or ``static``."""

    axis: Axis
    value: int
    policy: str


def requests_of(trial: Trial, slots: int) -> int:
    """Number of requests of a trial; ``slots`` are those of the engine in trials of another axis."""
    at_once = slots if trial.axis is Axis.CHUNK else trial.value
    return max(LEAST_REQUESTS, GENERATIONS * at_once)


def plan(values: Mapping[Axis, Sequence[int]], policies: Sequence[str]) -> list[Trial]:
    """All trials, ordered so that an early end leaves coarse results for every axis."""
    orders = {axis: coarse_first(each) for axis, each in values.items()}
    longest = max(map(len, orders.values()), default=0)
    return [
        Trial(axis, order[place], policy)
        for place in range(longest)
        for axis, order in orders.items()
        if place < len(order)
        for policy in policies
    ]


def coarse_first(values: Sequence[int]) -> list[int]:
    """The values in the order of a bisection: smallest, largest, the middle, then the middles of the halves."""
    ordered = sorted(set(values))
    if len(ordered) < 3:
        return ordered
    found, spans = [ordered[0], ordered[-1]], [(0, len(ordered) - 1)]
    while spans:
        low, high = spans.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            found.append(ordered[middle])
            spans += [(low, middle), (middle, high)]
    return found


def sweep(
    trials: Sequence[Trial],
    run: Callable[[Trial], Run],
    rounds: int,
    budget_seconds: float,
    clock: Callable[[], float],
) -> dict[Trial, list[Run]]:
    """The runs of each trial; every second round runs the trials in reverse order.

    No trial begins after the budget is spent, except the first one. Trials without a run are omitted.
    """
    began = clock()
    done: dict[Trial, list[Run]] = {}
    for number in range(rounds):
        for trial in trials if number % 2 == 0 else reversed(trials):
            if done and clock() - began >= budget_seconds:
                return done
            done.setdefault(trial, []).append(run(trial))
    return done


class Sizes(NamedTuple):
    """Bytes of an engine: weights, activations of its largest step with the states of its sequences, one KV block."""

    weight_bytes: int
    workspace_bytes: int
    block_bytes: int


class Point(NamedTuple):
    """The figures of one trial: medians over ``rounds``, in tokens per second and seconds; memory in bytes.

    ``slowest`` and ``fastest`` are the range of the throughput over rounds. ``memory_bytes`` is None if the sizes are
    unknown; ``roofline`` (output tokens per second) is None if the device's peaks are unknown. ``goodput`` (requests
    per second) and ``slo_share`` (0 to 1) are None without targets; ``met`` has the share of each target alone.
    """

    trial: Trial
    rounds: int
    requests: int
    failed: int
    tokens_per_second: float
    slowest: float
    fastest: float
    ttft_p50: float
    tpot_p50: float
    itl_p99: float
    e2e_p50: float
    kv_blocks: int
    memory_bytes: int | None
    roofline: float | None
    goodput: float | None = None
    slo_share: float | None = None
    met: Mapping[str, float] = {}


def point(
    trial: Trial,
    runs: Sequence[Run],
    sizes: Sizes | None,
    roofline: float | None,
    slo: Mapping[str, float] | None = None,
) -> Point:
    """The figures of a trial that has run at least once; ``slo`` are latency targets in seconds."""
    summaries = [run.summary for run in runs]
    speeds = [each.output_tokens_per_second for each in summaries]
    blocks = max(int(run.facts.get("kv_blocks_peak", 0)) for run in runs)

    def middle(read: Callable[[Spread], float], name: str) -> float:
        return median([read(getattr(each, name)) for each in summaries])

    return Point(
        trial,
        len(runs),
        sum(each.requests for each in summaries),
        sum(each.failed for each in summaries),
        median(speeds),
        min(speeds),
        max(speeds),
        middle(lambda each: each.p50, "ttft"),
        middle(lambda each: each.p50, "tpot"),
        middle(lambda each: each.p99, "itl"),
        middle(lambda each: each.p50, "e2e"),
        blocks,
        None if sizes is None else sizes.weight_bytes + sizes.workspace_bytes + blocks * sizes.block_bytes,
        roofline,
        *(_kept(runs, slo) if slo else ()),
    )


def _kept(runs: Sequence[Run], slo: Mapping[str, float]) -> tuple[float, float, dict[str, float]]:
    """Goodput, the share of requests within all targets, and the share within each: medians over the rounds."""
    steady = [_steady(run.records) for run in runs]
    shares = [slo_share(each, slo) for each in steady]
    goodput = [share * run.summary.requests_per_second for share, run in zip(shares, runs, strict=True)]
    met = [met_by_target(each, slo) for each in steady]
    return median(goodput), median(shares), {name: median([each[name] for each in met]) for name in slo}


def _steady(records: Sequence[Record]) -> Sequence[Record]:
    """The requests of a closed loop without those of its start, whose prompts all arrive at once.

    These have the first arrival of all: 0 in virtual time, and on a real clock the moment in which the loop began.
    """
    start = min((each.arrived for each in records), default=0.0)
    return [each for each in records if each.arrived > start] or records


def lines(points: Sequence[Point]) -> Mapping[Axis, Mapping[str, list[Point]]]:
    """The points by axis and policy, in the order of their values."""
    found: dict[Axis, dict[str, list[Point]]] = {}
    for axis in Axis:
        for each in sorted(points, key=lambda each: (each.trial.policy, each.trial.value)):
            if each.trial.axis is axis:
                found.setdefault(axis, {}).setdefault(each.trial.policy, []).append(each)
    return found


REACHED = 0.95
"""Minimum share of the best throughput for a value to belong to the plateau."""

STILL_GROWING = 1.05
"""If the last step raises throughput by more than this factor, there is no plateau."""


class Knee(NamedTuple):
    """Where the plateau of a curve begins.

    ``value`` is the smallest value with at least `REACHED` of the best throughput; ``last`` is the largest value.
    ``throughput`` is that at the knee; ``gain`` and ``slower`` are the ratios of throughput and latency at ``last`` to
    those at the knee. ``growth`` is the ratio of the last two throughputs (NaN with one value).
    """

    value: int
    last: int
    throughput: float
    gain: float
    slower: float
    growth: float

    @property
    def found(self) -> bool:
        """Whether the curve has a plateau: more than one value, and the last step added little."""
        return not math.isnan(self.growth) and (self.value < self.last or self.growth <= STILL_GROWING)

    def sentence(self, what: str, latency: str) -> str:
        """The knee as a sentence; ``what`` names the curve, ``latency`` the latency."""
        if math.isnan(self.growth):
            return f"{what}: only {self.value} was measured."
        if not self.found:
            return (
                f"{what}: no plateau up to {self.last}; its last step still adds {_percent(self.growth)}. "
                "Try larger values."
            )
        at = f"{what}: the knee is {self.value}, with {self.throughput:,.0f} output tokens/s."
        if self.value == self.last:
            return f"{at} Larger values were not tried."
        change = "adds" if self.gain >= 1 else "loses"
        then = f"{self.last} {change} {_percent(self.gain)} of throughput"
        return f"{at} {then} and has {self.slower:.1f} times the {latency}."


def _percent(ratio: float) -> str:
    return f"{100 * abs(ratio - 1):.0f} %"


def knee(values: Sequence[int], throughputs: Sequence[float], latencies: Sequence[float]) -> Knee:
    """The knee of a curve with ascending ``values``; throughputs in output tokens per second, latencies in seconds.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("a knee needs at least one value")
    best = max(throughputs)
    place = next(i for i, each in enumerate(throughputs) if each >= REACHED * best)
    growth = throughputs[-1] / throughputs[-2] if len(values) > 1 and throughputs[-2] > 0 else math.nan
    return Knee(
        values[place],
        values[-1],
        throughputs[place],
        ratio(throughputs[-1], throughputs[place]),
        ratio(latencies[-1], latencies[place]),
        growth,
    )


class Fit(NamedTuple):
    """Which points of a curve keep latency targets for the wanted share of the requests.

    ``largest`` has the largest value, ``fastest`` the most throughput of those that keep them (None: no point does).
    ``beyond`` is the next larger point, or the best one if none keeps them, and ``binding`` its target that the fewest
    requests meet; None if the largest value that was tried keeps all.
    """

    largest: Point | None
    fastest: Point | None
    beyond: Point | None
    binding: str | None

    def sentence(self, what: str, slo: Mapping[str, float], share: float) -> str:
        """The fit as a sentence; ``what`` names the curve."""
        targets = f"{slo_text(slo)} for {100 * share:g} % of the requests"
        if self.beyond is not None:
            met = f"{100 * self.beyond.met[self.binding or '']:.1f} % of the requests meet it"
            bound = f"{self.binding} binds: at {self.beyond.trial.value}, {met}."
        else:
            bound = "No target binds: try larger values."
        if self.largest is None or self.fastest is None:
            return f"{what}: no value is within {targets}. {bound}"
        best, speed = self.largest, f"{self.largest.tokens_per_second:,.0f} output tokens/s"
        text = f"{what}: {best.trial.value} is the largest value within {targets}, with {speed}. {bound}"
        if self.fastest.trial != best.trial:
            text += f" Of the values within, {self.fastest.trial.value} has the most throughput: "
            text += f"{self.fastest.tokens_per_second:,.0f} output tokens/s."
        return text


def fitting(curve: Sequence[Point], share: float) -> Fit:
    """The fit of a curve whose points have ascending values and were measured with targets."""
    kept = [each for each in curve if (each.slo_share or 0.0) >= share]
    largest = kept[-1] if kept else None
    if largest is None:
        beyond: Point | None = max(curve, key=lambda each: each.slo_share or 0.0)
    else:
        beyond = next((each for each in curve if each.trial.value > largest.trial.value), None)
    fastest = max(kept, key=lambda each: each.tokens_per_second, default=None)
    binding = None if beyond is None else min(beyond.met, key=lambda name: beyond.met[name])
    return Fit(largest, fastest, beyond, binding)


class Lengths(NamedTuple):
    """Mean tokens of a prompt and of an output."""

    prompt: float
    output: float


def lengths(work: Sequence[Work]) -> Lengths:
    """The mean lengths of work whose prompts are token ids."""
    count = len(work)
    return Lengths(
        sum(len(each.prompt) for each in work) / count, sum(each.max_tokens for each in work) / count
    )


def ideal(replica: Replica) -> Replica:
    """The same replica on a device that reaches its peaks and loses no time between steps."""
    device = replace(
        replica.device, efficiency_compute=1.0, efficiency_bandwidth=1.0, step_overhead_seconds=0.0
    )
    return replace(replica, device=device)


def tokens_per_second(replica: Replica, shape: Lengths, rows: int, chunk: int) -> float:
    """The bound for ``rows`` concurrent sequences and steps of at most ``chunk`` tokens."""
    prefill = shape.prompt / shape.output  # prompt tokens per generated token
    drawn = min(float(rows), chunk / (1 + prefill))
    context = shape.prompt + shape.output / 2
    ending = drawn / shape.output
    whole = max(1, round(drawn))
    load = Load(
        decodes=whole,
        prefill_tokens=round(drawn * prefill),
        contexts=drawn * context + drawn * prefill * shape.prompt / 2,
        read_tokens=drawn * context + ending * shape.prompt,
        samples=whole + round(ending),
        sequences=drawn + ending,
    )
    return drawn / replica.step_seconds(load)
