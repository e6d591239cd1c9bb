"""The model against the simulator, which runs the scheduler itself, and against cases that can be counted by hand."""

import random

import pytest

from headrace.config import CacheOptions, SchedulerOptions
from headrace.core.knobs import Knobs
from headrace.core.prediction.step_curve import StepCost, StepCurve
from headrace.core.prediction.step_times import StepTimes
from headrace.lab.simulate.runner import Front, StepWork, from_calls
from headrace.lab.workload.work import Call, Synthesis
from headrace.tuning.scheduler_model import SchedulerModel
from headrace.tuning.traffic import Job, Period
from headrace.wiring.simulation import Machine, make_fleet


def measured(seconds=lambda tokens: 0.02 + 1e-4 * tokens):
    """A curve of steps of many sizes."""
    times, rng = StepTimes(), random.Random(0)
    for _ in range(600):
        rows = rng.randint(1, 40)
        tokens = rows + rng.choice((0, 0, 50, 200, 800))
        times.observe(rows, tokens, 100 * tokens, seconds(tokens))
    return StepCurve.of(times.curve.measured())


def rehearsed(jobs, ended=100.0, slots=64, curve=None, static=False, overlap=0, **knobs):
    knobs = {"batched_tokens": 2048, "mixed_prefill_ratio": 0.7} | knobs
    period, curve = Period(0.0, ended, jobs), curve or measured()
    return SchedulerModel(period, Knobs(**knobs), curve, slots, static=static, overlap=overlap).run()


def test_one_request_takes_its_prompt_and_one_step_for_each_further_token():
    curve = measured(lambda tokens: 0.5)
    found = rehearsed([Job(1.0, 100, 0, 5)], curve=curve)
    assert found.open_seconds == pytest.approx(5 * 0.5)
    assert found.ttft_p99 == pytest.approx(0.5)
    assert found.seconds_per_token == pytest.approx(0.5)


def test_a_request_that_decodes_already_needs_no_prompt():
    curve = measured(lambda tokens: 0.5)
    found = rehearsed([Job(0.0, 0, 300, 4)], curve=curve)
    assert (found.open_seconds, found.ttft_p99) == (pytest.approx(2.0), 0.0)


def test_only_the_period_counts_for_the_time_per_token_and_all_of_it_for_the_comparison():
    curve = measured(lambda tokens: 1.0)
    found = rehearsed([Job(0.0, 10, 0, 20)], ended=10.0, curve=curve)
    assert found.seconds_per_token == pytest.approx(10.0 / 10)
    assert found.open_seconds == pytest.approx(20.0)


def test_only_what_a_measurement_of_the_period_sees_counts_for_its_tails():
    """The prompt of 1,000 tokens slows down the step that ends after the period."""
    curve = measured(lambda tokens: 1.0 if tokens < 500 else 4.0)
    jobs = [Job(0.0, 10, 0, 20), Job(8.5, 1000, 0, 2)]
    found = rehearsed(jobs, ended=10.0, curve=curve, mixed_prefill_ratio=0.0)
    assert (found.period_ttft_p99, found.period_itl_p99) == (pytest.approx(1.0), pytest.approx(1.0))
    assert min(found.ttft_p99, found.itl_p99) > 4.0


def test_a_request_that_waited_before_the_period_has_waited_as_long_as_its_client_did():
    found = rehearsed([Job(0.0, 100, 0, 5, waited=30.0)], curve=measured(lambda tokens: 0.5))
    assert found.ttft_p99 == found.period_ttft_p99 == pytest.approx(30.5)
    assert found.open_seconds == pytest.approx(2.5)


def test_a_request_is_not_in_the_step_that_was_planned_before_it_arrived():
    """It arrives while a step runs: without overlap it is in the next one, with overlap in the one after."""
    curve = measured(lambda tokens: 1.0)
    jobs = [Job(0.0, 10, 0, 20), Job(2.5, 10, 0, 1)]
    assert rehearsed(jobs[1:], curve=curve, overlap=1).ttft_p99 == pytest.approx(1.0), "nothing runs"
    assert rehearsed(jobs, curve=curve).ttft_p99 == pytest.approx(1.5)
    assert rehearsed(jobs, curve=curve, overlap=1).ttft_p99 == pytest.approx(2.5)
    assert rehearsed(jobs, curve=curve, overlap=2).ttft_p99 == pytest.approx(3.5)


def test_short_prompts_do_not_wait_for_one_of_several_steps():
    """As in the scheduler, the long one has half of each step while others want the rest."""
    curve = measured(lambda tokens: 1e-3 * tokens)
    jobs = [Job(0.0, 8000, 0, 1), *[Job(0.1, 500, 0, 1)] * 4]
    found = rehearsed(jobs, ended=6.0, curve=curve, batched_tokens=1000)
    assert found.period_ttft_p99 == pytest.approx(5.0, rel=0.05), "the first step had begun without them"
    assert found.ttft_p99 == pytest.approx(10.0, rel=0.05)


def test_a_rehearsal_in_parts_is_the_same():
    rng = random.Random(2)
    jobs = [Job(float(at), rng.randint(10, 900), 0, rng.randint(1, 50)) for at in range(30)]
    period, knobs = Period(0.0, 20.0, jobs), Knobs(batched_tokens=2048, mixed_prefill_ratio=0.7)
    parts = SchedulerModel(period, knobs, measured(), 64)
    outcomes = [parts.run(100)]
    while outcomes[-1] is None:
        outcomes.append(parts.run(100))
    assert len(outcomes) == -(-parts._step // 100) > 3
    assert outcomes[-1] == SchedulerModel(period, knobs, measured(), 64).run()
    assert outcomes[-1].period_steps < 100 * len(outcomes), "the last jobs end after the period"


def test_slots_and_the_bound_on_running_requests_make_requests_wait():
    curve = measured(lambda tokens: 1.0)
    jobs = [Job(0.0, 10, 0, 5)] * 2
    assert rehearsed(jobs, curve=curve).open_seconds == pytest.approx(10.0)
    assert rehearsed(jobs, curve=curve, slots=1).open_seconds == pytest.approx(15.0)
    assert rehearsed(jobs, curve=curve, max_running=1).open_seconds == pytest.approx(15.0)


def test_a_step_has_no_more_tokens_than_its_budget():
    curve = measured(lambda tokens: 1.0)
    assert rehearsed([Job(0.0, 100, 0, 1)], curve=curve, batched_tokens=25).ttft_p99 == pytest.approx(4.0)
    assert rehearsed([Job(0.0, 100, 0, 1)], curve=curve, long_prefill_tokens=50).ttft_p99 == pytest.approx(
        2.0
    )


def test_a_static_batch_waits_for_its_slots_or_its_timeout_and_starts_as_a_whole():
    curve = measured(lambda tokens: 1.0)
    late = rehearsed([Job(0.0, 10, 0, 2)], slots=2, curve=curve, static=True, static_batch_seconds=5.0)
    assert late.ttft_p99 == pytest.approx(6.0)
    full = [Job(0.0, 10, 0, 2), Job(1.0, 10, 0, 4), Job(2.0, 10, 0, 1)]
    found = rehearsed(full, slots=2, curve=curve, static=True, static_batch_seconds=5.0)
    # the first two run from 1 to 5; the third waits for their end and, from its arrival, for the timeout
    assert found.open_seconds == pytest.approx((3.0 - 0.0) + (5.0 - 1.0) + (8.0 - 2.0))


class Reading:
    """A device that reads weights or computes, whichever takes longer."""

    def seconds(self, work: StepWork) -> float:
        return max(0.025, 1.5e-4 * work.tokens)

    def host_seconds(self, work: StepWork) -> float:
        return 0.0


def simulated(calls, ratio):
    """The time that all requests are open, and the engine."""
    machine = Machine("device", "cuda", Reading(), 1 << 20, 4096, StepCost(), Front())
    plans = SchedulerOptions(max_num_seqs=64, mixed_prefill_ratio=ratio)
    made = make_fleet(plans, CacheOptions(), machine, with_rows=True)
    made.run(from_calls(calls, Synthesis(seed=1), None))
    return sum(row["e2e_seconds"] for row in made.tally.rows), made.replicas[0].engine


@pytest.mark.parametrize("ratio", [4.0, 0.7])
def test_a_rehearsal_tells_what_the_scheduler_would_do_with_other_settings(ratio):
    rng, now, calls = random.Random(1), 0.0, []
    while (now := now + rng.expovariate(3.0)) < 60.0:
        calls.append(Call(now, rng.randint(200, 1800), rng.randint(20, 100)))
    jobs = [Job(each.arrival, each.prompt_tokens, 0, each.output_tokens) for each in calls]
    learnt = simulated(calls, 4.0)[1]
    seconds, engine = simulated(calls, ratio)
    period, overlap = Period(0.0, 60.0, jobs), learnt.overlap
    found = SchedulerModel(period, engine.knobs, learnt.times.curve, 64, overlap=overlap).run()
    assert found.open_seconds == pytest.approx(seconds, rel=0.03)


def test_a_machine_that_was_busy_at_the_end_of_a_period_does_not_slow_down_all_of_its_rehearsal():
    """One client sends request after request of 30 steps; the last 60 of 2,460 steps take ten times as long."""
    times, now, jobs = StepTimes(StepCost(fixed_tokens=40, context_tokens=2000)), 0.0, []
    for request in range(82):
        jobs.append(Job(now, 1, 8, 30))
        for position in range(30):
            seconds = 0.001 if request < 80 else 0.01
            times.observe(1, 1, 9 + position, seconds)
            now += seconds
    found = rehearsed(jobs, now, curve=StepCurve.of(times.curve.measured()))
    assert found.seconds_per_token == pytest.approx(now / (82 * 30), rel=0.1)
