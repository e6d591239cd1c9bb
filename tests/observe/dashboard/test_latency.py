"""Percentiles of requests."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.observe.dashboard.latency import PERCENTILES, latency, percentiles
from headrace.observe.requests import RequestSummary


def request(
    ended: float | None, why: str = "stop", first: float | None = 1.0, tokens: int = 5
) -> RequestSummary:
    return RequestSummary("a", "finished", why, "acme", "default", 8, 0, tokens, 0, 0.0, first, ended, ended)


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=200))
def test_percentiles_are_numpys(values: list[float]) -> None:
    assert percentiles(values) == pytest.approx(np.percentile(values, [100 * each for each in PERCENTILES]))


@pytest.mark.parametrize(
    "other",
    [
        request(None),
        request(10.0, why="cancelled"),
        request(10.0, why="exact cache", first=None),
        request(5.0)._replace(ended=-100.0),
    ],
    ids=["open", "cancelled", "cached", "old"],
)
def test_only_complete_recent_and_computed_requests_count(other: RequestSummary) -> None:
    assert latency([request(5.0), other], 10.0) == latency([request(5.0)], 10.0)


def test_a_single_token_has_no_time_per_token() -> None:
    shown = latency([request(5.0, tokens=1)], 10.0)
    assert (shown["requests"], shown["tpot"]) == (1, None)
    assert latency([request(5.0)], 10.0)["tpot"] == [1.0, 1.0, 1.0]
