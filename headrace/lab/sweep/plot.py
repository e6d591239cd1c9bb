"""Plot of a sweep: throughput with its roofline, latency, and memory, one column per axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.lab.plots import legend_below, set_title
from headrace.lab.sweep.points import Point, lines
from headrace.lab.sweep.report import LATENCY, knees, latency
from headrace.lab.sweep.trials import Axis
from headrace.plots import load_pyplot


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
