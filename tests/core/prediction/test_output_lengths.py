from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.prediction import output_lengths as lengths
from headrace.core.prediction.output_lengths import LengthPredictor
from headrace.core.request import Request, SamplingParams
from tests.doubles.scenes import request

MODEL_LEN = 8192


def geometric(rng: random.Random) -> int:
    return 1 + int(rng.expovariate(1 / 150))


def lognormal(rng: random.Random) -> int:
    return max(1, int(rng.lognormvariate(5, 1)))


def short_or_long(rng: random.Random) -> int:
    return rng.randint(1, 12) if rng.random() < 0.5 else rng.randint(700, 1400)


STREAMS = [geometric, lognormal, short_or_long]


def taught(draw: Callable[[random.Random], int], count: int, asking: Request) -> LengthPredictor:
    predictor = LengthPredictor(MODEL_LEN)
    rng = random.Random(3)
    for _ in range(count):
        predictor.observe(asking, min(draw(rng), predictor.limit(asking)))
    return predictor


@cache
def drawn(draw: Callable[[random.Random], int]) -> list[int]:
    """Lengths of other requests than the predictor has seen; drawn once for all tests."""
    rng = random.Random(4)
    return [draw(rng) for _ in range(40_000)]


@pytest.mark.parametrize("draw", STREAMS)
@pytest.mark.parametrize("produced", [0, 8, 200])
@pytest.mark.parametrize("q", [0.25, 0.5, 0.9, 0.97])
def test_a_quantile_covers_its_share_of_what_is_still_running(draw, produced, q):
    asking = request("r", max_tokens=2000)
    predictor = taught(draw, 4000, asking)
    running = [length for length in drawn(draw) if length > produced]
    bound = predictor.quantile(asking, q, given=produced)
    covered = sum(min(length, 2000) <= bound for length in running) / len(running)
    one_token_less = sum(min(length, 2000) < bound for length in running) / len(running)
    assert one_token_less - 0.06 <= q <= covered + 0.06


@pytest.mark.parametrize("draw", STREAMS)
@pytest.mark.parametrize("produced", [0, 8, 200])
def test_the_mean_is_that_of_what_is_still_running(draw, produced):
    asking = request("r", max_tokens=1000)
    predictor = taught(draw, 4000, asking)
    running = [min(length, 1000) for length in drawn(draw) if length > produced]
    assert predictor.expected(asking, given=produced) == pytest.approx(sum(running) / len(running), rel=0.08)


@settings(max_examples=60)
@given(
    seen=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9000)), max_size=60),
    asked=st.one_of(st.none(), st.integers(1, 20_000)),
    least=st.integers(0, 50),
    prompt=st.integers(1, MODEL_LEN - 1),
)
def test_predictions_stay_within_the_limit_and_grow_with_what_was_produced(seen, asked, least, prompt):
    predictor = LengthPredictor(MODEL_LEN)
    params = SamplingParams(max_tokens=asked, min_tokens=min(least, asked or least))
    asking = Request("r", tuple(range(prompt)), params, tenant="t0")
    for tenant, length in seen:
        predictor.observe(request("s", max_tokens=asked, tenant=f"t{tenant}"), length)
    limit = predictor.limit(asking)
    assert limit == min(MODEL_LEN - prompt, asked or MODEL_LEN)
    before = 0
    for produced in sorted({0, 1, 2, 5, 14, 15, 16, 100, limit // 2, limit - 1}):
        if produced >= limit:
            continue
        quantiles = [predictor.quantile(asking, q, given=produced) for q in (0.0, 0.1, 0.5, 0.9, 0.999)]
        assert quantiles == sorted(quantiles)
        assert quantiles[2] >= before
        before = quantiles[2]
        least_end = max(produced + 1, min(params.min_tokens, limit))
        assert least_end <= quantiles[0]
        assert quantiles[-1] <= limit
        assert least_end <= predictor.expected(asking, given=produced) <= limit


def test_before_any_answer_the_prior_is_a_chat_answer():
    predictor = LengthPredictor(100_000)
    asking = request("r", max_tokens=None)
    assert predictor.expected(asking) == pytest.approx(lengths.PRIOR_TOKENS, rel=0.02)
    assert predictor.quantile(asking, 0.5) == pytest.approx(lengths.PRIOR_TOKENS * (2**0.5 - 1), rel=0.03)
    assert predictor.quantile(asking, 0.5, given=4000) > 5000, "who has produced much may produce much more"


def test_a_new_tenant_is_predicted_like_the_others_until_it_has_observations():
    predictor = LengthPredictor(MODEL_LEN)
    for _ in range(200):
        predictor.observe(request("o", max_tokens=1000, tenant="old"), 100)
    new = request("n", max_tokens=1000, tenant="new")
    assert predictor.quantile(new, 0.5) == pytest.approx(100, rel=0.1)
    for _ in range(60):
        predictor.observe(new, 700)
    assert predictor.quantile(new, 0.5) == pytest.approx(700, rel=0.1)
    assert predictor.quantile(request("o", max_tokens=1000, tenant="old"), 0.9) < 120


def test_requests_with_large_and_small_max_tokens_have_separate_predictions():
    predictor = LengthPredictor(MODEL_LEN)
    for _ in range(100):
        predictor.observe(request("s", max_tokens=64), 20)
        predictor.observe(request("l", max_tokens=4000), 900)
    assert predictor.quantile(request("s", max_tokens=64), 0.5) < 25
    assert predictor.quantile(request("l", max_tokens=4000), 0.5) > 800


def test_an_answer_at_its_limit_predicts_that_others_reach_theirs():
    predictor = LengthPredictor(MODEL_LEN)
    for _ in range(100):
        predictor.observe(request("s", max_tokens=520), 520)
    assert predictor.quantile(request("l", max_tokens=1000), 0.5) == 1000


def test_drift_is_followed():
    predictor = LengthPredictor(MODEL_LEN)
    asking = request("r", max_tokens=1000)
    for _ in range(3000):
        predictor.observe(asking, 50)
    for _ in range(2 * lengths.DECAY_OBSERVATIONS):
        predictor.observe(asking, 800)
    assert predictor.quantile(asking, 0.5) > 700


def test_old_weights_shrink_before_floats_run_out():
    predictor = LengthPredictor(MODEL_LEN)
    asking = request("r", max_tokens=1000)
    for i in range(30 * lengths.DECAY_OBSERVATIONS):
        predictor.observe(asking, 90 if i % 2 else 400)
    assert predictor.quantile(asking, 0.4) == pytest.approx(90, rel=0.1)
    assert predictor.quantile(asking, 0.6) == pytest.approx(400, rel=0.1)


def test_an_answer_that_only_its_limit_can_end_reaches_it():
    predictor = LengthPredictor(MODEL_LEN)
    sure = request("r", params=SamplingParams(max_tokens=500, ignore_eos=True))
    maybe = request("r", params=SamplingParams(max_tokens=500, ignore_eos=True, stop_token_ids=(3,)))
    assert predictor.quantile(sure, 0.1) == 500 == predictor.expected(sure)
    assert predictor.quantile(maybe, 0.1) < 500
    for _ in range(100):
        predictor.observe(sure, 500)
    assert predictor.quantile(maybe, 0.1) < 500, "what was forced says nothing of those that are free to end"


def test_many_tenants_do_not_fill_the_memory_and_the_coarser_keys_are_kept():
    predictor = LengthPredictor(MODEL_LEN)
    for kind in range(14):  # so that keys of every coarseness grow old
        for i in range(lengths.MAX_KEYS // 4):
            predictor.observe(request("r", max_tokens=1 << kind, tenant=f"t{kind}-{i}"), 1)
    for _ in range(3):
        predictor.observe(request("r", max_tokens=1, tenant="back"), 1)
    assert len(predictor._keys) == lengths.MAX_KEYS
    assert all(
        known.coarser is None or known.coarser.key in predictor._keys for known in predictor._keys.values()
    )
    assert predictor.quantile(request("r", max_tokens=1 << 13, tenant="never seen"), 0.9) < 10


@pytest.mark.parametrize("limit", [5, 100, 4000])
def test_the_prior_alone_has_a_closed_form(limit):
    assert lengths.prior_tokens(limit) == pytest.approx(
        LengthPredictor(MODEL_LEN).expected(request("r", max_tokens=limit)), rel=0.02, abs=0.6
    )
    assert lengths.prior_tokens(float("inf")) == lengths.PRIOR_TOKENS
