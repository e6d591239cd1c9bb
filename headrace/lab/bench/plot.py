"""One picture of runs: throughput, and how their latencies are distributed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.lab.bench.report import Run


class NoPlots(RuntimeError):
    """matplotlib is not installed; the message says what to install."""


def load_pyplot() -> Any:
    """matplotlib's drawing interface, which writes files and opens no window.

    Raises:
        NoPlots: matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError:
        raise NoPlots('no plot without matplotlib: pip install "headrace[bench]"') from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot(runs: Sequence[Run], path: Path, title: str) -> None:
    """Writes a PNG with output tok/s as bars and TTFT, ITL and E2E as cumulative curves.

    Raises:
        NoPlots: matplotlib is missing.
    """
    pyplot = load_pyplot()
    from matplotlib import ticker

    figure, axes = pyplot.subplots(1, 4, figsize=(16, 4), layout="constrained")
    figure.suptitle(title)
    names = [run.target for run in runs]
    bars = axes[0].bar(range(len(runs)), [run.summary.output_tokens_per_second for run in runs])
    axes[0].bar_label(bars, fmt="%.0f")
    axes[0].set_xticks(range(len(runs)), names, rotation=15)
    axes[0].set_ylabel("output tok/s")
    for axis, quantity in zip(axes[1:], ("TTFT", "ITL", "E2E"), strict=True):
        for run in runs:
            values = _values(run, quantity)
            if values:
                axis.step(values, [(i + 1) / len(values) for i in range(len(values))], label=run.target)
        axis.set_xlabel(f"{quantity}, seconds")
        axis.set_ylabel("share of requests" if quantity != "ITL" else "share of gaps")
        axis.set_xscale("log")
        axis.xaxis.set_minor_formatter(ticker.NullFormatter())
        axis.grid(alpha=0.3)
    if axes[1].lines:
        axes[1].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _values(run: Run, quantity: str) -> list[float]:
    whole = [record for record in run.records if not record.error]
    if quantity == "TTFT":
        return sorted(record.ttft for record in whole if record.ttft is not None)
    if quantity == "ITL":
        return sorted(gap for record in whole for gap in record.gaps)
    return sorted(record.e2e for record in whole)
