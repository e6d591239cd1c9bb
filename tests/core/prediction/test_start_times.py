from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.prediction.output_lengths import LengthPredictor
from headrace.core.prediction.start_times import Batch, Forecaster, WorkAhead
from headrace.core.prediction.step_cost import StepCost
from headrace.core.prediction.step_times import StepTimes
from headrace.core.request import SamplingParams
from tests.doubles.scenes import request

ALONE = Batch(0, 0)
NOBODY = WorkAhead(work_seconds=0.0, share=1.0, free_slots=1, steps_left=(), waiting_steps=())


def forecaster(chunk_tokens: int = 100) -> Forecaster:
    """A step costs 10 ms and 1 ms a token; 1000 positions attended to cost as much as a token."""
    times = StepTimes(StepCost(fixed_tokens=10, context_tokens=1000), token_seconds=0.001)
    return Forecaster(times, LengthPredictor(10_000), chunk_tokens)


def exactly(prompt: int, output: int, **fields):
    params = SamplingParams(max_tokens=output, ignore_eos=True)
    return request("r", prompt, params=params, **fields)


def test_alone_it_starts_at_once_and_takes_its_own_steps():
    forecast = forecaster().expected(exactly(200, 11), NOBODY, ALONE)
    assert forecast.start == 0
    # two chunks of 110 ms, and 200 * 100 positions attended to
    assert forecast.first_token == pytest.approx(0.220 + 0.020)
    # ten more steps of 11 ms, each over 200 positions
    assert forecast.finish == pytest.approx(0.240 + 10 * 0.0112)


def test_what_is_cached_is_not_computed_but_attended_to():
    assert forecaster().expected(exactly(200, 1), NOBODY, ALONE, cached=150).first_token == pytest.approx(
        0.010 + 0.050 + 0.001 * (50 * 150 + 50 * 25) / 1000
    )


def test_others_that_decode_lengthen_every_step():
    batch = Batch(rows=10, contexts=5000)
    forecast = forecaster().expected(exactly(200, 11), NOBODY, batch)
    assert forecast.start == 0
    assert forecast.first_token == pytest.approx(2 * (0.010 + 0.010 + 0.005) + 0.200 + 0.020)
    assert forecast.finish - forecast.first_token == pytest.approx(10 * (0.010 + 0.011 + 0.005 + 0.0002))


def test_the_prompts_of_others_stretch_decoding():
    plain = forecaster().expected(exactly(200, 11), NOBODY, ALONE)
    stretched = forecaster().expected(exactly(200, 11), NOBODY, ALONE, slowdown=1.7)
    assert stretched.first_token == plain.first_token
    assert stretched.finish - stretched.first_token == pytest.approx(1.7 * (plain.finish - plain.first_token))


def test_work_ahead_takes_as_long_as_its_share_of_the_device_makes_it():
    ahead = NOBODY._replace(work_seconds=3.0, share=0.25)
    assert forecaster().expected(exactly(20, 1), ahead, ALONE).start == pytest.approx(12.0)


@pytest.mark.parametrize(
    ("waiting_steps", "free_slots", "steps"),
    [
        ([], 1, 0),
        ([50], 2, 0),
        ([], 0, 10),  # the one that ends first gives its slot
        ([50], 0, 30),
        ([50], 1, 10),
        ([50, 50], 1, 30),
        ([5], 0, 15),  # whoever took the first slot gives it back soonest
        ([50, 50, 50], 0, 60),
        ([50] * 6, 0, 110),
    ],
)
def test_without_a_slot_it_waits_for_those_that_run(waiting_steps, free_slots, steps):
    ahead = WorkAhead(0.0, 1.0, free_slots, (40, 10, 30), waiting_steps)
    batch = Batch(rows=3, contexts=1000)
    step_seconds = 0.010 + 0.003 + 0.001
    assert forecaster().expected(exactly(20, 1), ahead, batch).start == pytest.approx(steps * step_seconds)


def test_the_later_of_turn_and_slot_counts():
    ahead = WorkAhead(1.0, 1.0, 0, (10,), ())
    assert forecaster().expected(exactly(20, 1), ahead, Batch(1, 0)).start == pytest.approx(1.0)
    ahead = ahead._replace(work_seconds=0.001)
    assert forecaster().expected(exactly(20, 1), ahead, Batch(1, 0)).start == pytest.approx(0.110)


@given(
    prompt=st.integers(1, 3000),
    asked=st.integers(1, 3000),
    cached=st.floats(0, 0.99),
    ahead=st.builds(
        WorkAhead,
        work_seconds=st.floats(0, 100),
        share=st.floats(0.01, 1),
        free_slots=st.integers(0, 3),
        steps_left=st.lists(st.floats(0, 500), min_size=1, max_size=6),
        waiting_steps=st.lists(st.floats(0, 500), max_size=20),
    ),
    rows=st.integers(0, 64),
    slowdown=st.floats(1, 2),
)
def test_company_only_delays(prompt, asked, cached, ahead, rows, slowdown):
    asking = request("r", prompt, max_tokens=asked)
    found = int(prompt * cached)
    earliest = forecaster().expected(asking, NOBODY, ALONE, found)
    expected = forecaster().expected(asking, ahead, Batch(rows, rows * 700), found, slowdown)
    assert earliest.start <= earliest.first_token <= earliest.finish
    assert expected.start <= expected.first_token <= expected.finish
    assert all(bound <= likely + 1e-9 for bound, likely in zip(earliest, expected, strict=True))
