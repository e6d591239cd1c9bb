"""Differences of readings."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.observe.readings import (
    PERCENTILES,
    WINDOW_SECONDS,
    Readings,
    latency,
    percentiles,
    read,
)
from headrace.observe.requests import RequestSummary
from headrace.observe.work import Peaks
from tests.observe.dashboard.stories import Story


def readings(story: Story, *times: float) -> Readings:
    kept, of = Readings(), story.folds
    for now in times:
        kept.add(read(of.metrics, of.cost.ledger, of.work, story.loop, now))
    return kept


def test_the_window_keeps_its_length_whatever_the_pace() -> None:
    for pace in (0.25, 1.0, 2.5):
        kept = readings(Story(), *(pace * step for step in range(60)))
        span = kept.span()
        assert span is not None
        assert WINDOW_SECONDS <= span.seconds < WINDOW_SECONDS + pace


def test_two_readings_at_one_time_are_no_span() -> None:
    assert readings(Story(), 1.0, 1.0).span() is None


def test_a_step_that_lasts_the_whole_span_computes() -> None:
    span = readings(Story(), 0.0).span()
    assert span is None
    story = Story()
    story.answer("a", 0.0)
    first = read(*(story.folds.metrics, story.folds.cost.ledger, story.folds.work, 0.0, 3.0))
    kept = Readings()
    kept.add(first)
    kept.add(first._replace(at=4.0))
    later = kept.span()
    assert later is not None
    assert later.shares() == {"computing": 1.0, "idle": 0.0, "overhead": 0.0}


def test_utilization_is_known_where_the_peak_is() -> None:
    story = Story()
    kept = readings(story, 0.0)
    story.answer("a", 0.0)
    of = story.folds
    kept.add(read(of.metrics, of.cost.ledger, of.work, 0.0, 3.0))
    span = kept.span()
    assert span is not None
    done = of.work.done()
    assert span.utilization(Peaks()) == (None, None)
    assert span.utilization(Peaks(flops=done.flops)) == (pytest.approx(1 / 3), None)
    assert span.utilization(Peaks(0.0, done.bytes)) == (None, pytest.approx(1 / 3))
    assert span.prefill_share() == pytest.approx(1 / 3)


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
