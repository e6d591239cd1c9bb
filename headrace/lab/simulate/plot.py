"""Plots of simulated runs: requests and memory over time, distributions of latencies, fairness."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.lab.bench.plot import curve, label_latency, legend_below, set_title
from headrace.lab.simulate.outcome import Outcome
from headrace.plots import load_pyplot

LATENCY_INCHES = (11, 4.6)
"""Width and height of the plot of latencies."""

POINTS = 1000
"""Maximum number of points of a curve."""


def plot(runs: Mapping[str, Outcome], folder: Path, title: str) -> list[Path]:
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
            curve(axis, [1000.0 * value for value in values], run_name, f"C{number}", POINTS)
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
