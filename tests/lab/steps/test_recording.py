"""Steps of recorded traces: random lives of the core, and their tables."""

from __future__ import annotations

import pytest

from headrace.lab.replay.trace import read_trace
from headrace.wiring.step_documents import RecordedSteps, recorded_steps, recorded_trace
from tests.lab.replay.recorded import record_life
from tests.observe.steps.trace_events import check_order, check_trace


@pytest.mark.parametrize("seed", range(6))
def test_random_lives_are_films_and_traces(seed, tmp_path, monkeypatch):
    path = tmp_path / "trace.jsonl"
    _, compose = record_life(seed, path, monkeypatch)
    found = RecordedSteps(read_trace(path), compose)
    assert found.divergence is None
    shown = recorded_steps(found)
    numbers = [step["step"] for step in shown["steps"]]
    assert numbers == sorted(set(numbers))
    assert numbers
    check_order([time for step in shown["steps"] for time in (step["began"], step["ended"])])
    for step in shown["steps"]:
        assert step["memory"]["held"] == sum(step["memory"]["cells"].count(letter) for letter in "uks")
        assert len(step["queue"]) <= step["waiting"] + len(step["rows"])
    check_trace(recorded_trace(found))


def test_a_range_of_steps(tmp_path, monkeypatch):
    path = tmp_path / "trace.jsonl"
    _, compose = record_life(1, path, monkeypatch)
    trace = read_trace(path)
    every = RecordedSteps(trace, compose).records
    part = RecordedSteps(trace, compose, first=4, last=9)
    assert 0 < len(part.records) <= 6
    assert {step.step for step in part.records} <= {step.step for step in every}
    assert not part.cut
    cut = RecordedSteps(trace, compose, most=3)
    assert cut.cut
    assert [step.step for step in cut.records] == [step.step for step in every[: len(cut.records)]]
