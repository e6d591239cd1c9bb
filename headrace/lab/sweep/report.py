"""Results of a sweep: a table per axis, a sentence per knee, JSON, and rows for CSV."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from headrace.files import replacing
from headrace.lab import export
from headrace.lab.sweep.knee import Knee, knee
from headrace.lab.sweep.points import Point, lines
from headrace.lab.sweep.trials import Axis

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


def tables(points: Sequence[Point], title: str) -> list[Table]:
    """One table per axis: policies side by side, then the roofline and the memory of the first policy."""
    return [_table(axis, curves, title) for axis, curves in lines(points).items()]


def _table(axis: Axis, curves: Mapping[str, Sequence[Point]], title: str) -> Table:
    shown = Table(title=f"{axis.words}: {title}", title_justify="left", header_style="bold")
    shown.add_column(axis.words, justify="right")
    for policy in curves:
        for column in ("tokens/s", "TTFT p50 ms", "TPOT p50 ms", "ITL p99 ms"):
            shown.add_column(f"{policy} {column}", justify="right")
    shown.add_column("roofline tokens/s", justify="right")
    shown.add_column("memory MiB", justify="right")
    for value in sorted({each.trial.value for curve in curves.values() for each in curve}):
        row, known = [f"{value}"], None
        for curve in curves.values():
            at = next((each for each in curve if each.trial.value == value), None)
            known = known or at
            row += ["-"] * 4 if at is None else _cells(at)
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
    ]


def document(points: Sequence[Point]) -> dict[str, Any]:
    """Points and knees as plain values, in seconds and bytes."""
    return {
        "points": rows(points),
        "knees": [
            {"axis": axis.value, "policy": policy, **each._asdict(), "plateau": each.found}
            for (axis, policy), each in knees(points).items()
        ],
    }


def rows(points: Sequence[Point]) -> list[dict[str, Any]]:
    """One row per point."""
    return [
        {
            "axis": each.trial.axis.value,
            "value": each.trial.value,
            "policy": each.trial.policy,
            **{name: value for name, value in each._asdict().items() if name != "trial"},
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
