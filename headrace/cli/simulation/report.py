"""Results of ``headrace simulate``: a table with ratios, a hint if slots are the limit, JSON and plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.output import show, writing, written
from headrace.cli.progress import progress

if TYPE_CHECKING:
    from headrace.cli.simulation.simulate import SimulatedRun
    from headrace.lab.simulate.outcome import Part

SHOWN_PARTS = 30
"""Maximum number of tenants in the table; the JSON has all of them."""

FULL_PERCENT = 5.0
"""Share of the time with all slots taken, above which they count as a limit."""

IDLE_PERCENT = 80.0
"""Use of the KV cache below which memory does not count as the limit."""

MOST_SLOTS = 4096
"""The largest value of ``--max-num-seqs``."""


def show_runs(runs: Sequence[SimulatedRun], title: str) -> None:
    """The runs side by side, then each one's classes and tenants."""
    from headrace.lab.bench.report import Run, table

    columns = []
    for run in runs:
        failures = {f"rejected: {reason}": count for reason, count in run.outcome.failures.items()}
        slots = {"max_num_seqs": run.scheduler.max_num_seqs}
        facts = {**slots, **run.outcome.facts, **failures}
        columns.append(Run(run.name, (), run.outcome.summary, facts))
    show(table(columns, title))
    for run in runs:
        for kind, parts in (("class", run.outcome.classes), ("tenant", run.outcome.tenants)):
            if len(parts) > 1:
                _show_parts(f"{run.name}: per {kind}", parts)
    for run in runs:
        if (text := hint(run)) is not None:
            show(text)


def hint(run: SimulatedRun) -> str | None:
    """Advice if ``--max-num-seqs``, not memory, limits the run; otherwise None."""
    facts, slots = run.outcome.facts, run.scheduler.max_num_seqs
    full, used = facts["slots_full_percent"], facts["kv_used_percent_peak"]
    if full < FULL_PERCENT or used > IDLE_PERCENT or slots == MOST_SLOTS:
        return None
    more = min(MOST_SLOTS, int(slots * IDLE_PERCENT / max(used, 1.0)))
    return (
        f"hint: {run.name}: all {slots} slots were taken during {full:.0f} % of the time while requests waited, and "
        f"at most {used:.0f} % of the KV cache was used. Slots are the limit, not memory: try --max-num-seqs {more}"
    )


def _show_parts(title: str, parts: Sequence[Part]) -> None:
    from rich.table import Table

    shown = Table(title=title, title_justify="left", header_style="bold")
    columns = ("", "requests", "failed", "output tokens", "TTFT p50 ms", "TTFT p99 ms")
    for column in (*columns, "TPOT p50 ms", "TPOT p99 ms", "within SLO"):
        shown.add_column(column, justify="right" if column else "left")
    for part in sorted(parts, key=lambda part: -part.requests)[:SHOWN_PARTS]:
        shown.add_row(
            part.name,
            f"{part.requests:,}",
            f"{part.failed:,}",
            f"{part.output_tokens:,}",
            *(f"{1e3 * value:.1f}" for each in (part.ttft, part.tpot) for value in (each.p50, each.p99)),
            "-" if part.attained is None else f"{100 * part.attained:.1f} %",
        )
    show(shown)


def write_runs(runs: Sequence[SimulatedRun], settings: Mapping[str, Any], path: Path) -> None:
    """Writes the runs as JSON: a single run as the document, several by name under ``runs``."""
    from headrace.lab.bench import report

    documents = {run.name: _document(run, settings) for run in runs}
    content = documents[runs[0].name] if len(runs) == 1 else {"settings": settings, "runs": documents}
    with writing("--output", path):
        report.write(path, report.plain(content))
    written(path)


def _document(run: SimulatedRun, settings: Mapping[str, Any]) -> dict[str, Any]:
    outcome = run.outcome
    return {
        "settings": {
            **settings,
            "cache": asdict(run.cache),
            "scheduler": asdict(run.scheduler),
        },
        "summary": asdict(outcome.summary),
        "facts": outcome.facts,
        "failures": outcome.failures,
        "classes": [asdict(part) for part in outcome.classes],
        "tenants": [asdict(part) for part in outcome.tenants],
        "timeline": outcome.timeline,
        "experiments": run.experiments,
    }


def plot_runs(runs: Sequence[SimulatedRun], folder: Path, title: str) -> None:
    """Writes the plots of all runs into a folder."""
    from headrace.lab.plots import plot_outcomes
    from headrace.plots import NoPlots

    try:
        with writing("--plot", folder), progress("plotting"):
            paths = plot_outcomes({run.name: run.outcome for run in runs}, folder, title)
    except NoPlots as missing:
        show(str(missing))
        return
    for path in paths:
        written(path)
