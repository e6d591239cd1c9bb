"""Runs of targets over a workload and their results: tables, JSON with everything needed to repeat them, rows per
request.

Rounds of several targets alternate because the speed of a machine drifts during a measurement (heat, other processes,
caches). Targets that take turns see the same drift.
"""

from __future__ import annotations

import csv
import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any

from rich.table import Table

from headrace.files import replace_text, replacing
from headrace.lab.bench.stats import (
    FIGURES,
    Group,
    Record,
    Summary,
    Target,
    median,
    ratio,
    summarize,
    wrong_length,
)
from headrace.lab.workload.work import Work

MOST_GROUPS = 40
"""Maximum number of tenants in a table; the JSON has all."""

UNSET = "unset: no targets"
"""The goodput of a run without latency targets."""

GROUP_COLUMNS = (
    *("", "requests", "failed", "prompt tokens", "cached tokens", "output tokens"),
    *("TTFT p50 ms", "TTFT p99 ms", "TPOT p50 ms", "TPOT p99 ms"),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one target over one workload: its records, their summary, and figures that the target reports."""

    target: str
    records: Sequence[Record]
    summary: Summary
    facts: Mapping[str, Any] = field(default_factory=dict)


def table(
    runs: Sequence[Run],
    title: str,
    ratios: Mapping[str, Mapping[str, float]] | None = None,
    medians: Mapping[str, Mapping[str, float]] | None = None,
) -> Table:
    """The runs side by side, with the ratio of each to the first.

    With several rounds, ``medians`` (figures) and ``ratios`` are medians over rounds, by target and figure.
    """
    slo = ", ".join(f"{name.upper()} {1000 * limit:g} ms" for name, limit in runs[0].summary.slo.items())
    shown = Table(title=f"{title}; SLO {slo}" if slo else title, title_justify="left", header_style="bold")
    shown.add_column("")
    for number, run in enumerate(runs):
        shown.add_column(run.target, justify="right")
        if number:
            shown.add_column(f"/ {runs[0].target}", justify="right", style="dim")
    for label, cells in _counts([run.summary for run in runs]):
        shown.add_row(label, *_beside(cells))
    for figure in FIGURES:
        values = [figure.read(run.summary) for run in runs]
        if medians is not None:
            values = [medians[run.target][figure.name] for run in runs]
        if all(math.isnan(value) for value in values):
            if figure.name == "goodput":
                shown.add_row(figure.label, *_beside([UNSET] * len(runs)))
            continue
        quotients = [ratio(value, values[0]) for value in values]
        if ratios is not None:
            quotients = [ratios.get(run.target, {}).get(figure.name, math.nan) for run in runs]
        shown.add_row(figure.label, *_beside([figure.shown(value) for value in values], quotients))
    for name in dict.fromkeys(name for run in runs for name in run.facts):
        shown.add_row(name.replace("_", " "), *_beside([_fact(run.facts.get(name)) for run in runs]))
    return shown


def _beside(cells: Sequence[str], quotients: Sequence[float] = ()) -> list[str]:
    """The cells of a row: a value per run, each but the first followed by its ratio."""
    row = [cells[0]]
    for number, cell in enumerate(cells[1:], start=1):
        quotient = quotients[number] if quotients else math.nan
        row += [cell, "" if math.isnan(quotient) else f"{quotient:.2f}x"]
    return row


def _counts(summaries: Sequence[Summary]) -> list[tuple[str, list[str]]]:
    return [
        ("requests (failed)", [f"{s.requests} ({s.failed})" for s in summaries]),
        ("duration s", [f"{s.seconds:.2f}" for s in summaries]),
        ("prompt tokens", [f"{s.prompt_tokens:,}" for s in summaries]),
        ("cached prompt tokens", [f"{s.cached_tokens:,}" for s in summaries]),
        ("output tokens", [f"{s.output_tokens:,}" for s in summaries]),
    ]


def group_tables(run: Run) -> list[Table]:
    """A table of the run's classes and one of its tenants; omitted if there is only one class or tenant."""
    summary = run.summary
    return [
        group_table(f"{run.target}: {title}", groups)
        for title, groups in (("classes", summary.classes), ("tenants", summary.tenants[:MOST_GROUPS]))
        if groups
    ]


def group_table(title: str, groups: Sequence[Group]) -> Table:
    """Groups of requests (tenants or classes) with their tokens and latencies."""
    shown = Table(title=title, title_justify="left", header_style="bold")
    with_slo = any(group.slo_share is not None for group in groups)
    for i, column in enumerate([*GROUP_COLUMNS, *(["within SLO"] if with_slo else [])]):
        shown.add_column(column, justify="right" if i else "left")
    for group in groups:
        cells = [
            group.name,
            f"{group.requests:,}",
            f"{group.failed:,}",
            *(f"{count:,}" for count in (group.prompt_tokens, group.cached_tokens, group.output_tokens)),
            *(milliseconds(value) for each in (group.ttft, group.tpot) for value in (each.p50, each.p99)),
        ]
        shown.add_row(*cells, *([_share(group.slo_share)] if with_slo else []))
    return shown


def _share(share: float | None) -> str:
    return "-" if share is None or math.isnan(share) else f"{100 * share:.1f} %"


def milliseconds(seconds: float) -> str:
    """Milliseconds, or a dash where nothing was measured."""
    return "-" if math.isnan(seconds) else f"{1000.0 * seconds:.1f}"


def _fact(value: Any) -> str:
    if value is None or value != value:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row per request for `lab.bench.report`; runs of one target are numbered as rounds from 1 on."""
    seen: dict[str, int] = {}
    found: list[dict[str, Any]] = []
    for run in runs:
        number = seen[run.target] = seen.get(run.target, 0) + 1
        found += [{"run": run.target, "round": number, **_row(each)} for each in run.records]
    return found


def _row(record: Record) -> dict[str, Any]:
    return {
        "request": record.id,
        "tenant": record.tenant,
        "service_class": record.service_class,
        "arrived_seconds": record.arrived,
        "ttft_seconds": record.ttft,
        "tpot_seconds": record.tpot,
        "e2e_seconds": record.e2e,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "finish_reason": record.finish_reason,
        "error": record.error,
    }


def document(
    runs: Sequence[Run], settings: Mapping[str, Any], more: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Everything needed to assess and repeat the runs, as plain values.

    ``settings`` are those of the benchmark (seeds, rounds, rates, workload); ``more`` are figures over several
    runs (ratios, bounds). Infinite and undefined numbers become null.
    """
    report: dict[str, Any] = plain(
        {
            "command": without_keys(sys.argv),
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine_facts(),
            "settings": dict(settings),
            **(more or {}),
            "runs": [
                {
                    "target": run.target,
                    "facts": dict(run.facts),
                    "summary": asdict(run.summary),
                    "records": [asdict(record) for record in run.records],
                }
                for run in runs
            ],
        }
    )
    return report


def without_keys(command: Sequence[str]) -> list[str]:
    """A command line with its API keys masked."""
    shown = list(command)
    for i, word in enumerate(shown):
        if i and shown[i - 1] == "--api-key":
            shown[i] = "***"
        elif word.startswith("--api-key="):
            shown[i] = "--api-key=***"
        else:
            shown[i] = re.sub(r"(api.key=)[^,]+", r"\1***", word)  # of a target
    return shown


def write(path: Path, report: Mapping[str, Any]) -> None:
    """Writes a report's document as JSON; creates the folder."""
    replace_text(path, json.dumps(report, indent=1, allow_nan=False) + "\n")


def plain(value: Any) -> Any:
    """Plain values for JSON; infinite and undefined numbers become null."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, float):
        return round(value, 7) if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int | bool) else str(value)


LIBRARIES = ("headrace", "torch", "transformers", "numpy", "httptools")


def machine_facts() -> dict[str, Any]:
    """Processor, cores, memory, Python and library versions, and the current load."""
    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": list(os.getloadavg()),
        "python": platform.python_version(),
        "versions": {name: version for name in LIBRARIES if (version := _version(name))},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


COLUMNS = (
    *(
        "run",
        "round",
        "request",
        "tenant",
        "service_class",
        "arrived_seconds",
        "ttft_seconds",
        "tpot_seconds",
    ),
    *("e2e_seconds", "prompt_tokens", "cached_tokens", "output_tokens", "finish_reason", "error"),
)
"""The columns; a time that a request does not have (a TTFT of a failed one) is empty."""

Row = Mapping[str, Any]


class BadExport(ValueError):
    """A file that rows cannot be written to; the message says what to do."""


def check_rows(path: Path) -> None:
    """Whether rows can be written to a file of this name.

    Raises:
        BadExport: an unknown ending, or Parquet without pyarrow.
    """
    if path.suffix not in (".csv", ".parquet"):
        raise BadExport("expected a file name that ends in .csv or .parquet")
    if path.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise BadExport("Parquet needs pyarrow: pip install pyarrow, or write a .csv file")


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Writes rows with the columns of `COLUMNS`; a field that a row lacks is empty.

    Raises:
        OSError: the file cannot be written.
    """
    with replacing(path) as file:
        if path.suffix == ".parquet":
            _write_parquet(file, rows)
        else:
            write_csv(file, COLUMNS, rows)


def write_csv(file: IO[bytes], columns: Sequence[str], rows: Sequence[Row]) -> None:
    """Writes rows as CSV in UTF-8; a column that a row lacks is empty."""
    text = TextIOWrapper(file, encoding="utf-8", newline="")
    writer = csv.DictWriter(text, columns, restval="")
    writer.writeheader()
    writer.writerows(rows)
    text.detach()


def _write_parquet(file: IO[bytes], rows: Sequence[Row]) -> None:
    import pyarrow
    from pyarrow import parquet

    columns = {name: [row.get(name) for row in rows] for name in COLUMNS}
    parquet.write_table(pyarrow.table(columns), file)


def measure(target: Target, work: Sequence[Work], slo: Mapping[str, float] | None = None) -> Run:
    """One run of one target. A response of another length than its work prescribes is an error."""
    records = [
        record
        if record.error
        else dataclasses.replace(record, error=wrong_length(each, record.output_tokens))
        for each, record in zip(work, target.run(work), strict=True)
    ]
    return Run(target.name, records, summarize(records, slo), target.facts())


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs per round, and each target's figures relative to the first target's.

    ``ratios[name]`` are those of the target ``name``: per figure, the median over rounds of the ratio within a round.
    """

    rounds: Sequence[Sequence[Run]]
    ratios: Mapping[str, Mapping[str, float]]

    def medians(self) -> dict[str, dict[str, float]]:
        """The median over rounds of each figure, by target and figure."""
        return {
            column[0].target: {
                figure.name: median([figure.read(run.summary) for run in column]) for figure in FIGURES
            }
            for column in zip(*self.rounds, strict=True)
        }

    def middle(self) -> list[Run]:
        """For each target the run whose throughput is the median (the lower one of two)."""
        runs = []
        for column in zip(*self.rounds, strict=True):
            ordered = sorted(column, key=lambda run: run.summary.output_tokens_per_second)
            runs.append(ordered[(len(ordered) - 1) // 2])
        return runs


def compare(
    targets: Sequence[Target],
    work: Sequence[Work] | Callable[[int], Sequence[Work]],
    rounds: int = 3,
    slo: Mapping[str, float] | None = None,
    finished: Callable[[int, Run], None] = lambda number, run: None,
    starting: Callable[[int, Target], None] = lambda number, target: None,
) -> Comparison:
    """Runs all targets in turn, ``rounds`` times, every second round in reverse order.

    ``work`` may be a function of the round's number: a prefix cache still holds the prompts of the last round.
    ``starting`` is called before each run, ``finished`` after it.

    Raises:
        ValueError: fewer than two targets, two targets of the same name, or no round.
    """
    names = [target.name for target in targets]
    if len(targets) < 2 or len(set(names)) < len(names) or rounds < 1:
        raise ValueError(
            f"compare needs at least one round and two targets with different names, got {names}"
        )
    done: list[list[Run]] = []
    for number in range(rounds):
        order = list(targets) if number % 2 == 0 else list(reversed(targets))
        drawn = work(number) if callable(work) else work
        runs = {}
        for target in order:
            starting(number, target)
            runs[target.name] = measure(target, drawn, slo)
            finished(number, runs[target.name])
        done.append([runs[name] for name in names])
    return Comparison(done, {name: _ratios(done, column) for column, name in enumerate(names) if column})


def _ratios(rounds: Sequence[Sequence[Run]], column: int) -> dict[str, float]:
    ratios = {}
    for figure in FIGURES:
        quotients = [
            ratio(figure.read(runs[column].summary), figure.read(runs[0].summary)) for runs in rounds
        ]
        known = [quotient for quotient in quotients if not math.isnan(quotient)]
        if known:
            ratios[figure.name] = median(known)
    return ratios
