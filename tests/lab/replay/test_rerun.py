from __future__ import annotations

import dataclasses
import math

import pytest

from headrace.core.events import Finished, Verified
from headrace.core.knobs import Knobs
from headrace.core.prediction.step_curve import StepCost
from headrace.core.prediction.step_times import StepTimes
from headrace.core.queueing.order import ByPriority, FirstComeFirstServed
from headrace.core.request import FinishReason, Request, Retention, SamplingParams
from headrace.lab.replay.rerun import Drafting, recorded, recorded_rates, rerun
from headrace.lab.replay.trace import read_trace
from headrace.observe.trace_file import Begun
from headrace.testing.engines import hashing_engine
from tests.lab.replay.recorded import record_life, write
from tests.lab.replay.recorded import recorded as taped

TOKEN_SECONDS = 0.001


def record(path, requests, *, cancels=(), **settings):
    """Lives the requests in virtual time, a millisecond a token, and records it; how to compose the engine again."""
    moments = [Begun("test", {})]
    engine, _ = hashing_engine(**settings)
    clock = [0.0]
    engine = taped(engine, moments.append)
    engine._clock = lambda: clock[0]
    waiting, now, ends = list(requests), 0.0, []
    cancels = dict(cancels)
    while waiting or engine.wake_at(now) is not None:
        while waiting and waiting[0].arrived <= now:
            engine.submit(waiting.pop(0), now)
        for request_id, (at, why) in list(cancels.items()):
            if at <= now:
                engine.cancel(request_id, why, now)
                del cancels[request_id]
        due = engine.wake_at(now)
        if due is None or due > now:
            now = waiting[0].arrived if due is None else due
            continue
        began = len(moments)
        computed = engine.runner._runner.computed_tokens
        events = engine.step(now)
        took = TOKEN_SECONDS * (engine.runner._runner.computed_tokens - computed)
        moments[began:] = [m._replace(seconds=took) if hasattr(m, "seconds") else m for m in moments[began:]]
        now += max(took, 1e-6)
        ends += [(event.request_id, now) for event in events if isinstance(event, Finished)]
    write(path, moments)

    def compose_with(**changed):
        def compose(_, runner, drafter):
            again, _ = hashing_engine(**{**settings, **changed})
            again.runner = runner
            return again

        return compose

    return compose_with, dict(ends)


def request(name, arrived, prompt=10, answer=10, **more):
    return Request(name, tuple(range(prompt)), SamplingParams(max_tokens=answer), arrived=arrived, **more)


def exact_times():
    return StepTimes(StepCost(0.0, math.inf), TOKEN_SECONDS)


def test_the_unchanged_life_takes_as_long_as_it_took(tmp_path):
    path = tmp_path / "trace.jsonl"
    requests = [request(f"r{i}", 0.01 * i, prompt=5 + 3 * i) for i in range(6)]
    compose_with, ends = record(path, requests, max_num_seqs=3)
    trace = read_trace(path)
    reported = recorded(trace, compose_with())
    again = rerun(trace, compose_with(), exact_times())
    assert reported.divergence is None
    assert again.steps == reported.tally.steps
    assert again.cached_tokens == reported.tally.cached_tokens > 0
    for name in ("waits", "ttft", "e2e"):
        assert getattr(again, name) == pytest.approx(getattr(reported.tally, name), abs=1e-4)
    took = sorted(ends[each.id] - each.arrived for each in requests)
    assert sorted(again.e2e) == pytest.approx(took, abs=1e-3)


def test_the_seconds_of_steps_are_learnt_from_the_recording(tmp_path):
    path = tmp_path / "trace.jsonl"
    compose_with, _ = record(path, [request(f"r{i}", 0.02 * i, prompt=5 * i + 5) for i in range(20)])
    times = recorded(read_trace(path), compose_with()).times
    assert times.predict(4, 4, 100) == pytest.approx(4 * TOKEN_SECONDS, rel=0.1)
    assert times.predict(1, 50, 1275) == pytest.approx(50 * TOKEN_SECONDS, rel=0.1)


def test_another_order_lets_the_urgent_one_go_first(tmp_path):
    path = tmp_path / "trace.jsonl"
    requests = [request(f"r{i}", 0.0, prompt=40 + i, answer=20) for i in range(4)]
    requests.append(request("urgent", 0.001, prompt=8, answer=2, priority=-1))
    compose_with, _ = record(
        path, requests, max_num_seqs=1, order=FirstComeFirstServed(), prefix_caching=False
    )
    trace = read_trace(path)
    before = rerun(trace, compose_with(), exact_times())
    after = rerun(trace, compose_with(order=ByPriority()), exact_times())
    assert len(before.ttft) == len(after.ttft) == 5
    assert sorted(after.waits)[1] < sorted(before.waits)[1]
    assert max(before.ttft) > 0.2
    assert sum(after.ttft) < sum(before.ttft)


def test_less_memory_means_preemptions(tmp_path):
    path = tmp_path / "trace.jsonl"
    requests = [dataclasses.replace(request(f"r{i}", 0.0, answer=20), salt=str(i)) for i in range(4)]
    compose_with, _ = record(path, requests, num_blocks=64, knobs=Knobs(batched_tokens=32))
    trace = read_trace(path)
    assert recorded(trace, compose_with()).tally.preemptions == 0
    tight = rerun(trace, compose_with(num_blocks=32, max_model_len=64), exact_times())
    tighter = rerun(trace, compose_with(num_blocks=14, max_model_len=48), exact_times())
    assert tight.preemptions == 0
    assert tighter.preemptions > 0
    assert tighter.lost_tokens > 0
    assert len(tighter.e2e) == 4


def test_a_stop_string_ends_the_same_answer_at_the_same_token(tmp_path):
    path = tmp_path / "trace.jsonl"
    cancels = {"a": (0.014, FinishReason.STOP)}
    compose_with, _ = record(path, [request("a", 0.0, answer=50), request("b", 0.0)], cancels=cancels)
    trace = read_trace(path)
    assert 0 < len(trace.answers["a"].tokens) < 50
    slower = StepTimes(StepCost(0.0, math.inf), 10 * TOKEN_SECONDS)
    again = rerun(trace, compose_with(), slower)
    tokens = len(trace.answers["a"].tokens)
    assert len(again.e2e) == 2
    assert min(again.e2e) < 10 * TOKEN_SECONDS * (20 + 2 * tokens + 2)


def test_every_random_life_ends_under_any_order(tmp_path, monkeypatch):
    for seed in range(15):
        path = tmp_path / f"{seed}.jsonl"
        _, compose = record_life(seed, path, monkeypatch)
        trace = read_trace(path)
        again = rerun(trace, compose, exact_times())
        assert not again._since, f"seed {seed}: {list(again._since)} never ended"


def test_what_lies_on_disk_comes_back_after_as_long_as_it_took(tmp_path):
    path = tmp_path / "trace.jsonl"
    prompts = [tuple(range(100 * i, 100 * i + 40)) for i in range(6)]
    kept = (Retention(0, None, 80),)
    requests = [
        Request(f"{turn}-{i}", prompt, SamplingParams(max_tokens=4), turn + 0.1 * i, retention=kept)
        for turn in range(2)
        for i, prompt in enumerate(prompts)
    ]
    small = {"num_blocks": 12, "host_blocks": 2, "disk_blocks": 100, "max_model_len": 48, "max_num_seqs": 1}
    compose_with, _ = record(path, requests, **small)
    trace = read_trace(path)
    reported = recorded(trace, compose_with())
    assert reported.divergence is None
    again = rerun(trace, compose_with(), exact_times())
    without = rerun(trace, compose_with(disk_blocks=0), exact_times())
    assert reported.tally.cached_tokens > 0
    assert again.cached_tokens == pytest.approx(reported.tally.cached_tokens, rel=0.2)
    assert reported.tally.cached_tokens > 2 * without.cached_tokens


def test_drafts_are_accepted_as_they_were(tmp_path, monkeypatch):
    path = tmp_path / "trace.jsonl"
    seed = next(seed for seed in range(100) if _drafts(seed, path, monkeypatch) > 100)
    _, compose = record_life(seed, path, monkeypatch)
    trace = read_trace(path)
    reported = recorded(trace, compose)
    assert reported.divergence is None
    assert reported.drafting.rates == recorded_rates(trace)
    assert reported.drafting.pass_seconds == 0
    plain = rerun(trace, compose, exact_times())
    drafted = rerun(trace, compose, exact_times(), reported.drafting._replace(rates=(1.0,)))
    assert drafted.steps < plain.steps
    slow = rerun(trace, compose, exact_times(), Drafting((1.0,), 1.0))
    assert slow.busy_seconds > drafted.busy_seconds + 10


def _drafts(seed, path, monkeypatch):
    record, _ = record_life(seed, path, monkeypatch)
    return sum(event.drafted for event in record.of(Verified))
