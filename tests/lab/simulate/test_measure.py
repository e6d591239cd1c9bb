from __future__ import annotations

import pytest

from headrace.core.events import Finished
from headrace.lab.bench.record import Record
from headrace.lab.simulate.measure import STREAM_TOKENS, batches, front_seconds, measure_steps
from headrace.lab.simulate.recorder import StepRecorder
from tests.doubles.engines import hashing_engine


def test_batches_of_all_sizes_are_run_and_each_step_is_noted():
    engine, runner = hashing_engine(num_blocks=400, max_num_seqs=6, max_model_len=128)
    engine.runner = recorder = StepRecorder(runner)
    groups = list(batches(6, 128, seed=1))
    assert [len(group) for group in groups] == [1, 2, 4, 6]
    ends = []
    step = engine.step

    def watched(now):
        events = step(now)
        ends.extend(event for event in events if isinstance(event, Finished))
        return events

    engine.step = watched
    measured = measure_steps(engine, recorder, iter(groups))
    assert len(ends) == 13
    assert {each.work.rows for each in measured} >= {1, 2, 4, 6}
    assert all(each.seconds > 0 for each in measured)
    assert sum(each.host_seconds != each.host_seconds for each in measured) == 4, "a pause before each batch"
    answers = sum(request.params.max_tokens for group in groups for request in group)
    assert sum(each.work.samples for each in measured) == answers


class Answering:
    """A server whose first token takes ``ttft`` and each further one ``tpot``."""

    name = "server"

    def __init__(self, ttft: float, tpot: float, error: str = "") -> None:
        self.ttft, self.tpot, self.error = ttft, tpot, error

    def run(self, work):
        return [
            Record(
                each.id,
                0.0,
                9.0,
                tuple(self.ttft + self.tpot * i for i in range(each.max_tokens)),
                output_tokens=each.max_tokens,
                error=self.error,
            )
            for each in work
        ]


def test_what_http_adds_is_what_a_simulation_lacks():
    request, event = front_seconds(
        Answering(0.5, 0.030), Answering(0.050, 0.02), 8, lambda work: (0.020, 0.022)
    )
    assert event == pytest.approx((0.030 - 0.022) / 8)
    assert request == pytest.approx(0.050 - 0.020 - 0.001)
    assert STREAM_TOKENS > 1


def test_it_adds_nothing_less_than_nothing_and_failures_are_told():
    assert front_seconds(Answering(0.1, 0.01), Answering(0.1, 0.01), 8, lambda work: (1.0, 1.0)) == (0.0, 0.0)
    with pytest.raises(RuntimeError, match="idle0: no"):
        front_seconds(Answering(0.1, 0.01), Answering(0.1, 0.01, "no"), 8, lambda work: (1.0, 1.0))
