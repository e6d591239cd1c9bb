import gc
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.images import ImageSpan
from headrace.core.request import Request, RequestSettings, Retention, SamplingParams, Slo
from headrace.response_cache.rules.cacheability import NO_DIRECTIVES, classify
from headrace.response_cache.rules.key import (
    KEY_BYTES,
    NOT_KEYED,
    REQUEST,
    Engine,
    Part,
    Unkeyable,
    answer_key,
    beginning_key,
    digest,
)
from tests.doubles.sampling_fields import OTHER_SAMPLING

ENGINE = Engine("fox", "w", "t", "c", "n", "1").fingerprint()
BASE = Request("r", (1, 2, 3), SamplingParams(temperature=0.0, max_tokens=9))

OTHER_PARAMS = OTHER_SAMPLING | {
    "logit_bias": ((3, 1.0),),
    "allowed_token_ids": (1, 2),
    "bad_words": ((4,),),
    "max_tokens": 10,
    "stop": ("x",),
    "stop_token_ids": (5,),
    "logprobs": 1,
    "structured_outputs": {"regex": "a+"},
}
OTHER_REQUESTS = {
    "id": "other",
    "tokens": (1, 2, 4),
    "params": SamplingParams(temperature=0.0, max_tokens=8),
    "arrived": 9.0,
    "tenant": "somebody",
    "model": "sql",
    "service_class": "flex",
    "priority": 3,
    "deadline": 5.0,
    "slo": Slo(1.0),
    "retention": (Retention(0, None, 90),),
    "affinity": "a",
    "peer": "10.0.0.1:14579",
    "follows": True,
    "answered": (4,),
    "prediction": (5, 6),
    "cached_answer": (5, 6),
    "indexed": False,
    "salt": "pepper",
    "adapter": "lora",
    "seed": 4,
    "eos_token_ids": frozenset({9}),
    "call_format": "hermes",
    "settings": RequestSettings(draft_method="none"),
    "images": (ImageSpan(1, 2, bytes(32)),),
}


PARAMS = [each.name for each in fields(SamplingParams)]


def key(request: Request, continues: bool = False, engine: bytes = ENGINE) -> bytes:
    return answer_key(beginning_key(engine, request, continues), request)


def test_every_field_of_a_request_has_its_part():
    """A new field makes requests that set it uncacheable until it has a row; this asks for the row."""
    assert {each.name for each in fields(Request)} == REQUEST.keys() == OTHER_REQUESTS.keys()


@pytest.mark.parametrize("name", PARAMS)
def test_every_sampling_parameter_changes_the_key(name):
    changed = replace(BASE, params=replace(BASE.params, **{name: OTHER_PARAMS[name]}))
    assert (key(changed) != key(BASE)) == (name not in NOT_KEYED)


@pytest.mark.parametrize("name", REQUEST)
def test_a_field_of_a_request_changes_the_key_unless_it_is_inert(name):
    drawn = replace(BASE, params=replace(BASE.params, temperature=1.0))
    changed = replace(drawn, **{name: OTHER_REQUESTS[name]})
    assert (key(changed) != key(drawn)) == (REQUEST[name] is not Part.INERT)


@pytest.mark.parametrize(
    "part", ["model", "weights", "tokenizer", "template", "numerics", "version", "secret"]
)
def test_another_engine_has_other_keys(part):
    other = replace(
        Engine("fox", "w", "t", "c", "n", "1"), **{part: 9 if part == "max_model_len" else "else"}
    ).fingerprint()
    assert key(BASE, engine=other) != key(BASE)


def test_a_greedy_answer_knows_no_seed_and_a_drawn_one_does():
    assert key(replace(BASE, seed=1)) == key(replace(BASE, seed=2))
    drawn = replace(BASE, params=replace(BASE.params, temperature=0.1))
    assert key(replace(drawn, seed=1)) != key(replace(drawn, seed=2))


def test_one_number_has_one_spelling():
    whole = replace(BASE, params=replace(BASE.params, temperature=0, top_p=1, presence_penalty=-0.0))
    assert key(whole) == key(BASE)


def test_how_the_answer_begins_and_the_kind_of_prompt_count():
    assert key(BASE, continues=True) != key(BASE)
    assert beginning_key(ENGINE, BASE, False, digest((1, 2, 3))) != beginning_key(ENGINE, BASE, False)


@pytest.mark.parametrize("name", PARAMS)
def test_answers_of_different_lengths_begin_alike(name):
    changed = replace(BASE, params=replace(BASE.params, **{name: OTHER_PARAMS[name]}))
    alike = name == "max_tokens" or name in NOT_KEYED
    assert (beginning_key(ENGINE, changed, False) == beginning_key(ENGINE, BASE, False)) == alike


def test_a_field_that_the_table_does_not_know_makes_a_request_uncacheable(monkeypatch):
    monkeypatch.setattr("headrace.response_cache.rules.key._UNKNOWN", {"adapter": ""})
    assert key(BASE)
    with pytest.raises(Unkeyable, match="adapter"):
        key(replace(BASE, adapter="lora"))


def test_what_cannot_be_written_is_refused():
    with pytest.raises(Unkeyable):
        key(replace(BASE, tokens=(2**32,)))
    with pytest.raises(Unkeyable):
        digest(float("nan"))
    with pytest.raises(Unkeyable):
        digest(object())


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def shape(value):
    """A value with its types, so that 1, 1.0 and True differ and the two zeros do not."""
    if isinstance(value, list):
        return ["list", *map(shape, value)]
    if isinstance(value, dict):
        return ["dict", *sorted((name, repr(shape(each))) for name, each in value.items())]
    return [type(value).__name__, value + 0.0 if isinstance(value, float) else value]


@given(VALUES, VALUES)
def test_two_values_have_one_digest_only_if_they_are_equal(one, other):
    assert (digest(one) == digest(other)) == (shape(one) == shape(other))
    assert len(digest(one)) == KEY_BYTES


@given(st.lists(st.text(), max_size=3), st.lists(st.text(), max_size=3))
def test_neighbours_cannot_run_into_each_other(one, other):
    stops = [
        replace(BASE, params=replace(BASE.params, stop=tuple(s for s in each if s))) for each in (one, other)
    ]
    assert (key(stops[0]) == key(stops[1])) == (stops[0].params.stop == stops[1].params.stop)


def test_large_parameters_are_not_remembered():
    mark = 12_345
    for large in (
        {"stop": ("x" * 10_000,)},
        {"logit_bias": tuple((token, 1.0) for token in range(10_000))},
        {"allowed_token_ids": tuple(range(10_000))},
        {"bad_words": ((1,) * 10_000,)},
        {"stop_token_ids": tuple(range(10_000))},
    ):
        key(replace(BASE, params=SamplingParams(top_k=mark, **large)))
        classify(SamplingParams(top_k=mark, **large), NO_DIRECTIVES)
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is SamplingParams and each.top_k == mark]
