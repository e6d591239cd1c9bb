from __future__ import annotations

import math

import pytest

from headrace.core.events import Stepped
from headrace.core.images import ImageSpan
from headrace.core.knobs import Knobs
from headrace.core.prediction.step_times import StepTimes
from headrace.core.request import FinishReason, Request, SamplingParams
from headrace.testing.engines import Record, drain, hashing_engine
from headrace.testing.hashing_runner import HashingRunner
from tests.doubles.scenes import request, step


class CountingRunner(HashingRunner):
    """Notes the order of launches and collects."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.calls = ""

    def launch(self, plan, now):
        self.calls += "L"
        super().launch(plan, now)

    def collect(self):
        self.calls += "C"
        return super().collect()


@pytest.mark.parametrize(("overlap", "calls"), [(0, "LCLCLC"), (1, "LLCLCC"), (2, "LLLCCC")])
def test_overlap_is_how_many_steps_may_be_uncollected_while_planning(overlap, calls):
    engine, _ = hashing_engine(overlap=overlap)
    runner = engine.runner = CountingRunner(64, 4, 8)
    engine.submit(request("a", max_tokens=3), 0.0)
    drain(engine, Record())
    assert runner.calls == calls


def test_an_idle_engine_wants_no_step():
    engine, _ = hashing_engine()
    assert engine.wake_at(1.0) is None
    engine.submit(request("a", max_tokens=1), 1.0)
    assert engine.wake_at(1.0) == 1.0
    drain(engine, Record(), 1.0)
    assert engine.wake_at(9.0) is None


def test_pending_events_require_a_step():
    engine, _ = hashing_engine()
    engine.submit(request("a", ()), 0.0)
    assert engine.wake_at(0.0) == 0.0
    record = Record()
    record.fold(engine.step(0.0))
    assert record.ends["a"][0].reason is FinishReason.REJECTED
    assert engine.wake_at(0.0) is None


def test_events_are_handed_out_once():
    engine, _ = hashing_engine()
    engine.submit(request("a"), 0.0)
    assert engine.take_events()
    assert not engine.take_events()


def test_cancelling_what_is_unknown_or_finished_is_no_error():
    engine, _ = hashing_engine()
    record = Record()
    engine.cancel("nobody", FinishReason.CANCELLED, 0.0)
    engine.submit(request("a", max_tokens=1), 0.0)
    drain(engine, record)
    engine.cancel("a", FinishReason.CANCELLED, 0.0)
    drain(engine, record)
    assert [end.reason for end in record.ends["a"]] == [FinishReason.LENGTH]


def test_reset_prefix_cache_makes_the_next_request_compute_all():
    engine, runner = hashing_engine()
    record = Record()
    for name in "abc":
        if name == "c":
            engine.reset_prefix_cache()
        engine.submit(request(name, tuple(range(12)), max_tokens=1), 0.0)
        drain(engine, record)
    assert [record.ends[name][0].cached_tokens for name in "abc"] == [0, 11, 0]
    assert runner.computed_tokens == 12 + 1 + 12
    step(engine, record)


class LosingRunner(HashingRunner):
    """Raises in place of the output of step ``lost``, and of all that had been launched behind it."""

    def __init__(self, *sizes: int, lost: int) -> None:
        super().__init__(*sizes)
        self.lost = lost
        self.until = lost
        self.launched = -1
        self.collected = -1

    def launch(self, plan, now):
        self.launched += 1
        super().launch(plan, now)

    def collect(self):
        output = super().collect()
        self.collected += 1
        if self.collected == self.lost:
            self.until = self.launched
        if self.lost <= self.collected <= self.until:
            raise RuntimeError("out of memory")
        return output


@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("lost", [0, 2, 4])
def test_a_step_that_is_lost_ends_its_requests_and_no_later_one(overlap, lost):
    engine, _ = hashing_engine(overlap=overlap)
    engine.runner = LosingRunner(64, 4, 8, lost=lost)
    record = Record()
    for name in "ab":
        engine.submit(request(name, max_tokens=9), 0.0)
    with pytest.raises(RuntimeError, match="out of memory"):
        drain(engine, record)
    drain(engine, record)
    engine.check_consistency()
    assert [end.reason for name in "ab" for end in record.ends[name]] == [FinishReason.FAILED] * 2
    assert record.ends["a"][0].message == "out of memory"
    engine.submit(request("c", max_tokens=9), 1.0)
    drain(engine, record)
    engine.check_consistency()
    assert [end.reason for end in record.ends["c"]] == [FinishReason.LENGTH]


@pytest.mark.parametrize("spent", [0.0, 0.008])
def test_work_between_steps_shares_the_time_of_prompts_and_is_no_part_of_a_step(spent):
    times = StepTimes(token_seconds=0.001)
    engine, _ = hashing_engine(times=times, knobs=Knobs(batched_tokens=64, mixed_prefill_ratio=4.0))
    rooms, chunks, now = [], [], 0.0

    def work(room: float) -> float:
        rooms.append(room)
        return spent

    engine.beside(work)
    for name in "abcd":
        engine.submit(request(name, (1, 2), max_tokens=60), now)
    for turn in range(30):
        if turn == 20:
            engine.submit(request("long", range(100), max_tokens=1), now)
        engine.beside(work)
        now += spent
        step = engine.step(now)
        computed = sum(event.computed_tokens for event in step if isinstance(event, Stepped))
        chunks += [computed - 4] if computed > 4 and turn >= 20 else []
        now += 0.001 * computed
    assert rooms[0] == math.inf
    assert rooms[20] == pytest.approx(0.016, rel=0.1)  # four times the decoding time
    assert rooms[22] == pytest.approx(rooms[20] / 2, rel=0.2)  # a prompt has the other half
    assert chunks[0] == pytest.approx(16 - 1000 * spent, abs=2)
    assert times.predict(4, 4, 40) == pytest.approx(0.004, rel=0.1)


@pytest.mark.parametrize(("images", "tokens"), [((), 8), ((ImageSpan(1, 98, bytes(32), features=7),), 6)])
def test_beside_decoding_a_quarter_of_the_prefill_time_stays_free_of_a_prompt_with_images(images, tokens):
    engine, _ = hashing_engine(
        times=StepTimes(token_seconds=0.001), knobs=Knobs(batched_tokens=64, mixed_prefill_ratio=2.0)
    )
    chunks, now = [], 0.0
    for name in "abcd":
        engine.submit(request(name, (1, 2), max_tokens=60), now)
    for turn in range(30):
        if turn == 20:
            greedy = SamplingParams(temperature=0.0, max_tokens=1)
            engine.submit(Request("long", tuple(range(100)), greedy, images=images), now)
        step = engine.step(now)
        computed = sum(event.computed_tokens for event in step if isinstance(event, Stepped))
        chunks += [computed - 4] if computed > 4 and turn >= 20 else []
        now += 0.001 * computed
    assert chunks[1] == pytest.approx(tokens, abs=1)  # of 8 ms, twice the decoding time
