from __future__ import annotations

import dataclasses

import pytest

from headrace.lab.forced_acceptance import Speculation
from headrace.lab.plan.capacity import Demand, Impossible, Settings, Slo, best_steady, steady
from headrace.lab.plan.roofline import A100, CPU, H100, SHAPES, Load, Replica

EIGHT_B = SHAPES["llama-3.1-8b"]
CHAT = Demand(2.0, 1000, 1000, 200, 1100, 2000, (500, 1000, 1500))
EASY = Slo(ttft=2.0, tpot=0.05)
SETTINGS = Settings(max_num_seqs=256, max_num_batched_tokens=2048)


def test_the_steady_state_by_hand():
    replica = Replica(EIGHT_B, H100)
    # 40 sequences draw 40 tokens a step, of 200 each: one request in five ends, 200 prompt tokens begin.
    load = Load(40, 200, 40 * 1100 + 200 * 500, 40 * 1100 + 0.2 * 1000, 40)
    state = steady(replica, CHAT, 40)
    assert state.step_seconds == replica.step_seconds(load)
    assert state.requests_per_second == pytest.approx(0.2 / state.step_seconds)


def test_the_best_state_keeps_the_pace_and_one_more_would_not():
    replica = Replica(EIGHT_B, H100)
    slo = Slo(ttft=2.0, tpot=0.012)
    best = best_steady(replica, CHAT, slo, SETTINGS)
    assert 1 < best.sequences < 256
    assert best.step_seconds <= slo.tpot < steady(replica, CHAT, best.sequences + 1).step_seconds


def test_memory_bounds_the_sequences():
    long = dataclasses.replace(CHAT, context=20_000, longest=30_000)
    replica = Replica(EIGHT_B, H100)
    blocks = replica.num_blocks(16, 2048, 256)
    best = best_steady(replica, long, Slo(60, 60), SETTINGS)
    assert best.sequences == blocks // (20_000 // 16)


@pytest.mark.parametrize(
    ("replica", "demand", "slo", "message"),
    [
        (Replica(SHAPES["llama-3.1-70b"], A100), CHAT, EASY, r"1 x A100-80G: weights of 141\.1 GB"),
        (Replica(EIGHT_B, CPU), CHAT, EASY, r"1 x cpu: a single stream takes 698\.7 ms"),
        (Replica(EIGHT_B, H100), CHAT, Slo(0.01, 0.05), r"a prompt of 1500 tokens alone takes 0\.0\d s"),
        (
            Replica(EIGHT_B, H100),
            dataclasses.replace(CHAT, longest=1_000_000),
            EASY,
            "longest request has 1000000 tokens",
        ),
    ],
)
def test_what_no_load_can_mend_is_said(replica, demand, slo, message):
    with pytest.raises(Impossible, match=message):
        best_steady(replica, demand, slo, SETTINGS)


def test_drafts_raise_the_rate_as_far_as_they_pay():
    replica, slo = Replica(EIGHT_B, H100), Slo(ttft=2.0, tpot=0.012)
    few = SETTINGS._replace(max_num_seqs=8)
    plain = best_steady(replica, CHAT, slo, few)
    good = best_steady(replica, CHAT, slo, few, Speculation((0.8,)))
    assert plain.drafts == 0
    assert good.drafts > 0
    assert good.tpot <= slo.tpot
    assert good.tokens == pytest.approx(sum(0.8**at for at in range(good.drafts + 1)))
    assert good.requests_per_second > 1.5 * plain.requests_per_second
    none = best_steady(replica, CHAT, slo, few, Speculation((0.0,)))
    assert none == plain
    costly = best_steady(replica, CHAT, slo, few, Speculation((0.8,), cost=0.9))
    assert costly.requests_per_second < good.requests_per_second


def test_one_stream_may_meet_a_target_with_drafts_alone():
    replica, pace = Replica(EIGHT_B, H100), Slo(ttft=2.0, tpot=0.004)
    with pytest.raises(Impossible, match="a single stream takes"):
        best_steady(replica, CHAT, pace, SETTINGS)
    assert best_steady(replica, CHAT, pace, SETTINGS, Speculation((0.9,))).tpot <= pace.tpot
