from __future__ import annotations

import math

import pytest

from headrace.core.prediction.step_curve import TOKENS_ONLY, StepCost
from headrace.core.prediction.step_times import StepTimes
from headrace.core.scheduler.other_work import OtherWork
from headrace.core.scheduler.step_builder import StepBuilder
from tests.core.scheduler.test_step_builder import HALF, predicting

RATIO = 4.0
"""A mixed prefill ratio with which other work is not bounded by what steps usually take."""


def test_other_work_and_prompts_share_what_may_be_added_to_decoding():
    times, other = StepTimes(StepCost(fixed_tokens=40), token_seconds=0.001), OtherWork()
    alone = predicting(21, times)  # 61 ms
    assert other.room(alone, RATIO, False) == pytest.approx(0.244)
    alone.limit_seconds = 0.07  # of a latency target
    assert other.room(alone, RATIO, False) == pytest.approx(0.009)
    beside = predicting(21, times)
    assert other.room(beside, RATIO, True) == pytest.approx(0.122)
    beside.spent_seconds = 0.01525
    assert beside.share(0, 1000, HALF) == (15, "budget")
    beside.spent_seconds = 1.0
    assert beside.share(0, 1000, HALF) == (1, "budget")  # prompts do not starve


def test_where_nothing_bounds_prompts_other_work_takes_as_long_as_the_step():
    times, other = StepTimes(StepCost(fixed_tokens=40), token_seconds=0.001), OtherWork()
    assert other.room(predicting(21, times), 0.0, False) == pytest.approx(0.061)
    assert other.room(predicting(0, times), 0.5, False) == pytest.approx(0.04)
    assert other.room(StepBuilder(0, budget=1, cost=TOKENS_ONLY), 0.5, False) == math.inf


def test_beside_work_in_the_background_half_of_the_prefill_time_is_left_free():
    times, other = StepTimes(StepCost(fixed_tokens=40), token_seconds=0.001), OtherWork()
    step = predicting(21, times)  # 61 ms
    assert other.left_free(step, 0.5, False) == 0.0
    other.background = 1
    assert other.left_free(step, 0.5, False) == other.left_free(step, 0.5, True) == pytest.approx(0.01525)
    assert other.room(step, RATIO, False) == pytest.approx(0.122)  # 0.244 without it
    assert other.room(step, RATIO, True) == pytest.approx(0.061)
    assert other.left_free(step, 0.0, True) == 0.0  # nothing bounds prompts
    assert other.left_free(predicting(0, times), 0.5, True) == 0.0
    assert other.left_free(StepBuilder(0, budget=1, cost=TOKENS_ONLY), 0.5, True) == 0.0


def test_with_other_work_or_images_a_quarter_of_the_prefill_time_is_left_free_where_gaps_count():
    times, other = StepTimes(StepCost(fixed_tokens=40), token_seconds=0.001), OtherWork()
    step = predicting(21, times)  # 61 ms
    assert other.left_free(step, 0.5, True) == pytest.approx(0.007625)
    assert other.left_free(step, RATIO, True) == 0.0


def test_beside_decoding_other_work_makes_a_gap_as_long_as_steps_often_are_without_it():
    times, other = StepTimes(StepCost(fixed_tokens=40), token_seconds=0.001), OtherWork()
    step, disturbed = predicting(21, times), predicting(21, times)
    disturbed.spent_seconds = 0.01
    least = other.room(step, 0.5, False)
    assert least == pytest.approx(0.75 * 0.0305 / 8)
    for number in range(2000):
        other.observe(step, 0.061 * (1.3 if number % 10 == 0 else 1.0))  # a tenth has a prompt
        other.observe(disturbed, 0.2)
    assert other.room(step, 0.5, False) == pytest.approx(0.3 * 0.061, rel=0.2)
    assert other.room(step, 0.4, False) == pytest.approx(0.3 * 0.061, rel=0.2)
    assert other.room(step, 0.2, False) == pytest.approx(0.75 * 0.2 * 0.061)  # as prompts
    assert other.room(step, 0.5, True) == pytest.approx(least / 2)  # the prompt makes the step long
    step.samples[-1:] = [False]
    assert other.room(step, 0.5, False) == pytest.approx(least / 2)
    step.samples[-1:] = [True]
    for _ in range(2000):
        other.observe(step, 0.061)
    assert other.room(step, 0.5, False) == pytest.approx(least)
