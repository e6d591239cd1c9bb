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
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from headrace.files import replacing
from headrace.lab.bench import report
from headrace.lab.bench.report import Run
from headrace.lab.bench.stats import Record, Spread, median, met_by_target, ratio, slo_share, slo_text
from headrace.lab.plan.roofline import Load, Replica
from headrace.lab.plots import legend_below, set_title
from headrace.lab.workload.work import Work
from headrace.plots import load_pyplot

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


# Results of a sweep: a table per axis, a sentence per knee, JSON, rows for CSV, and one picture.

LATENCY: Mapping[Axis, str] = {Axis.BATCH: "TPOT p50", Axis.CONCURRENCY: "E2E p50", Axis.CHUNK: "ITL p99"}
"""The latency that increases with the value of an axis."""


def latency(point: Point) -> float:
    """The latency of a point that `LATENCY` names for its axis, in seconds."""
    return {Axis.BATCH: point.tpot_p50, Axis.CONCURRENCY: point.e2e_p50, Axis.CHUNK: point.itl_p99}[
        point.trial.axis
    ]


def knees(points: Sequence[Point]) -> dict[tuple[Axis, str], Knee]:
    """The knee of each curve, by axis and policy."""
    return {
        (axis, policy): knee(
            [each.trial.value for each in curve],
            [each.tokens_per_second for each in curve],
            [latency(each) for each in curve],
        )
        for axis, curves in lines(points).items()
        for policy, curve in curves.items()
    }


def sentences(points: Sequence[Point]) -> list[str]:
    """The knee of each curve in a sentence."""
    return [
        each.sentence(f"{axis.words}, {policy}", LATENCY[axis])
        for (axis, policy), each in knees(points).items()
    ]


def fits(points: Sequence[Point], share: float) -> dict[tuple[Axis, str], Fit]:
    """The points of each curve that keep the latency targets for this share of the requests, by axis and policy."""
    return {
        (axis, policy): fitting(curve, share)
        for axis, curves in lines(points).items()
        for policy, curve in curves.items()
    }


def slo_sentences(points: Sequence[Point], slo: Mapping[str, float], share: float) -> list[str]:
    """The fit of each curve in a sentence."""
    return [
        fit.sentence(f"{axis.words}, {policy}", slo, share)
        for (axis, policy), fit in fits(points, share).items()
    ]


def tables(points: Sequence[Point], title: str) -> list[Table]:
    """One table per axis: policies side by side, then the roofline and the memory of the first policy."""
    return [_table(axis, curves, title) for axis, curves in lines(points).items()]


def _table(axis: Axis, curves: Mapping[str, Sequence[Point]], title: str) -> Table:
    shown = Table(title=f"{axis.words}: {title}", title_justify="left", header_style="bold")
    shown.add_column(axis.words, justify="right")
    columns = ["tokens/s", "TTFT p50 ms", "TPOT p50 ms", "ITL p99 ms"]
    if any(each.slo_share is not None for curve in curves.values() for each in curve):
        columns.append("within SLO")
    for policy in curves:
        for column in columns:
            shown.add_column(f"{policy} {column}", justify="right")
    shown.add_column("roofline tokens/s", justify="right")
    shown.add_column("memory MiB", justify="right")
    for value in sorted({each.trial.value for curve in curves.values() for each in curve}):
        row, known = [f"{value}"], None
        for curve in curves.values():
            at = next((each for each in curve if each.trial.value == value), None)
            known = known or at
            row += ["-"] * len(columns) if at is None else _cells(at)
        roofline, memory = (known.roofline, known.memory_bytes) if known else (None, None)
        row.append("-" if roofline is None else f"{roofline:,.0f}")
        row.append("-" if memory is None else f"{memory / (1 << 20):,.1f}")
        shown.add_row(*row)
    return shown


def _cells(point: Point) -> list[str]:
    times = (point.ttft_p50, point.tpot_p50, point.itl_p99)
    return [
        f"{point.tokens_per_second:,.0f}",
        *("-" if math.isnan(each) else f"{1000 * each:.2f}" for each in times),
        *([] if point.slo_share is None else [f"{100 * point.slo_share:.1f} %"]),
    ]


def document(points: Sequence[Point], share: float = 1.0) -> dict[str, Any]:
    """Points and knees as plain values, in seconds and bytes; with latency targets also what keeps them."""
    kept = fits(points, share) if any(each.met for each in points) else {}
    return {
        "points": rows(points),
        "knees": [
            {"axis": axis.value, "policy": policy, **each._asdict(), "plateau": each.found}
            for (axis, policy), each in knees(points).items()
        ],
        "within_slo": [
            {
                "axis": axis.value,
                "policy": policy,
                "largest": each.largest and each.largest.trial.value,
                "fastest": each.fastest and each.fastest.trial.value,
                "beyond": each.beyond and each.beyond.trial.value,
                "binding": each.binding,
            }
            for (axis, policy), each in kept.items()
        ],
    }


def rows(points: Sequence[Point]) -> list[dict[str, Any]]:
    """One row per point."""
    return [
        {
            "axis": each.trial.axis.value,
            "value": each.trial.value,
            "policy": each.trial.policy,
            **{name: value for name, value in each._asdict().items() if name not in ("trial", "met")},
            **{f"{name}_met": share for name, share in each.met.items()},
        }
        for curves in lines(points).values()
        for curve in curves.values()
        for each in curve
    ]


def write_csv(path: Path, points: Sequence[Point]) -> None:
    """Writes one row per point.

    Raises:
        OSError: the file cannot be written.
    """
    found = rows(points)
    with replacing(path) as file:
        report.write_csv(file, list(found[0]), found)


def plot(points: Sequence[Point], path: Path, title: str) -> None:
    """Writes a PNG or SVG. Points are medians over rounds, error bars their range; a dotted line marks a knee.

    Raises:
        NoPlots: matplotlib is missing.
    """
    pyplot = load_pyplot()
    by_axis = lines(points)
    size = (5.2 * len(by_axis) + 0.8, 9.6)
    figure, axes = pyplot.subplots(3, len(by_axis), figsize=size, layout="constrained", squeeze=False)
    set_title(figure, title)
    found = knees(points)
    for column, (axis, curves) in enumerate(by_axis.items()):
        above, middle, below = axes[:, column]
        for number, (policy, curve) in enumerate(curves.items()):
            _curve(above, middle, below, curve, policy, f"C{number}")
            if found[axis, policy].found:
                above.axvline(found[axis, policy].value, color=f"C{number}", linestyle=":")
        _roofline(above, curves)
        _label(axes[:, column], axis)
    legend_below(figure, axes[0, 0])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _curve(above: Any, middle: Any, below: Any, curve: Sequence[Point], policy: str, color: str) -> None:
    values = [each.trial.value for each in curve]
    speeds = [each.tokens_per_second for each in curve]
    spread = [
        [each.tokens_per_second - each.slowest for each in curve],
        [each.fastest - each.tokens_per_second for each in curve],
    ]
    above.errorbar(values, speeds, yerr=spread, label=policy, color=color, marker="o", capsize=3)
    middle.plot(values, [1000 * latency(each) for each in curve], color=color, marker="o")
    memory = [each for each in curve if each.memory_bytes is not None]
    sizes = [(each.memory_bytes or 0) / (1 << 20) for each in memory]
    below.plot([each.trial.value for each in memory], sizes, color=color, marker="o")


def _roofline(axis: Any, curves: Mapping[str, Sequence[Point]]) -> None:
    known = {p.trial.value: p.roofline for curve in curves.values() for p in curve if p.roofline is not None}
    values = sorted(known)
    if values:
        axis.plot(values, [known[each] for each in values], color="0.4", linestyle="--", label="roofline")


def _label(column: Sequence[Any], axis: Axis) -> None:
    from matplotlib import ticker

    above, middle, below = column
    above.set_title(axis.words)
    above.set_ylabel("output tokens/s")
    above.set_yscale("log")
    middle.set_ylabel(f"{LATENCY[axis]} (ms)")
    middle.set_ylim(bottom=0)
    below.set_ylabel("memory (MiB)")
    below.set_ylim(bottom=0)
    below.set_xlabel("tokens per step" if axis is Axis.CHUNK else "requests")
    for each in column:
        each.set_xscale("log", base=2)
        each.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        each.grid(alpha=0.3)
