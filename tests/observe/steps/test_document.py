"""Exported traces keep the rules of the trace-event format."""

from __future__ import annotations

import pytest

from headrace.observe.steps.book import StepBook
from headrace.observe.steps.document import ENGINE, REQUESTS, trace
from tests.observe.steps.test_book import row, stepped
from tests.observe.steps.test_timelines import lived
from tests.observe.steps.trace_events import check_nesting, check_order, check_trace


def test_a_life_is_a_track_of_nested_slices() -> None:
    made = trace((), lived().items())
    check_trace(made)
    slices = [(e["name"], e["ts"], e["dur"]) for e in made["traceEvents"] if e["ph"] == "X"]
    assert slices == [
        ("queue", 200_000, 1_000_000),
        ("prefill", 1_200_000, 2_000_000),
        ("positions 16 to 35", 1_200_000, 1_000_000),
        ("positions 36 to 39", 2_200_000, 1_000_000),
        ("decode", 3_200_000, 1_500_000),
        ("queue", 4_700_000, 500_000),
        ("prefill", 5_200_000, 1_000_000),
        ("positions 32 to 42", 5_200_000, 1_000_000),
    ]
    tokens = [e["ts"] for e in made["traceEvents"] if e["name"] == "token"]
    assert len(tokens) == 4
    check_order(tokens)


def test_steps_are_a_track_with_counters() -> None:
    book = StepBook()
    for i in range(3):
        book.fold(stepped(i, i - 0.5, ("a", row(i, 1))), i + 1.0)
    made = trace(book.records(), ())
    check_trace(made)
    steps = [e for e in made["traceEvents"] if e["ph"] == "X"]
    assert [e["name"] for e in steps] == ["step 0", "step 1", "step 2"]
    assert {e["pid"] for e in steps} == {ENGINE} != {REQUESTS}
    held = [e["args"]["value"] for e in made["traceEvents"] if e["name"] == "blocks_held"]
    assert held == [3, 3, 3]


def test_nothing_is_a_trace_too() -> None:
    check_trace(trace((), ()))


def test_slices_that_overlap_would_be_seen() -> None:
    with pytest.raises(AssertionError):
        check_nesting([{"ts": 0, "dur": 10}, {"ts": 5, "dur": 10}])
