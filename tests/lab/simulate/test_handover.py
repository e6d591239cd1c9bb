from __future__ import annotations

import random

import pytest

from headrace.config import CacheOptions, ConfigError, SchedulerOptions
from headrace.core.peers import PeersAnswered, Pulled
from headrace.core.prediction.step_curve import TOKENS_ONLY
from headrace.lab.simulate.fleet import Wire
from headrace.lab.simulate.runner import Front
from headrace.lab.workload.work import Call, Span
from headrace.wiring.simulation import Machine, make_fleet
from tests.lab.simulate.scenes import Fixed, run

FREE = Wire(0.0, 1e30)
TOKEN = 0.001


def fleet(replicas, prefill, wire=FREE, *, routing="round-robin", kv_tokens=4096, host=1 << 20, step=512):
    """Replicas on which a token takes `TOKEN` seconds; blocks of 4 tokens and 64 bytes."""
    machine = Machine("m", "cpu", Fixed(0.0, TOKEN), kv_tokens, 512, TOKENS_ONLY, Front(), 64, 1e12)
    cache = CacheOptions(block_size=4, kv_offload_bytes=host)
    plans = SchedulerOptions(max_num_seqs=8, max_num_batched_tokens=step)
    return make_fleet(
        plans, cache, machine, replicas=replicas, routing=routing, prefill=prefill, wire=wire, with_rows=True
    )


def first_token(wire, prompt=81):
    (group,) = run(fleet(2, 1, wire), [Call(1.0, prompt, 5)]).groups
    return group.ttft[0]


def crowd(count=50, seed=3):
    rng, now, calls = random.Random(seed), 0.0, []
    for _ in range(count):
        now += rng.expovariate(12.0)
        content = (Span(rng.randrange(5), 0, rng.randint(1, 200)),) if rng.random() < 0.5 else ()
        prompt = content[0].length if content else rng.randint(1, 300)
        calls.append(Call(now, prompt, rng.randint(1, 30), rng.choice("ab"), content=content))
    return calls


def pace(tally, output_tokens):
    """Seconds per token of the one request with so many."""
    return next(row["tpot_seconds"] for row in tally.rows if row.get("output_tokens") == output_tokens)


class Seen:
    def __init__(self):
        self.events = []

    def fold(self, event, now):
        self.events.append(event)

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(("routing", "kv_tokens"), [("least-loaded", 4096), ("prefix-affinity", 520)])
def test_every_request_ends_once_with_all_its_tokens(routing, kv_tokens, at_once):
    calls = crowd()
    wire = Wire(0.002, 1e5, at_once)
    tally = run(fleet(4, 2, wire, routing=routing, kv_tokens=kv_tokens, step=64), calls)
    assert len(tally.rows) == len({row["request"] for row in tally.rows}) == len(calls)
    assert sum(group.output_tokens for group in tally.groups) == sum(call.output_tokens for call in calls)
    assert sum(group.prompt_tokens for group in tally.groups) == sum(call.prompt_tokens for call in calls)
    assert not any(group.failed for group in tally.groups)


def test_a_prompt_that_is_too_long_fails_once():
    tally = run(fleet(2, 1), [Call(0.0, 600, 5), Call(0.1, 20, 5)])
    assert [sum(group.failed.values()) for group in tally.groups] == [1]
    assert len(tally.rows) == 2


def test_with_a_free_transfer_only_the_tokens_behind_the_last_block_are_computed_again():
    (alone,) = run(fleet(1, 0), [Call(1.0, 81, 5)]).groups
    assert alone.ttft[0] == pytest.approx(81 * TOKEN)
    assert first_token(FREE) == pytest.approx(alone.ttft[0] + TOKEN)


def test_latency_and_bandwidth_come_on_top():
    free, blocks = first_token(FREE), 20
    assert first_token(Wire(0.5, 1e30)) == pytest.approx(free + 0.5)
    assert first_token(Wire(0.7, 1e30)) == pytest.approx(free + 0.7)
    assert first_token(Wire(0.0, 64_000)) == pytest.approx(free + blocks * 64 / 64_000)


def test_at_once_a_chunk_is_copied_while_the_next_one_is_computed():
    def first(at_once, prompt):
        wire = Wire(0.0, 64 / 0.003, at_once)  # a block is computed in 4 ms and copied in 3 ms
        live = fleet(2, 1, wire, step=100)
        (group,) = run(live, [Call(1.0, prompt, 5)]).groups
        assert group.cached_tokens == prompt - 1
        return group.ttft[0]

    computing, copying = 401 * TOKEN, 100 * 0.003
    assert first(False, 401) == pytest.approx(computing + copying + TOKEN)
    assert first(True, 401) == pytest.approx(computing + copying / 4 + TOKEN, abs=0.02)
    assert first(True, 81) == pytest.approx(first(False, 81), abs=0.02)


def test_decode_replicas_pull_only_what_they_lack():
    live, seen = fleet(2, 1), Seen()
    live.replicas[0].watch(seen)
    same = (Span(1, 0, 41),)
    run(live, [Call(0.0, 41, 3, content=same), Call(5.0, 81, 3, content=(Span(1, 0, 81),))])
    assert [each.asked_tokens for each in seen.of(PeersAnswered)] == [40, 40]
    assert sum(each.blocks for each in seen.of(Pulled)) == 20


def test_two_transfers_from_one_replica_share_its_connection():
    calls = [Call(0.0, 81, 3), Call(0.0, 81, 3)]
    alone = run(fleet(3, 1, Wire(0.0, 64_000)), calls[:1]).groups[0].ttft
    both = run(fleet(3, 1, Wire(0.0, 64_000)), calls).groups[0].ttft
    assert max(both) >= max(alone) + 20 * 64 / 64_000


def test_long_prompts_do_not_hold_up_decoding():
    steady = [Call(0.0, 8, 400)]
    long = [Call(0.1 + 0.05 * i, 200, 2) for i in range(5)]
    shared, apart = (pace(run(live, steady + long), 400) for live in (fleet(1, 0), fleet(2, 1)))
    assert apart < 1.1 * TOKEN
    assert shared > 2 * TOKEN


def test_blocks_need_host_memory_to_arrive_in():
    with pytest.raises(ConfigError, match="--kv-offload-bytes"):
        fleet(2, 1, host=0)


def test_a_fleet_can_be_warmed_up():
    from headrace.lab.simulate.runner import from_work
    from headrace.lab.workload.work import Work

    work = [Work(f"w{i}", tuple(range(1, 30)), 4, arrival=0.01 * i, ignore_eos=True) for i in range(6)]
    live = fleet(3, 1)
    live.warm_up(from_work(work))
    live.run(from_work(work, live.now))
    assert len(live.tally.rows) == 6
