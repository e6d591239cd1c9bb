from __future__ import annotations

import asyncio
import time
from collections.abc import Generator

from headrace.core.knobs import Knobs
from headrace.core.prediction.step_curve import StepCurve
from headrace.core.prediction.step_times import StepTimes
from headrace.tuning.tuner.rehearsal import Job, Outcome, Scene, in_parts
from headrace.wiring.operations.rehearsals import Rehearsals

SCENE = Scene(0.0, 60.0, [Job(float(at), 500, 0, 20) for at in range(50)])
KNOBS = Knobs(mixed_prefill_ratio=0.7)


def learnt() -> StepCurve:
    times = StepTimes()
    for tokens in range(1, 600):
        times.observe(1 + tokens % 7, tokens, 100 * tokens, 1e-3 + 1e-4 * tokens)
    return times.curve


def ended(run: Generator[None, None, Outcome]) -> Outcome:
    while True:
        try:
            next(run)
        except StopIteration as stop:
            outcome: Outcome = stop.value
            return outcome
        time.sleep(0.001)


def test_another_process_has_the_same_outcome_and_its_loss_costs_none(monkeypatch):
    rehearsals, asked = Rehearsals(overlap=0), (SCENE, KNOBS, learnt(), 16, False)
    expected = ended(in_parts(*asked))
    with monkeypatch.context() as broken:
        broken.setattr("headrace.wiring.operations.rehearsals.PROGRAM", "headrace.nothing")
        assert ended(rehearsals.run(*asked)) == expected
    assert rehearsals._process is None
    assert ended(rehearsals.run(*asked)) == expected
    process = rehearsals._process
    assert ended(rehearsals.run(*asked)) == expected
    assert process is not None
    assert rehearsals._process is process
    asyncio.run(rehearsals.stop())
    assert process.poll() is not None
