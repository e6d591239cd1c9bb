"""Results of a sweep: a table per axis, a sentence per knee, JSON, rows for CSV, and one picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from headrace.files import replacing
from headrace.lab import export
from headrace.lab.plots import legend_below, set_title
from headrace.lab.tuning.sweep import Axis, Fit, Knee, Point, fitting, knee, lines
from headrace.plots import load_pyplot

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
        export.write_csv(file, list(found[0]), found)


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
