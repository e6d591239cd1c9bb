from __future__ import annotations

import math

import pytest

from headrace.core.prediction.step_curve import StepCost
from headrace.core.scheduler.victims import LastRanked, LowestRecomputeCost, slack_seconds
from headrace.core.sequence import Sequence
from tests.doubles.scenes import request


def running(
    rank: int,
    computed: int,
    *,
    produced: int = 0,
    cached: int = 0,
    latest_start: float = math.inf,
    started: float = 0.0,
    tpot_seconds: float = math.inf,
    **fields,
) -> Sequence:
    sequence = Sequence(request(f"r{rank}", computed, max_tokens=100, **fields), (rank,), 10_000)
    sequence.tokens += [7] * produced
    sequence.computed = sequence.planned = computed + produced
    sequence.cached_tokens = cached
    sequence.latest_start, sequence.started, sequence.tpot_seconds = latest_start, started, tpot_seconds
    return sequence


FIRST = running(0, 1)


def test_the_last_ranked_candidate_is_the_victim():
    candidates = [Sequence(request(f"r{i}"), (i,), 64) for i in range(3)]
    assert LastRanked().choose(candidates, 0.0) is candidates[2]


def test_the_least_work_is_lost_and_the_first_goes_on_though_it_has_least():
    candidates = [FIRST, running(1, 300), running(2, 40, produced=5), running(3, 500)]
    assert LowestRecomputeCost().choose(candidates, 0.0) is candidates[2]


def test_of_equals_the_last_gives_way():
    candidates = [FIRST, running(1, 30), running(2, 30), running(3, 30)]
    assert LowestRecomputeCost().choose(candidates, 0.0) is candidates[3]


def test_what_was_found_in_the_cache_is_not_lost():
    candidates = [FIRST, running(1, 100), running(2, 1000, cached=950)]
    assert LowestRecomputeCost().choose(candidates, 0.0) is candidates[2]


def test_long_contexts_cost_more_to_compute_again():
    candidates = [FIRST, running(1, 2100), running(2, 60_000, cached=58_000)]
    assert LowestRecomputeCost().choose(candidates, 0.0) is candidates[2]
    assert LowestRecomputeCost(StepCost(0, 1000)).choose(candidates, 0.0) is candidates[1]


def test_a_lower_class_gives_first_whatever_it_loses():
    candidates = [
        FIRST,
        running(1, 10, service_class="priority"),
        running(2, 900, service_class="flex"),
        running(3, 10, service_class="default"),
    ]
    assert LowestRecomputeCost().choose(candidates, 0.0) is candidates[2]


def test_little_slack_protects_and_a_missed_target_does_not():
    soon = running(1, 100, latest_start=2.0)
    calm = running(2, 160)
    assert LowestRecomputeCost().choose([FIRST, soon, calm], 0.0) is soon, "two seconds: half as much again"
    assert LowestRecomputeCost().choose([FIRST, soon, calm], 1.5) is calm, (
        "half a second: three times as much"
    )
    assert LowestRecomputeCost().choose([FIRST, soon, calm], 2.5) is soon, "too late for it in any case"


def test_earlier_preemptions_protect():
    once = running(1, 100)
    once.preemptions = 1
    other = running(2, 150)
    assert LowestRecomputeCost().choose([FIRST, once, other], 0.0) is other


@pytest.mark.parametrize(
    ("fields", "produced", "now", "slack"),
    [
        ({}, 0, 5.0, math.inf),
        ({"deadline": 9.0}, 0, 5.0, 4.0),
        ({"deadline": 9.0}, 0, 10.0, math.inf),
        ({"latest_start": 1.0}, 0, 0.25, 0.75),
        ({"latest_start": 1.0}, 0, 1.5, math.inf),
        ({"latest_start": 1.0}, 30, 0.25, math.inf),
        ({"started": 1.0, "tpot_seconds": 0.1}, 30, 1.5, 2.5),
        ({"started": 1.0, "tpot_seconds": 0.1}, 30, 4.5, math.inf),
        ({"started": 1.0, "tpot_seconds": 0.1, "deadline": 2.0}, 30, 1.5, 0.5),
    ],
)
def test_slack_is_the_time_until_the_next_promise_that_can_still_be_kept(fields, produced, now, slack):
    assert slack_seconds(running(1, 8, produced=produced, **fields), now) == pytest.approx(slack)
