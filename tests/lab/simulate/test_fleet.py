from __future__ import annotations

import random
from dataclasses import replace

import pytest

from headrace.config import CacheOptions, SchedulerOptions
from headrace.core.engine import Engine
from headrace.core.events import Emitted
from headrace.core.request import Slo
from headrace.core.scheduler.routing import LeastLoaded, PrefixAffinity, RoundRobin
from headrace.core.tenancy.gate import Limits
from headrace.lab.plan.roofline import H100, SHAPES, Replica
from headrace.lab.simulate.fleet import OneAnswer, simulated_target
from headrace.lab.simulate.runner import from_calls
from headrace.lab.simulate.tally import Tally
from headrace.lab.workload.dataset import fixed_lengths
from headrace.lab.workload.work import Call, Span, Synthesis
from headrace.wiring.simulation import make_replica, roofline_machine
from tests.lab.simulate.scenes import Fixed, fleet, run


def crowd(count: int = 120, seed: int = 5, gap: float = 0.02) -> list[Call]:
    rng = random.Random(seed)
    now, calls = 0.0, []
    for _ in range(count):
        now += rng.expovariate(1 / gap)
        stream = rng.randrange(6)
        content = (Span(stream, 0, rng.randint(1, 60)),) if rng.random() < 0.5 else ()
        prompt = content[0].length if content else rng.randint(1, 80)
        calls.append(Call(now, prompt, rng.randint(1, 30), rng.choice("ab"), content=content))
    return calls


def figures(tally: Tally) -> list:
    return [
        (g.tenant, list(g.ttft), list(g.e2e), g.output_tokens, g.cached_tokens, g.failed)
        for g in tally.groups
    ]


def overloaded(policy: str) -> list[float]:
    """Times to the first tokens of those who hope for it within a second, where half as many again come as can be
    served."""
    rng, now, calls = random.Random(0), 0.0, []
    for _ in range(900):
        now += rng.expovariate(18.0)
        calls.append(Call(now, rng.randint(8, 120), rng.randint(1, 40)))
    live = fleet(Fixed(0.01, 0.0008), num_blocks=2000, policy=policy)
    asked = from_calls(calls, Synthesis(), 64)
    live.run(each._replace(request=replace(each.request, slo=Slo(1.0))) for each in asked)
    (group,) = live.tally.groups
    return list(group.ttft)


def test_under_overload_requests_that_are_not_deferred_meet_their_target():
    waits = overloaded("fair")
    in_time = sum(each <= 1.0 for each in waits)
    assert in_time > 4 * sum(each <= 1.0 for each in overloaded("fcfs"))
    assert sum(1.0 < each < 1.5 for each in waits) < 0.02 * in_time


def test_times_by_hand():
    # One prompt of 8 in one step of 0.01 + 8 x 0.001, then two steps of 0.01 + 0.001 for three tokens in all.
    tally = run(fleet(Fixed(0.01, 0.001)), [Call(1.0, 8, 3)])
    (group,) = tally.groups
    assert list(group.ttft) == [pytest.approx(0.018)]
    assert list(group.tpot) == [pytest.approx(0.011)]
    assert list(group.e2e) == [pytest.approx(0.040)]
    assert (group.prompt_tokens, group.output_tokens, group.failed) == (8, 3, {})
    assert (tally.began, tally.ended) == (1.0, pytest.approx(1.04))


def test_a_request_that_comes_during_a_step_waits_for_its_end():
    tally = run(fleet(Fixed(1.0)), [Call(0.0, 4, 2), Call(0.5, 4, 1)])
    assert list(tally.groups[0].ttft) == [1.0, 1.5]


def test_a_request_that_arrives_during_a_step_delays_its_end():
    calls = [Call(0.0, 4, 3), Call(0.5, 4, 1)]
    (group,) = run(fleet(Fixed(1.0), front=(0.0, 0.0, 0.25)), calls).groups
    assert sorted(group.ttft) == [1.25, 1.75]
    assert max(group.e2e) == 3.25
    (group,) = run(fleet(Fixed(1.0), front=(0.0, 0.0, 0.25)), calls[:1]).groups
    assert list(group.e2e) == [3.0]


def test_a_request_that_finds_the_engine_idle_wakes_it_once():
    front = (0.0, 0.0, 0.0, 0.0, 0.5)
    calls = [Call(0.0, 4, 3), Call(0.5, 4, 1), Call(9.0, 4, 2)]
    (group,) = run(fleet(Fixed(1.0), front=front), calls).groups
    assert sorted(group.ttft) == [1.0, 1.0, 2.0], "the second one waits for the step that is delayed"
    assert sorted(group.e2e) == [2.0, 2.5, 3.5]


def test_a_request_that_arrives_during_a_step_is_read_faster():
    front = (0.5, 0.0, 0.0, 0.0, 0.0, 0.25)
    (group,) = run(fleet(Fixed(1.0), front=front), [Call(0.0, 4, 3), Call(1.0, 4, 1)]).groups
    assert sorted(group.ttft) == [1.5, 1.5]


def test_with_overlap_the_host_hides_behind_the_device():
    calls = [Call(0.0, 4, 50)]
    serial = run(fleet(Fixed(0.01, host=0.004), overlap=0), calls)
    hidden = run(fleet(Fixed(0.01, host=0.004), overlap=1), calls)
    assert serial.groups[0].tpot[0] == pytest.approx(0.014)
    assert hidden.groups[0].tpot[0] == pytest.approx(0.010)
    slow_host = run(fleet(Fixed(0.01, host=0.025), overlap=1), calls)
    assert slow_host.groups[0].tpot[0] == pytest.approx(0.025)


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("num_blocks", [400, 40])
def test_every_request_ends_once_with_the_length_that_only_the_runner_knew(overlap, num_blocks):
    calls = crowd()
    live = fleet(Fixed(), overlap=overlap, num_blocks=num_blocks, max_model_len=120)
    tally = run(live, calls)
    assert (tally.preemptions > 0) == (num_blocks == 40)
    assert sum(len(group.e2e) for group in tally.groups) == len(calls)
    for group in tally.groups:
        mine = [call for call in calls if call.tenant == group.tenant]
        assert group.output_tokens == sum(call.output_tokens for call in mine)
        assert group.prompt_tokens == sum(call.prompt_tokens for call in mine)
        assert not group.failed
    assert tally.gaps.count == sum(call.output_tokens - 1 for call in calls)
    live.replicas[0].engine.check_consistency()
    backlog = live.replicas[0].backlog
    assert (backlog.open_requests, backlog.open_tokens, backlog.queued_requests, backlog.queued_tokens) == (
        0,
    ) * 4
    assert not live._answers


def texts(monkeypatch, overlap: int) -> dict[str, list[int]]:
    seen: dict[str, list[int]] = {}
    step = Engine.step

    def watched(self, now):
        events = step(self, now)
        for event in events:
            if isinstance(event, Emitted):
                seen.setdefault(event.request_id, []).extend(event.tokens)
        return events

    monkeypatch.setattr(Engine, "step", watched)
    run(fleet(Fixed(), overlap=overlap, num_blocks=40, max_model_len=120), crowd())
    return seen


def test_overlap_changes_times_but_no_text(monkeypatch):
    serial = texts(monkeypatch, 0)
    monkeypatch.undo()
    assert serial == texts(monkeypatch, 1)


def test_the_scheduler_has_no_oracle():
    live = fleet(Fixed())
    finish = []
    monitor = live.replicas[0].engine.scheduler.add

    def watched(request, now):
        finish.append(request.params.max_tokens)
        monitor(request, now)

    live.replicas[0].engine.scheduler.add = watched
    tally = run(live, [Call(0.0, 4, 3), Call(0.0, 4, 80)], max_tokens=40)
    assert finish == [40, 40]
    assert tally.groups[0].output_tokens == 3 + 40, "the longer one is cut at what it asked for"


def test_an_answer_can_be_found_by_the_turn_after_it():
    first = Call(0.0, 16, 9, content=(Span(3, 0, 16),), answer=Span(3, 16, 9))
    second = Call(1.0, 30, 2, content=(Span(3, 0, 30),))
    tally = run(fleet(Fixed()), [first, second])
    assert tally.groups[0].cached_tokens == 24, "of 25 tokens the last was never computed"


@pytest.mark.parametrize("routing", [RoundRobin, LeastLoaded, lambda: PrefixAffinity(16)])
def test_equal_runs_are_equal_to_the_last_bit(routing):
    def once() -> list:
        live = fleet(Fixed(0.01, 1e-4), 3, routing=routing(), overlap=1, front=(0.001, 1e-5))
        return figures(run(live, crowd()))

    assert once() == once()


def test_affinity_finds_more_than_round_robin():
    def cached(routing) -> int:
        tally = run(fleet(Fixed(), 3, routing=routing), crowd(400))
        return sum(group.cached_tokens for group in tally.groups)

    assert cached(PrefixAffinity(16)) > cached(RoundRobin())


def test_replicas_share_the_load():
    one = run(fleet(Fixed(0.05)), crowd())
    four = run(fleet(Fixed(0.05), 4), crowd())
    assert four.ended < one.ended


def test_the_gate_turns_away_what_may_not_wait():
    live = fleet(Fixed(1.0), max_num_seqs=1, limits=Limits(2, 1000))
    tally = run(live, [Call(0.1 * i, 4, 2) for i in range(6)])
    (group,) = tally.groups
    assert group.failed == {"queue_full": 4}, "until its step has ended the first one counts as waiting"
    assert len(group.e2e) == 2


def test_an_unservable_workload_is_reported():
    tally = run(fleet(Fixed(), max_model_len=64), [Call(0.0, 64, 2), Call(0.0, 63, 2)])
    (group,) = tally.groups
    assert group.failed == {"rejected": 1}
    assert group.output_tokens == 1


def test_the_front_takes_its_time_for_requests_and_for_tokens():
    tally = run(fleet(Fixed(0.01), front=(0.1, 0.001)), [Call(0.0, 4, 3), Call(0.0, 4, 3)])
    first, second = sorted(tally.groups[0].ttft)
    assert first == pytest.approx(0.2 + 0.001, abs=1e-9), "its token waits behind the second request"
    assert second == pytest.approx(0.2 + 0.01 + 2 * 0.001, abs=2e-3)


def test_a_step_costs_what_the_plan_says():
    device = Fixed()
    run(fleet(device, batched_tokens=16), [Call(0.0, 20, 3)])
    assert [(w.rows, w.tokens, w.read_tokens, w.samples) for w in device.seen] == [
        (1, 16, 16, 0),
        (1, 4, 20, 1),
        (1, 1, 21, 1),
        (1, 1, 22, 1),
    ]


def target(concurrency=None, **plans):
    options, cache = SchedulerOptions(**plans), CacheOptions()
    machine = roofline_machine(Replica(SHAPES["llama-3.1-8b"], H100), cache, options, 4096)
    return simulated_target("t", *make_replica(options, cache, machine, OneAnswer()), concurrency)


WORK = fixed_lengths(32, 100, 20)


def test_outputs_have_the_length_of_their_work_and_times_are_virtual():
    records = target().run(WORK)
    assert all(not each.error and each.output_tokens == 20 for each in records)
    assert 0.1 < max(each.finished for each in records) < 2.0
    assert all(len(each.token_seconds) == 20 for each in records)


def test_equal_runs_are_equal():
    one = target()
    assert target().run(WORK) == one.run(WORK)


def test_a_closed_loop_has_so_many_requests_open_and_arrivals_when_they_are_sent():
    records = target(concurrency=4).run(WORK)
    ends = sorted((each.arrived, each.finished) for each in records)
    for arrived, _ in ends:
        assert sum(a <= arrived < f for a, f in ends) <= 4
    assert max(arrived for arrived, _ in ends) > 0.0
    assert max(each.ttft for each in records) < max(each.ttft for each in target(max_num_seqs=4).run(WORK))


@pytest.mark.parametrize("concurrency", [1, 3])
def test_static_batches_that_stay_incomplete_start_after_their_timeout(concurrency):
    records = target(concurrency, scheduling_policy="static", max_num_seqs=8).run(WORK[:6])
    assert all(not each.error for each in records)
    assert min(each.ttft for each in records) >= 0.1
