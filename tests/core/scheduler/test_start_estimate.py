""""""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.engine import Engine
from headrace.core.events import Admitted
from headrace.core.prediction.latest_start import LatestStarts
from headrace.core.prediction.output_lengths import LengthPredictor
from headrace.core.prediction.step_curve import StepCost
from headrace.core.prediction.step_times import StepTimes
from headrace.core.queueing.fair_queue import FairQueue, TenantQueue
from headrace.core.request import FinishReason, Request, SamplingParams
from headrace.core.scheduler.start_estimate import (
    Batch,
    Forecast,
    Forecaster,
    StartEstimate,
    WorkAhead,
    estimate_fields,
)
from headrace.core.tenancy.fair_share import ShareLedger
from headrace.core.tenancy.tenants import CLASSES
from headrace.testing.engines import Record, hashing_engine
from tests.doubles.scenes import request, step

STEP_SECONDS = 0.01


def certain(name: str, output: int = 20, **fields) -> Request:
    """A request whose answer has a length that is known beforehand."""
    return request(name, 8, params=SamplingParams(max_tokens=output, ignore_eos=True), **fields)


def fair(weights: dict[str, float] | None = None, max_num_seqs: int = 1) -> Engine:
    predictions = LatestStarts(
        StepTimes(StepCost(4, 512)), LengthPredictor(128), {each.name: each for each in CLASSES}
    )
    queue = FairQueue(ShareLedger(CLASSES, weights or {}), TenantQueue)
    return hashing_engine(queue=queue, predictions=predictions, max_num_seqs=max_num_seqs)[0]


def position(engine: Engine, name: str) -> int:
    estimate = engine.estimate_start(name)
    assert estimate is not None
    return estimate.position


def test_places_in_a_single_file():
    engine, _ = hashing_engine(max_num_seqs=1)
    for name in "abc":
        engine.submit(certain(name), 0.0)
    step(engine, Record())
    assert engine.estimate_start("a") is None, "it runs"
    assert engine.estimate_start("nobody") is None
    assert [position(engine, name) for name in "bc"] == [0, 1]
    assert engine.estimate_start("b").forecast is None, "nothing has been learnt here"


def test_lines_of_other_tenants_move_as_their_weights_do():
    engine = fair({"heavy": 2.0})
    for i in range(6):
        engine.submit(certain(f"heavy{i}", tenant="heavy"), 0.0)
        engine.submit(certain(f"light{i}", tenant="light"), 0.0)
    assert position(engine, "heavy0") == 0
    assert position(engine, "light0") == 2
    assert position(engine, "heavy2") == 2 + 1
    assert position(engine, "light2") == 2 + 6
    assert position(engine, "light5") == 5 + 6, "not more than there are"


def test_better_classes_mostly_go_first_and_idle_time_comes_last():
    engine = fair()
    for i in range(4):
        engine.submit(certain(f"p{i}", service_class="priority"), 0.0)
        engine.submit(certain(f"f{i}", service_class="flex"), 0.0)
    engine.submit(certain("filler", service_class="background"), 0.0)
    assert position(engine, "p1") == 1
    assert position(engine, "f0") == 4
    assert position(engine, "filler") == 8


def test_requests_that_can_meet_their_target_are_ahead():
    engine = fair()
    for i in range(2):
        engine.submit(certain(f"r{i}"), 0.0)
    late, timely = (engine.scheduler.live[name] for name in ("r0", "r1"))
    line = next(
        line for account, line in engine.scheduler._waiting.tenant_queues() if account is late.account
    )
    late.late = True
    assert line.ahead_of(late) == [timely]
    assert line.ahead_of(timely) == []


def test_nothing_is_forecast_before_enough_steps_were_seen_nor_for_idle_time():
    engine = fair()
    engine.submit(certain("running"), 0.0)
    engine.submit(certain("next"), 0.0)
    engine.submit(certain("filler", service_class="background"), 0.0)
    step(engine, Record())
    assert engine.estimate_start("next").forecast is None
    for _ in range(100):
        engine.scheduler._predictions.times.observe(1, 1, 10, STEP_SECONDS)
    assert engine.estimate_start("next").forecast is not None
    assert engine.estimate_start("filler").forecast is None, "nobody knows when there will be idle time"


@pytest.mark.parametrize("slots", [1, 3])
def test_requests_start_and_end_about_when_it_was_said(slots):
    engine = fair(max_num_seqs=slots)
    record, now = Record(), 0.0

    def run(until) -> None:
        nonlocal now
        while not until():
            record.fold(engine.step(now))
            now += STEP_SECONDS

    for i in range(12):  # to learn what a step takes
        engine.submit(certain(f"first{i}"), now)
    run(lambda: len(record.ends) == 12)
    began = now
    names = [f"r{i}" for i in range(9)]
    for name in names:
        engine.submit(certain(name), now)
    run(lambda: engine.scheduler.num_running == slots)
    asked = now
    estimate_fields = {name: engine.estimate_start(name) for name in names}
    run(lambda: len(record.ends) == 12 + 9)
    starts = {event.request_id: event.at for event in record.of(Admitted)}
    waited = [name for name in names if estimate_fields[name] is not None]
    assert len(waited) == 9 - slots
    for place, name in enumerate(waited):
        assert estimate_fields[name].position == place
        start = starts[name] - asked
        assert estimate_fields[name].forecast.start == pytest.approx(start, rel=0.35, abs=0.05)
    assert now > began


def test_it_is_reported_as_plain_values():
    assert estimate_fields(None) is None
    assert estimate_fields(StartEstimate(3, None)) == {"position": 3}
    assert estimate_fields(StartEstimate(3, Forecast(1.0, 2.0, 4.0))) == {
        "position": 3,
        "predicted_start_seconds": 1.0,
        "predicted_first_token_seconds": 2.0,
        "predicted_finish_seconds": 4.0,
    }


def test_a_class_without_requests_is_no_obstacle():
    engine = fair()
    record = Record()
    engine.submit(certain("running", 50), 0.0)
    engine.submit(certain("gone", service_class="flex"), 0.0)
    engine.submit(certain("waits"), 0.0)
    step(engine, record)
    engine.cancel("gone", FinishReason.CANCELLED, 0.0)
    assert position(engine, "waits") == 0


ALONE = Batch(0, 0)
NOBODY = WorkAhead(work_seconds=0.0, share=1.0, free_slots=1, steps_left=(), waiting_steps=())


def forecaster(chunk_tokens: int = 100) -> Forecaster:
    """A step costs 10 ms and 1 ms a token; 1000 positions attended to cost as much as a token."""
    times = StepTimes(StepCost(fixed_tokens=10, context_tokens=1000), token_seconds=0.001)
    return Forecaster(times, LengthPredictor(10_000), chunk_tokens)


def exactly(prompt: int, output: int, **fields):
    params = SamplingParams(max_tokens=output, ignore_eos=True)
    return request("r", prompt, params=params, **fields)


def test_alone_it_starts_at_once_and_takes_its_own_steps():
    forecast = forecaster().expected(exactly(200, 11), NOBODY, ALONE)
    assert forecast.start == 0
    # two chunks of 110 ms, and 200 * 100 positions attended to
    assert forecast.first_token == pytest.approx(0.220 + 0.020)
    # ten more steps of 11 ms, each over 200 positions
    assert forecast.finish == pytest.approx(0.240 + 10 * 0.0112)


def test_what_is_cached_is_not_computed_but_attended_to():
    assert forecaster().expected(exactly(200, 1), NOBODY, ALONE, cached=150).first_token == pytest.approx(
        0.010 + 0.050 + 0.001 * (50 * 150 + 50 * 25) / 1000
    )


def test_others_that_decode_lengthen_every_step():
    batch = Batch(rows=10, contexts=5000)
    forecast = forecaster().expected(exactly(200, 11), NOBODY, batch)
    assert forecast.start == 0
    assert forecast.first_token == pytest.approx(2 * (0.010 + 0.010 + 0.005) + 0.200 + 0.020)
    assert forecast.finish - forecast.first_token == pytest.approx(10 * (0.010 + 0.011 + 0.005 + 0.0002))


def test_the_prompts_of_others_stretch_decoding():
    plain = forecaster().expected(exactly(200, 11), NOBODY, ALONE)
    stretched = forecaster().expected(exactly(200, 11), NOBODY, ALONE, slowdown=1.7)
    assert stretched.first_token == plain.first_token
    assert stretched.finish - stretched.first_token == pytest.approx(1.7 * (plain.finish - plain.first_token))


def test_work_ahead_takes_as_long_as_its_share_of_the_device_makes_it():
    ahead = NOBODY._replace(work_seconds=3.0, share=0.25)
    assert forecaster().expected(exactly(20, 1), ahead, ALONE).start == pytest.approx(12.0)


@pytest.mark.parametrize(
    ("waiting_steps", "free_slots", "steps"),
    [
        ([], 1, 0),
        ([50], 2, 0),
        ([], 0, 10),  # the one that ends first gives its slot
        ([50], 0, 30),
        ([50], 1, 10),
        ([50, 50], 1, 30),
        ([5], 0, 15),  # whoever took the first slot gives it back soonest
        ([50, 50, 50], 0, 60),
        ([50] * 6, 0, 110),
    ],
)
def test_without_a_slot_it_waits_for_those_that_run(waiting_steps, free_slots, steps):
    ahead = WorkAhead(0.0, 1.0, free_slots, (40, 10, 30), waiting_steps)
    batch = Batch(rows=3, contexts=1000)
    step_seconds = 0.010 + 0.003 + 0.001
    assert forecaster().expected(exactly(20, 1), ahead, batch).start == pytest.approx(steps * step_seconds)


def test_the_later_of_turn_and_slot_counts():
    ahead = WorkAhead(1.0, 1.0, 0, (10,), ())
    assert forecaster().expected(exactly(20, 1), ahead, Batch(1, 0)).start == pytest.approx(1.0)
    ahead = ahead._replace(work_seconds=0.001)
    assert forecaster().expected(exactly(20, 1), ahead, Batch(1, 0)).start == pytest.approx(0.110)


@given(
    prompt=st.integers(1, 3000),
    asked=st.integers(1, 3000),
    cached=st.floats(0, 0.99),
    ahead=st.builds(
        WorkAhead,
        work_seconds=st.floats(0, 100),
        share=st.floats(0.01, 1),
        free_slots=st.integers(0, 3),
        steps_left=st.lists(st.floats(0, 500), min_size=1, max_size=6),
        waiting_steps=st.lists(st.floats(0, 500), max_size=20),
    ),
    rows=st.integers(0, 64),
    slowdown=st.floats(1, 2),
)
def test_company_only_delays(prompt, asked, cached, ahead, rows, slowdown):
    asking = request("r", prompt, max_tokens=asked)
    found = int(prompt * cached)
    earliest = forecaster().expected(asking, NOBODY, ALONE, found)
    expected = forecaster().expected(asking, ahead, Batch(rows, rows * 700), found, slowdown)
    assert earliest.start <= earliest.first_token <= earliest.finish
    assert expected.start <= expected.first_token <= expected.finish
    assert all(bound <= likely + 1e-9 for bound, likely in zip(earliest, expected, strict=True))
