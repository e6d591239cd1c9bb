from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Generator

import pytest

from headrace.core.knobs import Knobs
from headrace.core.prediction.step_curve import StepCurve
from headrace.core.prediction.step_times import StepTimes
from headrace.tuning.evaluator import EvaluatorProcess, NotEvaluated
from headrace.tuning.scheduler_model import evaluate
from headrace.tuning.traffic import Job, Outcome, Period

PERIOD = Period(0.0, 60.0, [Job(float(at), 500, 0, 20) for at in range(50)])
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


def test_another_process_has_the_same_outcome_and_is_started_again_when_it_is_lost(monkeypatch):
    evaluator, asked = EvaluatorProcess(overlap=0), (PERIOD, KNOBS, learnt(), 16, False)
    expected = ended(evaluate(*asked))
    with monkeypatch.context() as broken:
        broken.setattr("headrace.tuning.evaluator.PROGRAM", "headrace.nothing")
        with pytest.raises(NotEvaluated, match="the evaluator failed: "):
            ended(evaluator.evaluate(*asked))
    assert evaluator._process is None
    assert ended(evaluator.evaluate(*asked)) == expected
    process = evaluator._process
    assert ended(evaluator.evaluate(*asked)) == expected
    assert process is not None
    assert evaluator._process is process
    asyncio.run(evaluator.stop())
    assert process.poll() is not None


def test_a_server_does_not_import_the_model_of_the_scheduler():
    found = "import sys, headrace.tuning.live; print('headrace.tuning.scheduler_model' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", found], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
