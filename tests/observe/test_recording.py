from __future__ import annotations

import dataclasses

import pytest

from headrace.core.engine import Engine
from headrace.core.events import Evicted, Finished
from headrace.core.knobs import Knobs
from headrace.core.plan import StepOutput
from headrace.core.request import FinishReason, Request, SamplingParams
from headrace.observe.recording import RecordedEngine
from headrace.observe.trace_file import (
    Background,
    Cancelled,
    Drained,
    Outcome,
    Raised,
    Reset,
    Spent,
    Submitted,
    Took,
    Turned,
)
from headrace.testing.engines import hashing_engine


def recorded_engine(**more):
    moments = []
    plain, runner = hashing_engine(**more)
    clock = iter(range(1000))
    parts = (plain.scheduler, plain.runner, plain._events, plain.knobs, plain.overlap)
    return RecordedEngine(*parts, moments.append, clock=lambda: next(clock)), runner, moments


def test_every_input_is_recorded_before_it_is_applied():
    engine, _, moments = recorded_engine()
    request = Request("r", (1, 2, 3), SamplingParams(max_tokens=4))
    engine.submit(request, 0.5)
    engine.step(1.0)
    engine.cancel("r", FinishReason.CANCELLED, 1.5)
    events = engine.step(2.0)
    assert [type(moment) for moment in moments] == [Submitted, Took, Cancelled, Took]
    assert moments[0] == Submitted(request, 0.5)
    assert moments[2] == Cancelled("r", FinishReason.CANCELLED, 1.5)
    assert moments[1][:3] == (1.0, 1, Outcome({}, {}, {}))
    assert moments[3].outcome is None  # nothing was launched, nothing collected
    assert moments[3].events == tuple(events)
    assert isinstance(events[0], Finished)


def test_failures_and_scores_are_recorded_by_shape():
    engine, runner, moments = recorded_engine()
    engine.submit(Request("bad", (1,), SamplingParams(max_tokens=4)), 0.0)
    runner.poison.add("bad")
    engine.step(0.0)
    assert list(moments[-1].outcome.failures) == [0]


def test_knobs_are_recorded_when_they_change():
    engine, _, moments = recorded_engine()
    engine.step(0.0)
    engine.knobs = dataclasses.replace(engine.knobs, batched_tokens=7)
    engine.step(1.0)
    engine.step(2.0)
    assert [type(moment) for moment in moments] == [Took, Turned, Took, Took]
    assert moments[1] == Turned(Knobs(batched_tokens=7))
    engine.knobs = dataclasses.replace(engine.knobs, queue_patience=4.0)
    engine.submit(Request("r", (1,), SamplingParams(max_tokens=1)), 3.0)
    assert [type(moment) for moment in moments[4:]] == [
        Turned,
        Submitted,
    ]  # it may decide where the request waits


def test_the_time_of_other_work_is_recorded():
    engine, _, moments = recorded_engine()
    engine.beside(lambda room: 0.25)
    assert moments == [Spent(0.25)]


def test_the_beginning_and_the_end_of_work_in_the_background_are_recorded():
    engine, _, moments = recorded_engine()
    engine.background(1)
    engine.background(-1)
    assert moments == [Background(1), Background(-1)]
    assert engine.scheduler.other_work.background == 0


def test_a_reset_and_events_taken_between_steps_are_recorded():
    engine, _, moments = recorded_engine()
    engine.submit(Request("r", (1, 2, 3, 4, 5), SamplingParams(max_tokens=1)), 0.0)
    engine.step(0.0)
    engine.reset_prefix_cache()
    taken = engine.take_events()
    assert all(isinstance(event, Evicted) for event in taken)
    assert moments[-2:] == [Reset(lower=True), Drained(tuple(taken))]
    assert not engine.take_events()
    assert len(moments) == 4


def test_a_step_that_ends_the_engine_is_recorded_and_raised():
    engine, runner, moments = recorded_engine()
    engine.submit(Request("r", (1, 2)), 0.0)
    runner.pages.clear()
    with pytest.raises(IndexError):
        engine.step(3.0)
    assert moments[-1].now == 3.0
    assert isinstance(moments[-1], Raised)
    assert moments[-1].error.startswith("IndexError: ")


def test_every_way_into_an_engine_is_recorded():
    """A new public method of the engine must be decided on: recorded, or one that only looks."""
    only_look = {
        "wake_at",
        "check_consistency",
        "estimate_start",
        "save_cache",
        "retain",  # sessions are off while a trace is recorded
        "set_tenant_weights",  # `wiring.reload` does not call it while a trace is recorded
        "set_kv_bounds",  # refused with a recorded trace, as are the next three
        "set_class_shares",
        "sleep",
        "wake_up",
    }  # the last of them when all has happened
    ways = {name for name, value in vars(Engine).items() if callable(value) and not name.startswith("_")}
    reported = {name for name, value in vars(RecordedEngine).items() if callable(value)}
    assert ways - reported == only_look


def test_all_runner_outputs_are_recorded_or_withheld():
    # in shape; step numbers follow from the plans
    reported = {"tokens", "prompt_logprobs", "failures", "arrivals", "broken_off"}
    assert {*StepOutput._fields} == {*reported, "step", "logprobs"}
