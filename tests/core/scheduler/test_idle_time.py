"""Work that only fills idle time: it stands still while others are served, and keeps what nobody else wants."""

from __future__ import annotations

from headrace.core.events import Admitted, Chunked, Preempted, Skipped, SkipReason, Stepped
from headrace.core.knobs import Knobs
from headrace.core.prediction.step_times import StepTimes
from headrace.core.queueing.fair_queue import FairQueue, TenantQueue
from headrace.core.request import FinishReason
from headrace.core.scheduler.step_builder import BACKGROUND_ADMISSIONS, LEAST_PREFILL
from headrace.core.tenancy.fair_share import ShareLedger
from headrace.core.tenancy.tenants import CLASSES
from headrace.testing.engines import Record, drain, hashing_engine
from tests.doubles.scenes import admitted, plans, request, step


def fair() -> FairQueue:
    return FairQueue(ShareLedger(CLASSES, {}), TenantQueue)


def test_background_work_pauses_while_requests_run_and_continues_afterwards():
    engine, _ = hashing_engine(queue=fair(), num_blocks=32)
    record = Record()
    engine.submit(request("idle", service_class="background", max_tokens=20), 0.0)
    step(engine, record, 3)
    engine.submit(request("real", max_tokens=5), 0.0)
    before = len(record.tokens["idle"])
    step(engine, record, 5)
    assert list(record.ends) == ["real"]
    assert len(record.tokens["idle"]) == before
    (reported,) = record.of(Skipped)
    assert (reported.request_id, reported.reason) == ("idle", SkipReason.NOT_IDLE)
    drain(engine, record)
    assert admitted(record) == ["idle", "real"], "it kept its slot"
    assert not record.of(Preempted)
    assert len(record.tokens["idle"]) == 20


def test_background_work_yields_its_slot():
    engine, _ = hashing_engine(queue=fair(), max_num_seqs=2)
    record = Record()
    for number in range(2):
        engine.submit(request(f"idle{number}", service_class="background", max_tokens=20), 0.0)
    step(engine, record, 3)
    engine.submit(request("real", max_tokens=3), 0.0)
    step(engine, record)
    assert {(each.request_id, each.reason) for each in record.of(Preempted)} == {
        ("idle0", "yield"),
        ("idle1", "yield"),
    }
    assert record.tokens["real"], "in the same step"
    drain(engine, record)
    assert len(record.tokens["idle0"]) == len(record.tokens["idle1"]) == 20


def test_background_work_yields_its_blocks_to_a_request_that_starts_in_the_same_step():
    engine, _ = hashing_engine(queue=fair(), num_blocks=8, block_size=4, max_model_len=32)
    record = Record()
    engine.submit(request("idle", 12, service_class="background", max_tokens=10), 0.0)
    step(engine, record, 3)
    engine.submit(request("real", 24, max_tokens=3), 0.0)
    step(engine, record)
    assert [each.request_id for each in record.of(Preempted)] == ["idle"]
    assert record.tokens["real"]
    drain(engine, record)
    assert list(record.ends) == ["real", "idle"]


def test_background_work_yields_its_blocks_to_a_request_that_grows():
    engine, _ = hashing_engine(queue=fair(), num_blocks=8, block_size=4, max_model_len=32)
    record = Record()
    engine.submit(request("idle", 14, service_class="background", max_tokens=10), 0.0)
    step(engine, record, 2)
    engine.submit(request("real", 13, max_tokens=10), 0.0)
    step(engine, record)
    assert not record.of(Preempted)
    drain(engine, record)
    assert [each.request_id for each in record.of(Preempted)] == ["idle"]
    assert list(record.ends) == ["real", "idle"]


def test_no_request_waits_for_a_prefix_of_paused_work():
    prompt = tuple(range(16))
    engine, _ = hashing_engine(queue=fair(), knobs=Knobs(batched_tokens=8))
    record = Record()
    engine.submit(request("idle", (*prompt, 1), service_class="background"), 0.0)
    step(engine, record)
    assert record.of(Chunked)[-1].length == 8, "half of it is under way"
    engine.submit(request("real", (*prompt, 2)), 0.0)
    step(engine, record)
    assert [each.request_id for each in record.of(Preempted)] == ["idle"]
    assert record.of(Admitted)[-1][:1] == ("real",)
    assert record.of(Admitted)[-1].cached_tokens == 8, "what was computed is found"
    drain(engine, record)
    assert list(record.ends) == ["real", "idle"]


def test_one_that_stands_still_can_be_cancelled():
    engine, _ = hashing_engine(queue=fair())
    record = Record()
    engine.submit(request("idle", service_class="background", max_tokens=20), 0.0)
    step(engine, record, 2)
    engine.submit(request("real", max_tokens=20), 0.0)
    step(engine, record, 2)
    engine.cancel("idle", FinishReason.CANCELLED, 0.0)
    step(engine, record)
    assert list(record.ends) == ["idle"]
    drain(engine, record)
    assert engine.wake_at(0.0) is None


def test_a_step_that_is_broken_off_is_planned_again_as_if_it_had_not_been():
    ends: list[list[int]] = []
    for interrupted in (False, True):
        engine, runner = hashing_engine(queue=fair(), block_size=2)
        record, due = Record(), [1, 1, 0, 1, 0, 0, 1] * interrupted
        runner.interrupts = lambda plan, due=due: bool(due and due.pop(0))
        seen = plans(engine)
        engine.submit(request("idle", 7, service_class="background", max_tokens=9), 0.0)
        step(engine, record, 4)
        assert len(record.of(Stepped)) == (1 if interrupted else 4), "what computed nothing is not told"
        drain(engine, record)
        assert all(plan.idle for plan in seen)
        assert len(seen) == 9 + 4 * interrupted
        ends.append(record.tokens["idle"])
    assert ends[0] == ends[1]
    assert len(ends[0]) == 9


def test_work_that_a_client_waits_for_is_not_idle():
    engine, _ = hashing_engine(queue=fair())
    seen = plans(engine)
    engine.submit(request("idle", service_class="background"), 0.0)
    step(engine, Record())
    engine.submit(request("real"), 0.0)
    step(engine, Record())
    assert [plan.idle for plan in seen] == [True, False]


def test_a_step_of_background_work_is_short_because_requests_may_arrive():
    prompt = tuple(range(4 * LEAST_PREFILL))
    engine, _ = hashing_engine(queue=fair(), times=StepTimes(token_seconds=0.1))
    record = Record()
    engine.submit(request("idle", prompt, service_class="background", max_tokens=4), 0.0)
    step(engine, record, 8)
    assert [event.length for event in record.of(Chunked)] == [LEAST_PREFILL] * 4
    engine.submit(request("real", prompt[::-1]), 0.0)
    step(engine, record)
    assert record.of(Chunked)[-1].length == len(prompt)


def test_background_work_comes_in_bit_by_bit_and_all_of_it_comes_in():
    engine, _ = hashing_engine(queue=fair(), times=StepTimes(token_seconds=1e-6))
    record = Record()
    for number in range(5):
        engine.submit(request(str(number), (number,), service_class="background", max_tokens=30), 0.0)
    joined = []
    for _ in range(4):
        step(engine, record)
        joined.append(len(record.of(Admitted)))
    assert joined == [BACKGROUND_ADMISSIONS, 2 * BACKGROUND_ADMISSIONS, 5, 5]
    drain(engine, record)
    assert len(record.ends) == 5
