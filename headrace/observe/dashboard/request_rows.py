"""The list of requests as rows: open requests, then ended ones, each newest first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.observe.requests import RequestSummary

COLUMNS = (
    "id",
    "state",
    "why",
    "tenant",
    "service_class",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "age_seconds",
    "ttft_seconds",
    "preemptions",
)

MOST_ROWS = 2000
"""Maximum number of rows of a snapshot; further requests are only counted."""


def request_rows(requests: Sequence[RequestSummary], now: float) -> dict[str, Any]:
    """The rows with their columns, and how many requests are not shown (``more``)."""
    return {
        "columns": COLUMNS,
        "rows": [_row(each, now) for each in requests[:MOST_ROWS]],
        "more": max(0, len(requests) - MOST_ROWS),
    }


def _row(each: RequestSummary, now: float) -> list[Any]:
    """The values in the order of `COLUMNS`."""
    until = now if each.ended is None else each.ended
    return [
        each.id,
        each.state,
        each.why,
        each.tenant,
        each.service_class,
        each.prompt_tokens,
        each.cached_tokens,
        each.output_tokens,
        round(max(0.0, until - each.arrived), 4),
        None if each.first is None else round(each.first - each.arrived, 5),
        each.preemptions,
    ]
