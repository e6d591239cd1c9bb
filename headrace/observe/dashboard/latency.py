"""Percentiles of latency over the requests that ended in the last minute."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from headrace.observe.requests import RequestSummary

WINDOW_SECONDS = 60.0
PERCENTILES = (0.5, 0.95, 0.99)


def percentiles(values: Iterable[float]) -> list[float] | None:
    """p50, p95 and p99, interpolated linearly; None without values."""
    ordered = sorted(values)
    return [_at(ordered, share) for share in PERCENTILES] if ordered else None


def _at(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def latency(requests: Iterable[RequestSummary], now: float) -> dict[str, Any]:
    """TTFT, TPOT and E2E of complete requests that ended in the last `WINDOW_SECONDS`, in seconds.

    Cached responses do not count.
    """
    recent = [
        each
        for each in requests
        if each.ended is not None
        and each.complete
        and each.first is not None
        and each.ended >= now - WINDOW_SECONDS
    ]
    return {
        "requests": len(recent),
        "ttft": percentiles(each.first - each.arrived for each in recent if each.first is not None),
        "tpot": percentiles(
            (each.last - each.first) / (each.output_tokens - 1)
            for each in recent
            if each.first is not None and each.last is not None and each.output_tokens > 1
        ),
        "e2e": percentiles(each.ended - each.arrived for each in recent if each.ended is not None),
    }
