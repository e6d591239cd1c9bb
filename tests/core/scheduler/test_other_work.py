from __future__ import annotations

import math

import pytest

from headrace.core.prediction.step_curve import TOKENS_ONLY, StepCost
from headrace.core.prediction.step_times import StepTimes
from headrace.core.scheduler.other_work import room_before
from headrace.core.scheduler.step_builder import StepBuilder
from tests.core.scheduler.test_step_builder import HALF, predicting


def test_other_work_and_prompts_share_what_may_be_added_to_decoding():
    times = StepTimes(StepCost(fixed_tokens=40), token_seconds=0.001)
    alone = predicting(21, times)  # 61 ms
    assert room_before(alone, 0.5) == pytest.approx(0.0305)
    alone.limit_seconds = 0.07  # of a latency target
    assert room_before(alone, 0.5) == pytest.approx(0.009)
    beside = predicting(21, times)
    beside.prompts = 1
    assert room_before(beside, 0.5) == pytest.approx(0.01525)
    beside.spent_seconds = room_before(beside, 0.5)
    assert beside.share(0, 1000, HALF) == (15, "budget")
    beside.spent_seconds = 1.0
    assert beside.share(0, 1000, HALF) == (1, "budget")  # prompts do not starve


def test_where_nothing_bounds_prompts_other_work_takes_as_long_as_the_step():
    times = StepTimes(StepCost(fixed_tokens=40), token_seconds=0.001)
    assert room_before(predicting(21, times), 0.0) == pytest.approx(0.061)
    assert room_before(predicting(0, times), 0.5) == pytest.approx(0.04)
    assert room_before(StepBuilder(0, budget=1, cost=TOKENS_ONLY), 0.5) == math.inf
