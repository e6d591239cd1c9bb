"""Pictures of a simulated run: what the engines did over time, how latencies are distributed, how fair it was."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.lab.bench.plot import load_pyplot
from headrace.lab.simulate.outcome import Outcome

POINTS = 1000
"""Points of a curve at most: a million requests make no better picture."""


def plot(told: Outcome, folder: Path, title: str) -> list[Path]:
    """Writes ``timeline.png``, ``latency.png`` and, where tenants competed, ``fairness.png`` into a folder.

    Raises:
        NoPlots: matplotlib is missing.
    """
    pyplot = load_pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    line, seconds = told.timeline, told.timeline["seconds"]

    figure, (rows, memory) = pyplot.subplots(2, 1, figsize=(11, 6), sharex=True, layout="constrained")
    figure.suptitle(title)
    rows.step(seconds, line["running"], where="post", label="running")
    rows.step(seconds, line["waiting"], where="post", label="waiting")
    rows.set_ylabel("requests")
    rows.legend()
    memory.step(seconds, [100.0 * share for share in line["kv"]], where="post")
    memory.set_ylabel("KV blocks held, %")
    memory.set_xlabel("seconds")
    memory.set_ylim(0, 100)
    written = [_save(figure, folder / "timeline.png", pyplot)]

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    figure.suptitle(title)
    for axis, name, values in zip(axes, ("TTFT", "TPOT"), (told.ttft, told.tpot), strict=True):
        shown = _thinned(values)
        if shown:
            axis.step(shown, [(i + 1) / len(shown) for i in range(len(shown))])
            axis.set_xscale("log")
        bound = told.summary.slo.get(name.lower())
        if bound is not None:
            axis.axvline(bound, color="tab:red", label=f"SLO {bound:g} s")
            axis.legend()
        axis.set_xlabel(f"{name}, seconds")
        axis.set_ylabel("share of requests")
        axis.grid(alpha=0.3)
    written.append(_save(figure, folder / "latency.png", pyplot))

    if any(value == value for value in line["jain"]):
        figure, axis = pyplot.subplots(figsize=(11, 3), layout="constrained")
        figure.suptitle(title)
        axis.plot(seconds, line["jain"], ".", markersize=3)
        axis.set_ylim(0, 1.02)
        axis.set_xlabel("seconds")
        axis.set_ylabel("Jain's index, waiting tenants")
        written.append(_save(figure, folder / "fairness.png", pyplot))
    return written


def _save(figure: Any, path: Path, pyplot: Any) -> Path:
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _thinned(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    stride = max(1, len(ordered) // POINTS)
    return ordered[::stride]
