"""The figures that runs are compared by: names, where a summary has them, and their format in tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from headrace.lab.bench.stats import Summary


class Figure(NamedTuple):
    """One number of a run. ``name`` is its key in reports (times in seconds). Tables show it under ``label``,
    multiplied by ``scale`` and with ``digits`` decimals."""

    name: str
    label: str
    read: Callable[[Summary], float]
    scale: float = 1.0
    digits: int = 1

    def shown(self, value: float) -> str:
        """A value as a cell of a table."""
        return "-" if math.isnan(value) else f"{self.scale * value:,.{self.digits}f}"


def _latencies() -> list[Figure]:
    figures = []
    for quantity in ("ttft", "tpot", "itl", "e2e"):
        for percentile in ("p50", "p95", "p99"):

            def read(summary: Summary, quantity: str = quantity, percentile: str = percentile) -> float:
                value: float = getattr(getattr(summary, quantity), percentile)
                return value

            label = f"{quantity.upper()} {percentile} ms"
            figures.append(Figure(f"{quantity}_{percentile}", label, read, 1000.0))
    return figures


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


FIGURES: Sequence[Figure] = (
    Figure("output_tokens_per_second", "output tokens/s", lambda s: s.output_tokens_per_second),
    Figure("total_tokens_per_second", "total tokens/s", lambda s: s.total_tokens_per_second),
    Figure("requests_per_second", "requests/s", lambda s: s.requests_per_second, digits=2),
    *_latencies(),
    Figure("goodput", "goodput requests/s", lambda s: _or_nan(s.goodput), digits=2),
    Figure("slo_share", "requests within SLO %", lambda s: _or_nan(s.slo_share), 100.0),
    Figure("fairness", "Jain index of tenants", lambda s: _or_nan(s.fairness), digits=3),
)
"""All figures in the order of a table's rows; tables omit figures that no run has."""


def ratio(value: float, base: float) -> float:
    """A figure divided by the baseline's; NaN if either is undefined or the baseline is 0."""
    return value / base if base > 0 and not math.isnan(value) else math.nan
