from __future__ import annotations

import pytest

from headrace.core.engine import Engine
from headrace.core.events import Admitted
from headrace.core.prediction.latest_start import LatestStarts
from headrace.core.prediction.output_lengths import LengthPredictor
from headrace.core.prediction.start_times import Forecast
from headrace.core.prediction.step_cost import StepCost
from headrace.core.prediction.step_times import StepTimes
from headrace.core.queueing.fair_queue import FairQueue
from headrace.core.queueing.tenant_queue import TenantQueue
from headrace.core.request import FinishReason, Request, SamplingParams
from headrace.core.scheduler.start_estimate import StartEstimate, estimate_fields
from headrace.core.tenancy.classes import CLASSES
from headrace.core.tenancy.fair_share import ShareLedger
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
