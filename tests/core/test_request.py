""""""

from __future__ import annotations

import math

import pytest

from headrace.core.request import SEED_BITS, InvalidParameter, SamplingParams, choice_seed

WRONG = [
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("top_k", -2),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", 1e-39),
    ("top_k", 2**63),
    ("logprobs", 2**63),
    ("max_tokens", 2**31),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("max_tokens", 0),
    ("min_tokens", -1),
    ("logprobs", -1),
    ("prompt_logprobs", -1),
    ("logit_bias", ((1, 100.5),)),
    ("logit_bias", ((1, math.nan),)),
    ("allowed_token_ids", ()),
    ("bad_words", ((1,), ())),
    ("stop", ("a", "")),
]
RIGHT = [
    ("temperature", 0.0),
    ("top_p", 1e-6),
    ("top_k", -1),
    ("top_k", 0),
    ("min_p", 1.0),
    ("presence_penalty", -2.0),
    ("max_tokens", None),
    ("logprobs", 0),
    ("logit_bias", ((1, -100.0), (2, 100.0))),
    ("allowed_token_ids", (3,)),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_field_out_of_range_is_named(field, value):
    with pytest.raises(InvalidParameter, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


@pytest.mark.parametrize(("field", "value"), RIGHT)
def test_the_ends_of_each_range_are_allowed(field, value):
    assert getattr(SamplingParams(**{field: value}), field) == value


def test_min_tokens_must_not_exceed_max_tokens():
    SamplingParams(min_tokens=4, max_tokens=4)
    with pytest.raises(InvalidParameter, match=r"min_tokens \(5\)") as caught:
        SamplingParams(min_tokens=5, max_tokens=4)
    assert caught.value.param == "min_tokens"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("max_tokens", 3.5),
        ("max_tokens", True),
        ("top_k", None),
        ("ignore_eos", 1),
        ("stop", (1,)),
        ("stop_token_ids", ("a",)),
        ("stop_token_ids", 7),
        ("allowed_token_ids", "abc"),
        ("bad_words", ("word",)),
    ],
)
def test_a_wrong_type_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidParameter, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


def test_plain_forms_are_brought_to_tuples() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[1, 2], logit_bias={5: 1.0}, bad_words=[[1, 2]])
    assert params.stop == ("end",)
    assert params.stop_token_ids == (1, 2)
    assert params.logit_bias == ((5, 1.0),)
    assert params.bad_words == ((1, 2),)
    assert hash(params) == hash(
        SamplingParams(stop=("end",), stop_token_ids=(1, 2), logit_bias=((5, 1.0),), bad_words=((1, 2),))
    )


def test_the_first_choice_has_the_seed_of_the_call() -> None:
    assert [choice_seed(seed, 0) for seed in (0, 7, 2**63 + 1, -1)] == [0, 7, 1, 2**63 - 1]


def test_no_choice_repeats_one_of_another_call() -> None:
    seeds = [choice_seed(seed, index) for seed in range(200) for index in range(20)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**SEED_BITS for seed in seeds)
    assert choice_seed(-5, 3) != choice_seed(5, 3)
