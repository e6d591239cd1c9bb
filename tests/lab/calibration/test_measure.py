from __future__ import annotations

import pytest

from headrace.core.events import Finished
from headrace.lab.bench.record import Record
from headrace.lab.calibration.measure import front_seconds, groups, measure_steps
from headrace.lab.calibration.recorder import StepRecorder
from headrace.testing.engines import hashing_engine


def test_prompts_come_beside_answers_and_each_step_is_noted():
    engine, runner = hashing_engine(num_blocks=400, max_num_seqs=6, max_model_len=128)
    engine.runner = recorder = StepRecorder(runner)
    loops = list(groups(6, 128, seed=1))
    assert [each.open_at_once for each in loops] == [6, *(1, 2, 4, 6, 6, 4, 2, 1) * 2]
    requests = [request for each in loops for request in each.requests]
    assert len({request.id for request in requests}) == len(requests)
    ends, most = [], 0
    step = engine.step

    def watched(now):
        nonlocal most
        most = max(most, engine.scheduler.num_running + engine.scheduler.num_waiting)
        events = step(now)
        ends.extend(event for event in events if isinstance(event, Finished))
        return events

    engine.step = watched
    measured = measure_steps(engine, recorder, loops, engine.reset_prefix_cache)
    assert len(ends) == len(requests)
    assert most == 6
    assert {each.work.rows for each in measured} == {1, 2, 3, 4, 5, 6}
    beside = [each.work for each in measured if each.work.tokens > each.work.rows > 1]
    assert len(beside) > 20, "steps with a prompt and answers"
    assert all(each.seconds > 0 for each in measured)
    assert sum(each.host_seconds != each.host_seconds for each in measured) == 16, "a pause before each loop"
    answers = [request.params.max_tokens for each in loops[1:] for request in each.requests]
    assert sum(each.work.samples for each in measured) == sum(answers), (
        "all but the first loop's, which warms up"
    )


class Answering:
    """Answers whose first token takes ``ttft``, and each further one ``step`` and ``event`` for each stream: ``prompt``
    where they are of many lengths. Each visit takes ``stall`` from the streams beside it."""

    name = "server"

    def __init__(
        self,
        ttft: float,
        step: float,
        event: float = 0.0,
        prompt: float = 0.0,
        error: str = "",
        stall: float = 0.0,
        token: float = 0.0,
    ) -> None:
        self.ttft, self.step, self.event, self.prompt, self.error = ttft, step, event, prompt, error
        self.stall, self.token = stall, token

    def run(self, work):
        longest = max(each.max_tokens for each in work)
        lengths = {each.max_tokens for each in work}
        alike = len(lengths) == 1 or lengths == {2, longest}
        visits = sum(each.max_tokens == 2 < longest for each in work)
        stalled = visits * self.stall / (longest - 1)
        times = [self.ttft]
        while len(times) < longest:
            told = sum(each.max_tokens > len(times) for each in work)
            times.append(times[-1] + self.step + stalled + (self.event if alike else self.prompt) * told)
        return [
            Record(
                each.id,
                0.0,
                times[each.max_tokens - 1],
                tuple(time + self.token * len(each.prompt) for time in times[: each.max_tokens]),
                output_tokens=each.max_tokens,
                error=self.error,
            )
            for each in work
        ]


ALONE = Answering(0.020, 0.010, 0.0005, 0.0005)


def added(server, streams=8):
    return front_seconds(server, ALONE, streams, 1024, lambda tokens: 0.020)


def test_what_http_adds_is_what_the_engine_alone_lacks():
    server = Answering(0.023, 0.013, 0.0007, 0.0015)
    found = added(server)
    assert found.step == pytest.approx(0.003)
    assert found.event == pytest.approx(0.0002)
    assert found.prompt == pytest.approx(0.001, rel=0.1), "the first tokens are told in no time here"
    assert added(server, 1).step == pytest.approx(0.0032), "one stream tells no more"


def test_a_request_costs_what_its_first_token_is_late_by_and_what_it_delays_streams():
    assert added(Answering(0.060, 0.010, 0.0005, 0.0005)).request == pytest.approx(0.040)
    found = added(Answering(0.020, 0.010, 0.0005, 0.0005, stall=0.003))
    assert found.stall == pytest.approx(0.003)
    assert found.request == found.step == found.token == 0.0
    longer = added(Answering(0.060, 0.010, 0.0005, 0.0005, token=1e-4))
    assert (longer.request, longer.token) == (pytest.approx(0.040), pytest.approx(1e-4))
    slower = added(Answering(0.060, 0.012, 0.0006, 0.0006))
    assert slower.request == pytest.approx(0.060 - 0.020 - slower.step - slower.event)


class OneByOne(Answering):
    """Answers visits one after the other: each waits for those before it."""

    def run(self, work):
        if any(each.max_tokens > 2 for each in work):
            return super().run(work)
        free, records = 0.0, []
        for each in work:
            first = max(free, each.arrival) + self.ttft
            free = first + self.step
            records.append(Record(each.id, each.arrival, free, (first, free), output_tokens=2))
        return records


def test_requests_of_a_slow_model_do_not_wait_for_each_other():
    server = OneByOne(1.010, 0.010, 0.0005, 0.0005)
    found = front_seconds(server, Answering(1.0, 0.010, 0.0005, 0.0005), 8, 1024, lambda tokens: 1.0)
    assert found.request == pytest.approx(0.010)


def test_it_adds_nothing_less_than_nothing_and_failures_are_told():
    assert added(Answering(0.01, 0.009)) == (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    with pytest.raises(RuntimeError, match="visit0: no"):
        added(Answering(0.1, 0.01, error="no"))
