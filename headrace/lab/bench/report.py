"""What a run says at its end: a table for the eye, JSON for whoever repeats it."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table

from headrace.lab.bench.machine import machine_facts
from headrace.lab.bench.record import Record
from headrace.lab.bench.stats import Group, Spread, Summary

SPREADS = ("ttft", "tpot", "itl", "e2e")

MOST_GROUPS = 40
"""Tenants shown in a table; the JSON has all."""


@dataclass(frozen=True, slots=True)
class Run:
    """One target's run over one workload: what was seen, its figures, and what the target says itself."""

    target: str
    records: Sequence[Record]
    summary: Summary
    facts: Mapping[str, Any] = field(default_factory=dict)


def table(runs: Sequence[Run], title: str) -> Table:
    """The runs side by side."""
    shown = Table(title=title, title_justify="left", header_style="bold")
    shown.add_column("")
    for run in runs:
        shown.add_column(run.target, justify="right")
    for label, cells in _rows([run.summary for run in runs]):
        shown.add_row(label, *cells)
    for name in dict.fromkeys(name for run in runs for name in run.facts):
        shown.add_row(name.replace("_", " "), *(_fact(run.facts.get(name)) for run in runs))
    return shown


def _rows(summaries: Sequence[Summary]) -> list[tuple[str, list[str]]]:
    rows = [
        ("requests (failed)", [f"{s.requests} ({s.failed})" for s in summaries]),
        ("duration s", [f"{s.seconds:.2f}" for s in summaries]),
        ("output tok/s", [f"{s.output_tokens_per_second:.1f}" for s in summaries]),
        ("total tok/s", [f"{s.total_tokens_per_second:.1f}" for s in summaries]),
        ("requests/s", [f"{s.requests_per_second:.2f}" for s in summaries]),
        ("output tokens", [str(s.output_tokens) for s in summaries]),
        ("cached prompt tokens", [f"{s.cached_tokens} of {s.prompt_tokens}" for s in summaries]),
    ]
    for name in SPREADS:
        spreads: list[Spread] = [getattr(s, name) for s in summaries]
        if any(s.count for s in spreads):
            label = f"{name.upper()} ms p50 / p95 / p99"
            rows.append((label, [f"{_ms(s.p50)} / {_ms(s.p95)} / {_ms(s.p99)}" for s in spreads]))
    if slo := summaries[0].slo:
        bounds = " ".join(f"{name}≤{limit:g}s" for name, limit in slo.items())
        rows.append((f"goodput req/s ({bounds})", [f"{s.goodput or 0.0:.2f}" for s in summaries]))
        rows.append(("share within it", [_share(s.slo_share) for s in summaries]))
    if any(s.fairness is not None for s in summaries):
        rows.append(("Jain index of tenants", [_fact(s.fairness) for s in summaries]))
    return rows


def group_tables(run: Run) -> list[Table]:
    """What each class and each tenant got of a run; no table where there is one of them."""
    summary = run.summary
    return [
        _group_table(f"{run.target}: {title}", groups, bool(summary.slo))
        for title, groups in (("classes", summary.classes), ("tenants", summary.tenants[:MOST_GROUPS]))
        if groups
    ]


def _group_table(title: str, groups: Sequence[Group], with_slo: bool) -> Table:
    shown = Table(title=title, title_justify="left", header_style="bold")
    columns = [
        "",
        "requests (failed)",
        "prompt",
        "cached",
        "output",
        "TTFT ms p50 / p99",
        "TPOT ms p50 / p99",
    ]
    for i, column in enumerate([*columns, *(["within SLO"] if with_slo else [])]):
        shown.add_column(column, justify="right" if i else "left")
    for group in groups:
        cells = [
            group.name,
            f"{group.requests} ({group.failed})",
            *(str(count) for count in (group.prompt_tokens, group.cached_tokens, group.output_tokens)),
            *(f"{_ms(s.p50)} / {_ms(s.p99)}" for s in (group.ttft, group.tpot)),
        ]
        shown.add_row(*cells, *([_share(group.slo_share)] if with_slo else []))
    return shown


def _share(share: float | None) -> str:
    return "-" if share is None or math.isnan(share) else f"{share:.1%}"


def _ms(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{1000.0 * seconds:.1f}"


def _fact(value: Any) -> str:
    if value is None or value != value:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def document(
    runs: Sequence[Run], settings: Mapping[str, Any], more: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Everything that is needed to judge and to repeat the runs, as plain values.

    ``settings`` are the benchmark's own (seeds, rounds, rates, workload); ``more`` are figures over several
    runs (ratios, bounds). Infinite and undefined numbers become null, since JSON has none.
    """
    told: dict[str, Any] = plain(
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
    return told


def without_keys(command: Sequence[str]) -> list[str]:
    """A command line with the API keys in it hidden, for reports that are passed on."""
    shown = list(command)
    for i, word in enumerate(shown):
        shown[i] = "***" if i and shown[i - 1] == "--api-key" else re.sub(r"(api.key=)[^,]+", r"\1***", word)
    return shown


def write(path: Path, told: Mapping[str, Any]) -> None:
    """Writes a report's document as JSON, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(told, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def plain(value: Any) -> Any:
    """Plain values for JSON, which has no infinite or undefined numbers: those become null."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, float):
        return round(value, 7) if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int | bool) else str(value)
