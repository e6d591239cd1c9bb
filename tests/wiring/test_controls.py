"""What a server reads of its engine: the answers of an engine process are those of the engine."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from headrace.core.engine import Engine
from headrace.core.knobs import Knobs
from headrace.core.prediction.step_curve import StepCost, StepCurve
from headrace.core.prediction.step_times import ENOUGH_STEPS, StepTimes
from headrace.observe.engine_series import NO_EXPERTS
from headrace.service.engine_host import EngineHost
from headrace.service.engine_process import EngineProcess
from headrace.service.packing import packed
from headrace.testing.engines import hashing_engine
from headrace.wiring.controls import EngineCounts, LocalControls, RemoteControls, RunnerCounts, answer
from tests.doubles.engine_processes import Child
from tests.doubles.services import SOON


def local(engine: Engine) -> LocalControls:
    asleep: Any = SimpleNamespace(sleep=None, wake_up=None)
    return LocalControls(engine, lambda: RunnerCounts({}, 0, {}, NO_EXPERTS), asleep)


@contextmanager
def remote(controls: LocalControls, engine: Engine) -> Iterator[RemoteControls]:
    """The controls of an engine process, which is a thread here."""
    ours, theirs = socket.socketpair()
    process = EngineProcess(ours, cast("Any", Child(-9)))
    process.counts = packed(EngineCounts, controls.counts)
    host = EngineHost(
        theirs, engine, partial(answer, controls), lambda: packed(EngineCounts, controls.counts)
    )
    thread = threading.Thread(target=host.run, daemon=True)
    thread.start()
    try:
        yield RemoteControls(process, controls.knobs, controls.overlap, controls.proposes_cached)
    finally:
        process.end()
        theirs.close()
        thread.join(SOON)


def learning_engine(steps: int) -> Engine:
    times, rng = StepTimes(StepCost(40, 5000)), random.Random(2)
    for _ in range(steps):
        rows = rng.randint(1, 40)
        tokens = rows + rng.choice((0, 0, 50, 800))
        times.observe(rows, tokens, 100 * tokens, (0.02 + 1e-4 * tokens) * rng.uniform(0.8, 1.2))
    engine = hashing_engine(times=times)[0]
    engine.times = times
    return engine


def test_measured_steps_of_a_process_are_those_of_its_engine_to_the_last_bit():
    engine = learning_engine(600)
    here = local(engine)
    with remote(here, engine) as there:
        measured = there.measured_steps()
    assert measured == here.measured_steps()
    assert measured is not None
    curve, expected = StepCurve.of(measured), StepCurve.of(cast("StepTimes", engine.times).curve.measured())
    for tokens in (1, 7, 40, 300, 5000):
        assert curve.seconds(tokens, 100 * tokens) == expected.seconds(tokens, 100 * tokens)


def test_few_steps_are_not_measured_ones_and_some_engines_learn_none():
    assert local(learning_engine(ENOUGH_STEPS - 1)).measured_steps() is None
    assert local(learning_engine(ENOUGH_STEPS)).measured_steps() is not None
    engine = hashing_engine()[0]
    with remote(local(engine), engine) as there:
        assert there.measured_steps() is None


def test_knobs_that_are_set_are_those_of_both():
    engine, knobs = learning_engine(0), Knobs(batched_tokens=99, mixed_prefill_ratio=0.3)
    with remote(local(engine), engine) as there:
        there.set_knobs(knobs)
        assert there.knobs == engine.knobs == knobs
