from __future__ import annotations

import dataclasses
import json
import random
from dataclasses import replace

import pytest

from headrace.core.events import Finished
from headrace.lab.bench.stats import Record
from headrace.lab.calibration import (
    BadCalibration,
    Calibrated,
    Calibration,
    FrontMeasure,
    FrontSeconds,
    Measured,
    StepRecorder,
    features,
    groups,
    measure_steps,
)
from headrace.lab.simulate.runner import StepWork
from headrace.testing.engines import hashing_engine

TOKENS = (2e-4, 2e-5, 6e-5, 4e-5, 5e-5)
DEVICE = (2e-3, 3e-5, *TOKENS, 5e-9, 2e-8, 1e-4)
HOST = (1e-4, 2e-6)


def steps(count: int = 600, noise: float = 0.0, disturbed: float = 0.0) -> list[Measured]:
    """Steps that take what the coefficients say, some with noise, some far longer."""
    rng = random.Random(4)
    measured = []
    for _ in range(count):
        rows = rng.randint(1, 64)
        prompts = rng.choice((0, 0, rng.randint(1, 4)))
        tokens = rows + prompts * rng.randint(10, 500)
        read = rows * rng.randint(10, 4000)
        contexts = read + (tokens - rows) * rng.randint(10, 2000)
        work = StepWork(rows, tokens, contexts, read, rows - rng.randint(0, min(prompts, rows - 1)))
        seconds = sum(c * f for c, f in zip(DEVICE, features(work), strict=True))
        seconds *= 1.0 + rng.gauss(0.0, noise)
        if rng.random() < disturbed:
            seconds *= rng.uniform(3, 30)
        measured.append(Measured(work, seconds, HOST[0] + HOST[1] * rows))
    return measured


CALIBRATION = Calibration(
    *(*DEVICE[:2], TOKENS, *DEVICE[-3:], *HOST, 0.01, 0.02),
    model="m",
    machine="a machine",
    kind="cpu",
    dtype="bfloat16",
    kernels="cpp",
    kv_tokens=4096,
    max_model_len=2048,
    fixed_tokens=8.0,
    context_tokens=900.0,
    steps=600,
    front_request=0.004,
    front_step=1e-3,
    front_event=1e-5,
    front_busy=0.003,
)


def test_a_calibrated_device_takes_what_was_measured():
    device = Calibrated(CALIBRATION)
    for each in steps(20):
        assert device.seconds(each.work) == pytest.approx(each.seconds)
        front = 1e-3 + 1e-5 * each.work.samples if each.work.samples else 0.0
        assert device.host_seconds(each.work) == pytest.approx(each.host_seconds + front)
    assert device.host_seconds(StepWork(4, 40, 4, 4, 0)) == pytest.approx(HOST[0] + 4 * HOST[1])


def test_each_range_of_tokens_costs_its_own():
    device = Calibrated(CALIBRATION)
    seconds = [device.seconds(StepWork(1, tokens, 0, 0, 0)) for tokens in (8, 9, 32, 33, 600, 601)]
    assert seconds[1] - seconds[0] == pytest.approx(TOKENS[1])
    assert seconds[3] - seconds[2] == pytest.approx(TOKENS[2])
    assert seconds[5] - seconds[4] == pytest.approx(TOKENS[4])


def test_a_slower_machine_takes_longer_for_everything():
    device, slower = Calibrated(CALIBRATION), Calibrated(CALIBRATION.at(1.25))
    for each in steps(20):
        assert slower.seconds(each.work) == pytest.approx(1.25 * device.seconds(each.work))
        assert slower.host_seconds(each.work) == pytest.approx(1.25 * device.host_seconds(each.work))
    once, twice = (vars(each.front()) for each in (CALIBRATION, CALIBRATION.at(2.0)))
    assert twice == {name: 2 * seconds for name, seconds in once.items()}
    assert once["busy_seconds"] == 0.003


def test_a_calibration_is_a_file(tmp_path):
    path = tmp_path / "new" / "c.json"
    CALIBRATION.write(path)
    assert Calibration.read_file(path) == CALIBRATION
    assert CALIBRATION.front().request_seconds == 0.004


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": None}, "step must be float"),
        ({"row": -1.0}, "row must be float"),
        ({"kv_tokens": 1.5}, "kv_tokens must be int"),
        ({"tokens": [1e-5, 1e-5]}, "tokens must be tuple"),
        ({"tokens": [1e-5, 1e-5, "no", 1e-5, 1e-5]}, "tokens must be tuple"),
        ({"speed": 1}, "is not a calibration"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path, change, message):
    path = tmp_path / "c.json"
    path.write_text(json.dumps(dataclasses.asdict(CALIBRATION) | change))
    with pytest.raises(BadCalibration, match=message):
        Calibration.read_file(path)


def test_a_file_that_lacks_a_field_or_is_no_json_is_refused(tmp_path):
    path = tmp_path / "c.json"
    path.write_text('{"model": "m"}')
    with pytest.raises(BadCalibration, match="missing"):
        Calibration.read_file(path)
    path.write_text("model: m")
    with pytest.raises(BadCalibration, match="is not valid JSON"):
        Calibration.read_file(path)


def test_prompts_come_beside_answers_and_each_step_is_noted():
    engine, runner = hashing_engine(num_blocks=400, max_num_seqs=6, max_model_len=128)
    engine.runner = recorder = StepRecorder(runner)
    loops = list(groups(6, 128, seed=1))
    assert [each.open_at_once for each in loops] == [6, 1, 2, 4, 6]
    assert [each.open_at_once for each in groups(6, 128, seed=1, turn=1)] == [6, 6, 4, 2, 1]
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
    assert len(beside) > 5, "steps with a prompt and answers"
    assert all(each.seconds > 0 for each in measured)
    assert sum(each.host_seconds != each.host_seconds for each in measured) == 4, "a pause before each loop"
    answers = [request.params.max_tokens for each in loops[1:] for request in each.requests]
    assert sum(each.work.samples for each in measured) == sum(answers), (
        "all but the first loop's, which warms up"
    )


class Answering:
    """Answers whose first token takes ``ttft``, and each further one ``step`` and ``event`` for each stream. In
    a full batch each request takes ``stall`` more; the second token of a request that
    is alone takes ``wake`` more."""

    name = "server"

    def __init__(
        self,
        ttft: float,
        step: float,
        event: float = 0.0,
        error: str = "",
        stall: float = 0.0,
        token: float = 0.0,
        wake: float = 0.0,
    ) -> None:
        self.ttft, self.step, self.event, self.error = ttft, step, event, error
        self.stall, self.token, self.wake = stall, token, wake

    def run(self, work):
        kind = work[0].id.rstrip("0123456789")
        longest = max(each.max_tokens for each in work)
        busy = sum(each.id.startswith("busy") for each in work)
        stalled = busy * self.stall / (longest - 1)
        times = [self.ttft]
        while len(times) < longest:
            reported = 1 if kind == "lone" else sum(each.max_tokens > len(times) for each in work)
            times.append(times[-1] + self.step + stalled + self.event * reported)
            if kind == "lone" and len(times) == 2:
                times[-1] += self.wake
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


class Steps:
    """The steps of a fit."""

    def __init__(self, prompt: float) -> None:
        self._prompt = prompt

    def prompt_seconds(self, tokens):
        return self._prompt

    def decode_seconds(self, rows, context):
        return 0.010 + 0.0005 * rows


ENGINE = Answering(0.020, 0.010, 0.0005)


def measured(server, prompt=0.020, streams=8, engine=ENGINE):
    front = FrontMeasure(server, engine, streams, 1024)
    front.turn(Steps(prompt))
    return front.seconds(Steps(prompt))


def test_what_http_adds_is_what_the_engine_alone_lacks():
    server = Answering(0.023, 0.013, 0.0007)
    found = measured(server)
    assert found.step == pytest.approx(0.003)
    assert found.event == pytest.approx(0.0002)
    assert measured(server, streams=1).step == pytest.approx(0.0032), "one stream tells no more"


def test_a_machine_that_has_become_slower_since_its_steps_were_measured_adds_nothing_to_a_step():
    slow = Answering(0.020, 0.013, 0.0007)
    found = measured(slow, engine=slow)
    assert (found.step, found.event, found.wake) == pytest.approx((0.0, 0.0, 0.0))
    assert measured(Answering(0.020, 0.014, 0.0007), engine=slow).step == pytest.approx(0.001)


def test_a_request_costs_what_its_first_token_is_late_by_and_what_it_delays_streams():
    found = measured(Answering(0.060, 0.010, 0.0005))
    assert (found.request, found.busy) == (pytest.approx(0.040), pytest.approx(0.040))
    found = measured(Answering(0.024, 0.010, 0.0005, stall=0.003))
    assert (found.request, found.stall) == (pytest.approx(0.004), pytest.approx(0.003 + 0.004 / 16))
    found = measured(Answering(0.022, 0.010, 0.0005, stall=0.003))
    assert (found.request, found.stall) == (pytest.approx(0.002), pytest.approx(0.002)), (
        "no more than it costs"
    )
    longer = measured(Answering(0.060, 0.010, 0.0005, token=1e-4))
    assert (longer.request, longer.token) == (pytest.approx(0.040), pytest.approx(1e-4))
    assert longer.busy == pytest.approx(0.040)
    slower = measured(Answering(0.060, 0.012, 0.0006))
    assert slower.request == pytest.approx(0.060 - 0.020 - slower.step - slower.event)


def test_what_a_lone_request_takes_longer_than_a_stream_is_waking_up():
    assert measured(Answering(0.020, 0.012, 0.0006, wake=0.005)).wake == pytest.approx(0.005)


class OneByOne(Answering):
    """Answers lone requests one after the other: each waits for those before it."""

    def run(self, work):
        if not work[0].id.startswith("lone"):
            return super().run(work)
        free, records = 0.0, []
        for each in work:
            times = [max(free, each.arrival) + self.ttft]
            while len(times) < each.max_tokens:
                times.append(times[-1] + self.step + self.event)
            free = times[-1]
            records.append(Record(each.id, each.arrival, free, tuple(times), output_tokens=each.max_tokens))
        return records


def test_requests_of_a_slow_model_do_not_wait_for_each_other():
    assert measured(OneByOne(1.010, 0.010, 0.0005), 1.0).request == pytest.approx(0.010)


def test_it_adds_no_negative_times_and_reports_failures():
    assert measured(Answering(0.01, 0.009)) == FrontSeconds()
    with pytest.raises(RuntimeError, match="0: no"):
        measured(Answering(0.1, 0.01, error="no"))


class Dividing(Answering):
    """An engine that divides prompts as it has learned to: long ones beside streams take half a second more."""

    def run(self, work):
        records = super().run(work)
        if not work[0].id.startswith("stream"):
            return records
        late = (0.5 * (len(each.prompt) > 100) for each in work)
        return [
            replace(record, token_seconds=tuple(time + more for time in record.token_seconds))
            for record, more in zip(records, late, strict=True)
        ]


def test_how_a_server_divides_long_prompts_is_no_cost_of_its_requests():
    assert measured(Dividing(0.060, 0.010, 0.0005)).busy == pytest.approx(0.040)
