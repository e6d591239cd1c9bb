"""Plots of benchmark runs: throughput with its spread over rounds, and the distribution of each latency."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.lab.bench.report import Run
from headrace.lab.bench.stats import median
from headrace.lab.simulate.tally import Outcome
from headrace.plots import load_pyplot


def plot(runs: Sequence[Run], path: Path, title: str) -> None:
    """Writes a PNG: output tokens per second as bars, and TTFT, TPOT, ITL and E2E as cumulative curves.

    Several runs of one target are its rounds: the bar is their median, the error bar their range, and the curves
    include the requests of all rounds.

    Raises:
        NoPlots: matplotlib is missing.
    """
    pyplot = load_pyplot()
    rounds: dict[str, list[Run]] = {}
    for run in runs:
        rounds.setdefault(run.target, []).append(run)
    figure, axes = pyplot.subplots(1, 5, figsize=(20, 4.6), layout="constrained")
    set_title(figure, title)
    colors = [f"C{number}" for number in range(len(rounds))]
    _bars(axes[0], rounds, colors)
    for axis, quantity in zip(axes[1:], ("TTFT", "TPOT", "ITL", "E2E"), strict=True):
        for (target, each), color in zip(rounds.items(), colors, strict=True):
            curve(axis, [1000.0 * value for run in each for value in _values(run, quantity)], target, color)
        label_latency(axis, quantity)
    legend_below(figure, axes[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def curve(axis: Any, values: Sequence[float], label: str, color: str, points: int = 2000) -> None:
    """Draws a cumulative distribution with at most ``points`` points."""
    ordered = sorted(values)
    if not ordered:
        return
    stride = max(1, len(ordered) // points)
    shares = [(place + 1) / len(ordered) for place in range(len(ordered))]
    axis.step(
        [*ordered[::stride], ordered[-1]], [*shares[::stride], 1.0], where="post", label=label, color=color
    )


def label_latency(axis: Any, quantity: str) -> None:
    """Labels the axes of a cumulative distribution of a latency in milliseconds."""
    from matplotlib import ticker

    axis.set_title(quantity)
    axis.set_xlabel(f"{quantity} (ms)")
    axis.set_ylabel("share of gaps" if quantity == "ITL" else "share of requests")
    axis.set_ylim(0, 1.02)
    if axis.lines:
        axis.set_xscale("log")
        axis.xaxis.set_minor_formatter(ticker.NullFormatter())
    axis.grid(alpha=0.3)


def set_title(figure: Any, title: str) -> None:
    """Sets the figure's title, wrapped to its width."""
    figure.suptitle(textwrap.fill(title, int(10 * figure.get_figwidth())))


def legend_below(figure: Any, axis: Any) -> None:
    """Adds one legend for all axes, below them."""
    handles, labels = axis.get_legend_handles_labels()
    if len(handles) > 1:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(labels)))


def _bars(axis: Any, rounds: Mapping[str, Sequence[Run]], colors: Sequence[str]) -> None:
    """Throughput of each target, with error bars where there are several rounds."""
    speeds = [[run.summary.output_tokens_per_second for run in each] for each in rounds.values()]
    middles = [median(each) for each in speeds]
    spreads = [
        [middle - min(each) for middle, each in zip(middles, speeds, strict=True)],
        [max(each) - middle for middle, each in zip(middles, speeds, strict=True)],
    ]
    several = max(map(len, speeds)) > 1
    bars = axis.bar(range(len(rounds)), middles, color=colors, yerr=spreads if several else None, capsize=4)
    axis.bar_label(bars, fmt="%.0f", label_type="center")
    axis.set_xticks(range(len(rounds)), list(rounds), rotation=15)
    axis.set_title("Throughput" + (", median and range of rounds" if several else ""))
    axis.set_ylabel("output tokens/s")


def _values(run: Run, quantity: str) -> list[float]:
    whole = [record for record in run.records if not record.error]
    if quantity == "TTFT":
        return [record.ttft for record in whole if record.ttft is not None]
    if quantity == "TPOT":
        return [record.tpot for record in whole if record.tpot is not None]
    if quantity == "ITL":
        return [gap for record in whole for gap in record.gaps]
    return [record.e2e for record in whole]


LATENCY_INCHES = (11, 4.6)
"""Width and height of the plot of latencies."""

OUTCOME_POINTS = 1000
"""Maximum number of points of a curve."""


def plot_outcomes(runs: Mapping[str, Outcome], folder: Path, title: str) -> list[Path]:
    """Writes ``timeline.png``, ``latency.png`` and, if tenants competed, ``fairness.png`` into a folder.

    ``runs`` are the results by policy name; ``title`` names machine and load.

    Raises:
        NoPlots: matplotlib is missing.
    """
    pyplot = load_pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    title = f"{' / '.join(runs)}: {title}"
    written = [_timeline(pyplot, runs, folder, title), _latencies(pyplot, runs, folder, title)]
    if any(value == value for run in runs.values() for value in run.timeline["jain"]):
        written.append(_fairness(pyplot, runs, folder, title))
    return written


def _timeline(pyplot: Any, runs: Mapping[str, Outcome], folder: Path, title: str) -> Path:
    figure, axes = pyplot.subplots(3, 1, figsize=(11, 8), sharex=True, layout="constrained")
    set_title(figure, title)
    for name, run in runs.items():
        line, seconds = run.timeline, run.timeline["seconds"]
        axes[0].step(seconds, line["running"], where="post", label=name)
        axes[1].step(seconds, line["waiting"], where="post", label=name)
        axes[2].step(seconds, [100.0 * share for share in line["kv"]], where="post", label=name)
    axes[0].set_ylabel("running requests")
    axes[1].set_ylabel("waiting requests")
    axes[2].set_ylabel("KV cache used (%)")
    axes[2].set_ylim(0, 100)
    axes[2].set_xlabel("time (s)")
    for axis in axes:
        axis.grid(alpha=0.3)
    legend_below(figure, axes[0])
    return _save(figure, folder / "timeline.png", pyplot)


def _latencies(pyplot: Any, runs: Mapping[str, Outcome], folder: Path, title: str) -> Path:
    figure = pyplot.figure(figsize=LATENCY_INCHES, layout="constrained")
    draw_latencies(figure, runs, title)
    return _save(figure, folder / "latency.png", pyplot)


def draw_latencies(figure: Any, runs: Mapping[str, Outcome], title: str) -> None:
    """Draws the cumulative distributions of TTFT and TPOT into an empty figure."""
    axes = figure.subplots(1, 2)
    set_title(figure, title)
    for axis, name in zip(axes, ("TTFT", "TPOT"), strict=True):
        for number, (run_name, run) in enumerate(runs.items()):
            values = run.ttft if name == "TTFT" else run.tpot
            curve(axis, [1000.0 * value for value in values], run_name, f"C{number}", OUTCOME_POINTS)
        bound = next(iter(runs.values())).summary.slo.get(name.lower())
        label_latency(axis, name)
        if bound is not None:
            axis.axvline(1000.0 * bound, color="black", linestyle="--")
            axis.set_title(f"{name}, target {1000 * bound:g} ms")
    legend_below(figure, axes[0])


def _fairness(pyplot: Any, runs: Mapping[str, Outcome], folder: Path, title: str) -> Path:
    figure, axis = pyplot.subplots(figsize=(11, 3.6), layout="constrained")
    set_title(figure, title)
    for name, run in runs.items():
        axis.plot(run.timeline["seconds"], run.timeline["jain"], ".", markersize=3, label=name)
    axis.set_ylim(0, 1.02)
    axis.set_xlabel("time (s)")
    axis.set_ylabel("Jain index of waiting tenants")
    axis.grid(alpha=0.3)
    legend_below(figure, axis)
    return _save(figure, folder / "fairness.png", pyplot)


def _save(figure: Any, path: Path, pyplot: Any) -> Path:
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
