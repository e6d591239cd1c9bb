"""The engine as a target, over the hashing runner: real scheduling, no torch."""

from __future__ import annotations

import pytest

from headrace.core.events import Event, Stepped
from headrace.core.plan import StepOutput, StepPlan
from headrace.core.request import Request, SamplingParams
from headrace.lab.bench.engine import EngineTarget, KvWaste
from headrace.lab.bench.latency import NotOneBatch, Stopwatch, latency_table, time_steps
from headrace.lab.bench.report import measure
from headrace.lab.workload.dataset import fixed_lengths, shared_prefix
from headrace.lab.workload.work import Prompt, Work
from headrace.testing.engines import hashing_engine
from headrace.testing.hashing_runner import HashingRunner


def tokens(prompt: Prompt) -> tuple[int, ...]:
    assert not isinstance(prompt, str)
    return tuple(int(token) for token in prompt)  # type: ignore[call-overload]


@pytest.mark.parametrize("overlap", [0, 1])
def test_every_request_is_served_and_measured(overlap: int) -> None:
    engine, _ = hashing_engine(overlap=overlap)
    target = EngineTarget("engine", engine, tokens)
    for _ in range(2):  # ids of two runs must not meet
        run = measure(target, fixed_lengths(20, 8, 6))
        assert (run.summary.requests, run.summary.failed, run.summary.output_tokens) == (20, 0, 120)
        for record in run.records:
            assert len(record.token_seconds) == record.output_tokens == 6
            assert list(record.token_seconds) == sorted(record.token_seconds)
            assert 0.0 <= record.token_seconds[0] <= record.finished
        assert 0.0 <= run.facts["kv_waste_percent"] < 100.0
        assert "kernels" not in run.facts


def test_the_kernels_are_in_the_facts() -> None:
    engine, _ = hashing_engine()
    run = measure(EngineTarget("engine", engine, tokens, kernels="cpp avx2"), fixed_lengths(2, 8, 6))
    assert run.facts["kernels"] == "cpp avx2"


def test_a_cold_start_for_every_run_when_asked_for() -> None:
    engine, _ = hashing_engine()
    work = shared_prefix(3, prefix_len=32, input_len=4, output_len=2)
    warm = EngineTarget("warm", engine, tokens)
    assert warm.run(work[:1])[0].cached_tokens == 0
    assert warm.run(work[:1])[0].cached_tokens > 0
    cold = EngineTarget("cold", engine, tokens, before=engine.reset_prefix_cache)
    assert cold.run(work[:1])[0].cached_tokens == 0


def test_arrivals_are_kept_and_latency_counts_from_them() -> None:
    engine, _ = hashing_engine()
    late = Work("late", (1, 2, 3), 2, arrival=0.05, ignore_eos=True)
    first, second = EngineTarget("engine", engine, tokens).run(
        [late, Work("now", (4, 5), 2, ignore_eos=True)]
    )
    assert (first.arrived, second.arrived) == (0.05, 0.0)
    assert first.token_seconds[0] >= 0.05
    assert first.ttft == pytest.approx(first.token_seconds[0] - 0.05)


def test_the_engine_hears_of_arrivals_on_its_own_clock() -> None:
    engine, _ = hashing_engine()
    seen = []
    submit = engine.submit

    def watched(request: Request, now: float) -> None:
        seen.append(now - request.arrived)
        submit(request, now)

    engine.submit = watched  # type: ignore[method-assign]
    work = [Work("a", (1, 2), 2, ignore_eos=True), Work("b", (1, 3), 2, 0.02, ignore_eos=True)]
    EngineTarget("engine", engine, tokens).run(work)
    assert all(0.0 <= waited < 60.0 for waited in seen), "nobody has waited since the clock began"


def test_a_request_that_cannot_be_served_is_an_error_of_its_own() -> None:
    engine, _ = hashing_engine(max_model_len=16)
    too_long = Work("long", tuple(range(40)), 2)
    bad, good = EngineTarget("engine", engine, tokens).run(
        [too_long, Work("good", (1, 2), 2, ignore_eos=True)]
    )
    assert bad.error
    assert not good.error


def test_an_engine_that_goes_idle_with_open_requests_is_an_error() -> None:
    class Idle:
        def submit(self, request: Request, now: float) -> None: ...

        def step(self, now: float) -> list[Event]:
            return []

        def wake_at(self, now: float) -> float | None:
            return None

    with pytest.raises(RuntimeError, match="idle"):
        EngineTarget("idle", Idle(), tokens).run([Work("a", (1,), 1)])


class Slow:
    """The hashing runner with a forward of 2 s and a collect of 1 s on `clock`; it says the forward in ``seconds``."""

    def __init__(self, inner: HashingRunner) -> None:
        self._inner = inner
        self._now = 0.0
        self.seconds = {"forward": 0.0}

    def clock(self) -> float:
        return self._now

    def launch(self, plan: StepPlan, now: float) -> None:
        self._now += 2.0
        self.seconds["forward"] += 2.0
        self._inner.launch(plan, now)

    def collect(self) -> StepOutput:
        self._now += 1.0
        return self._inner.collect()


def test_the_parts_of_a_step_add_up_to_it() -> None:
    engine, inner = hashing_engine()
    slow = Slow(inner)
    engine.runner = stopwatch = Stopwatch(slow, slow.clock)
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    requests = [Request(str(i), (1 + i, 2, 3, 4, 5, 6), params) for i in range(4)]
    prefill, decode = time_steps(engine, stopwatch, lambda: slow.seconds, requests, slow.clock)
    assert (prefill.kind, decode.kind) == ("prefill", "decode")
    assert (prefill.wall.count, decode.wall.count) == (1, 8)
    assert decode.parts == {"plan": 0.0, "launch": 2.0, "collect": 1.0, "commit": 0.0}
    assert decode.wall.mean == sum(decode.parts.values())
    assert decode.phases["forward"] == 2.0
    assert decode.outside_forward == 1.0
    assert latency_table([prefill, decode], "title").row_count == 3 + 4 + 1 + 1


def test_a_batch_that_does_not_fit_says_so() -> None:
    engine, inner = hashing_engine(max_num_seqs=2)
    engine.runner = stopwatch = Stopwatch(inner)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    requests = [Request(str(i), (1, 2, 3), params) for i in range(4)]
    with pytest.raises(NotOneBatch, match="--max-num-seqs"):
        time_steps(engine, stopwatch, dict, requests)


def stepped(allocated: int, filled: int, held: int = 0) -> Stepped:
    return Stepped(0, 0, 0, 0, 0, 0, held, 100, allocated, filled)


def test_waste_is_weighed_by_time() -> None:
    waste = KvWaste()
    assert waste.share == 0.0
    waste.fold(stepped(100, 50, held=7), 0.0)  # half empty for 1 s
    waste.fold(stepped(100, 90, held=5), 1.0)  # a tenth empty for 3 s
    waste.fold(stepped(0, 0), 4.0)  # idle: nothing held
    waste.fold(stepped(0, 0), 100.0)
    assert waste.share == pytest.approx(1 - (50 + 270) / 400)
    assert waste.peak_blocks == 7
