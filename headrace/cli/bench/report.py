"""Results of ``headrace bench``: tables on the terminal, JSON and a plot in files, rows per request."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from headrace.cli.output import export, show, writing, written
from headrace.cli.progress import progress
from headrace.config import Options

if TYPE_CHECKING:
    from headrace.lab.bench.report import Run
    from headrace.lab.workload.dataset import Dataset

SHOWN_FAILURES = 3


def report_runs(
    command: str,
    shown: Sequence[Run],
    output: Path | None,
    settings: Mapping[str, Any],
    more: Mapping[str, Any] | None = None,
    every: Sequence[Run] | None = None,
    *,
    medians: Mapping[str, Mapping[str, float]] | None = None,
    rows: Path | None = None,
    load: str = "",
) -> None:
    """Prints a table of the runs ``shown``; writes ``every`` run as JSON and as a plot, and requests to ``rows``."""
    from headrace.lab import plots
    from headrace.lab.bench import report
    from headrace.plots import NoPlots

    runs = every or shown
    ratios = (more or {}).get("ratios")
    rounds = len(runs) // len(shown)
    title = f"bench {command}: {load}"
    note = f" (medians of {rounds} rounds)" if ratios and rounds > 1 else ""
    show(report.table(shown, title + note, ratios and {shown[0].target: {}, **ratios}, medians))
    show(*(table for run in shown for table in report.group_tables(run)))
    failed = [record for run in shown for record in run.records if record.error]
    show(*(f"failed: {record.id}: {record.error}" for record in failed[:SHOWN_FAILURES]))
    path = report_path(output, command)
    with progress("writing the report"):
        write(path, report.document(runs, plain(settings), more))
        try:
            plots.plot(runs, path.with_suffix(".png"), f"{', '.join(run.target for run in shown)}: {load}")
        except NoPlots as missing:
            show(str(missing))
    written(path)
    export(rows, report.rows(runs))


def describe(dataset: Dataset, concurrency: int | None = None) -> str:
    """The load in a few words, for titles."""
    rate = "all at once" if math.isinf(dataset.rate) else f"{dataset.rate:g} requests/s"
    if concurrency is not None:
        rate = f"{concurrency} at once"
    return f"{dataset.count} requests of {dataset.name}, {rate}"


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Writes a report's JSON.

    Raises:
        ConfigError: the file cannot be written.
    """
    from headrace.lab.bench import report

    with writing("--output", path):
        report.write(path, document)


def report_path(output: Path | None, command: str) -> Path:
    """The report's file: ``--output``, or a file named after command and time."""
    return output or Path("bench-results") / f"{command}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"


def measured_options(given: Options) -> dict[str, Any]:
    """The options that a measurement depends on, without those of the server, which contain API keys."""
    return {"model": given.model, "cache": given.cache, "scheduler": given.scheduler}


def plain(value: Any) -> Any:
    """Dataclasses within ``value`` as dictionaries."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


def refuse_failures(runs: Sequence[Run]) -> None:
    """Ends the command with status 1 if a request failed; call it after reporting."""
    if any(run.summary.failed for run in runs):
        raise typer.Exit(1)
