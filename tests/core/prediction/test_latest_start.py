from __future__ import annotations

import math
from dataclasses import replace

import pytest

from headrace.core.events import Skipped, SkipReason
from headrace.core.prediction.latest_start import TTFT_SHARE, LatestStarts
from headrace.core.prediction.output_lengths import LengthPredictor
from headrace.core.prediction.step_times import ENOUGH_STEPS, StepTimes
from headrace.core.queueing.fair_queue import LATE_SHARE, FairQueue, TenantQueue
from headrace.core.request import FinishReason, SamplingParams, Slo
from headrace.core.tenancy.fair_share import ShareLedger
from headrace.core.tenancy.tenants import ServiceClass
from headrace.testing.engines import Record, drain, hashing_engine
from tests.doubles.scenes import chunks, request, step

CLASSES = (ServiceClass("default", 0, 1.0, slo=Slo(2.0, None)),)


def predictions(steps: int = 400, seconds: float = 0.01, token_seconds: float = 0.001) -> LatestStarts:
    """One that has seen steps of ``seconds`` and so much more for each token."""
    seen = LatestStarts(StepTimes(), LengthPredictor(128), {each.name: each for each in CLASSES})
    for i in range(steps):
        tokens = 1 + i % 40
        seen.times.observe(1, tokens, 0, seconds + token_seconds * tokens)
    return seen


def test_targets_default_to_those_of_the_class():
    seen = predictions()
    assert seen.slo(request("a")) == Slo(2.0, None)
    assert seen.slo(request("a", slo=Slo(None, 0.1))) == Slo(2.0, 0.1)
    assert seen.slo(request("a", slo=Slo(0.5))) == Slo(0.5, None)


def test_the_latest_start_is_the_ttft_target_minus_the_prefill_time():
    seen = predictions()
    asked = request("a", 50, arrived=10.0)
    start = seen.latest_start(asked, Slo(1.0))
    assert 10.0 + 1.0 - 3 * seen.prefill_seconds(50) < start < 10.0 + 1.0 - 0.5 * seen.prefill_seconds(50)
    assert seen.latest_start(asked, Slo(None)) == math.inf


def test_a_share_of_the_target_is_reserved_for_prediction_errors():
    seen = predictions()
    asked = request("a", 50, arrived=10.0)
    for _ in range(400):
        seen.observe_first_token(50, 2.0 * seen.prefill_seconds(50))
    start = seen.latest_start(asked, Slo(1.0))
    assert start + 2.0 * seen.prefill_seconds(50) == pytest.approx(10.0 + TTFT_SHARE)


def test_no_request_is_late_before_enough_steps_are_observed():
    seen = predictions(ENOUGH_STEPS - 1)
    assert seen.latest_start(request("a"), Slo(1e-9)) == math.inf
    assert not seen.unreachable(request("a", deadline=0.0), 0.0)


def test_a_deadline_is_unreachable_only_if_even_a_short_answer_would_miss_it():
    seen = predictions()
    alone = seen.prefill_seconds(40)
    assert seen.unreachable(request("a", 40, max_tokens=1, deadline=alone / 2), 0.0)
    assert not seen.unreachable(request("a", 40, max_tokens=1, deadline=alone * 3), 0.0)
    assert not seen.unreachable(request("a", 40), 0.0)


def test_decoding_after_long_prompts_alone_is_not_thought_to_take_as_long_as_these():
    """A device that computes: 512 tokens take half a second, so 20 rows of one token do not take ten."""
    seen = predictions(0)
    for _ in range(ENOUGH_STEPS):
        seen.times.observe(1, 512, 512 * 256, 0.5)
    asked = request("a", 10, params=SamplingParams(max_tokens=20, ignore_eos=True), deadline=1.0)
    assert not seen.unreachable(asked, 0.0)


def test_known_output_tokens_take_no_time():
    seen = predictions()
    deadline = 3 * seen.prefill_seconds(45)
    asked = request("a", 40, params=SamplingParams(max_tokens=60, ignore_eos=True), deadline=deadline)
    assert seen.unreachable(asked, 0.0)
    assert not seen.unreachable(replace(asked, answered=tuple(range(58))), 0.0)
    assert not seen.unreachable(replace(asked, answered=tuple(range(60)), deadline=1e-9), 0.0)


@pytest.mark.parametrize("host_blocks", [0, 30])
def test_cached_tokens_do_not_make_a_deadline_unreachable(host_blocks):
    seen = predictions()
    engine, _ = engine_with(seen, num_blocks=32, host_blocks=host_blocks)
    record = Record()
    engine.submit(request("first", 101, max_tokens=1), 0.0)
    now = drain(engine, record)
    if host_blocks:
        engine.submit(request("evicts", 120, max_tokens=1), now)
        now = drain(engine, record, now)
    prompt = request("first", 101).tokens
    deadline = now + 3 * seen.prefill_seconds(5)
    assert deadline < now + seen.prefill_seconds(101)
    engine.submit(request("again", prompt, max_tokens=1, deadline=deadline), now)
    engine.submit(request("fresh", 101, max_tokens=1, deadline=deadline), now)
    drain(engine, record, now)
    assert record.ends["again"][0].reason is FinishReason.LENGTH
    assert record.ends["fresh"][0].reason is FinishReason.UNREACHABLE


def engine_with(seen: LatestStarts, **given):
    return hashing_engine(queue=FairQueue(ShareLedger(CLASSES, {}), TenantQueue), predictions=seen, **given)


def test_an_unreachable_deadline_is_rejected_before_any_computation():
    engine, runner = engine_with(predictions())
    record = Record()
    engine.submit(request("late", 60, deadline=0.001), 0.0)
    drain(engine, record)
    (end,) = record.ends["late"]
    assert end.reason is FinishReason.UNREACHABLE
    assert "deadline" in end.message
    assert runner.computed_tokens == 0


def test_requests_that_can_meet_their_target_go_first():
    engine, _ = engine_with(predictions(), max_num_seqs=1)
    record = Record()
    engine.submit(request("runs", max_tokens=3, arrived=0.0), 0.0)
    step(engine, record)
    engine.submit(request("hopeless", arrived=0.0, slo=Slo(0.5)), 0.6)
    engine.submit(request("hopeful", arrived=0.6, slo=Slo(0.5)), 0.6)
    drain(engine, record, 0.6)
    assert list(record.ends) == ["runs", "hopeful", "hopeless"]


@pytest.mark.parametrize("length", [10, 20])
def test_late_requests_receive_their_share(length):
    seen = predictions(seconds=0.0)
    engine, _ = engine_with(seen, max_num_seqs=1)
    record = Record()
    engine.submit(request("hopeless", length, arrived=0.0, slo=Slo(0.001)), 1.0)
    others = round(length / 10 / LATE_SHARE)
    for i in range(2 * others):
        engine.submit(request(f"r{i}", 10, arrived=1.0, slo=Slo(1000.0)), 1.0)
    drain(engine, record, 1.0)
    assert list(record.ends).index("hopeless") == pytest.approx(others, abs=1)


def test_a_long_prompt_is_deferred_for_two_short_ones():
    seen = predictions(seconds=0.0)
    engine, _ = engine_with(seen, max_num_seqs=1)
    record = Record()
    engine.submit(request("runs", arrived=0.0), 0.0)
    step(engine, record)
    for name, length in (("long", 100), ("short", 5), ("shorter", 4)):
        engine.submit(request(name, length, max_tokens=1, arrived=0.0, slo=Slo(0.115)), 0.0)
    drain(engine, record, 0.001)
    assert list(record.ends) == ["runs", "short", "shorter", "long"]


def test_prefill_respects_the_tpot_target_of_decoding_requests():
    engine, _ = engine_with(predictions(seconds=0.001, token_seconds=0.001))
    record = Record()
    engine.submit(request("quick", max_tokens=60, slo=Slo(None, 0.05)), 0.0)
    step(engine, record, 3)
    engine.submit(request("long", 100), 0.0)
    drain(engine, record)
    lengths = [length for _, length, _ in chunks(record, "long")]
    assert max(lengths) <= 0.8 * 0.05 / 0.001, "a step takes about a millisecond for each token"
    assert len(lengths) > 2


@pytest.mark.parametrize(("tpot", "held"), [(0.02, True), (None, False), (0.0005, False)])
def test_a_batch_does_not_grow_beyond_a_tpot_target_that_can_be_met(tpot, held):
    seen = LatestStarts(StepTimes(), LengthPredictor(128), {each.name: each for each in CLASSES})
    for i in range(400):
        rows = 1 + i % 8
        seen.times.observe(rows, rows, 0, 0.001 + 0.004 * rows)
    engine, _ = engine_with(seen)
    record = Record()
    for i in range(8):
        engine.submit(request(f"r{i}", max_tokens=30, slo=Slo(None, tpot)), 0.0)
    step(engine, record, 10)
    full = [e for e in record.of(Skipped) if e.reason is SkipReason.STEP_FULL]
    assert bool(full) is held
    drain(engine, record)
    assert len(record.ends) == 8
