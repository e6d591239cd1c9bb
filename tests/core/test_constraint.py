from decimal import Decimal

import pytest

from headrace.core.constraint import (
    MAX_SOURCE_CHARACTERS,
    Constraint,
    ConstraintKind,
    UnusableConstraint,
    WrittenFloat,
    as_constraint,
    json_text,
)
from headrace.core.request import InvalidParameter, SamplingParams


def test_an_object_becomes_the_constraint_that_it_names():
    assert as_constraint({"json": {"b": 1, "a": 2}}) == Constraint(ConstraintKind.JSON, '{"b":1,"a":2}')
    assert as_constraint({"json": '{"a": 2}'}) == Constraint(ConstraintKind.JSON, '{"a": 2}')
    assert as_constraint({"json_object": True}).source == '{"type":"object"}'
    assert as_constraint({"regex": "a+", "json": None, "json_object": False}).kind is ConstraintKind.REGEX
    assert as_constraint({"choice": ["ja", "nein"]}).source == '["ja","nein"]'
    assert as_constraint({"grammar": 'start: "a"'}).kind is ConstraintKind.GRAMMAR
    assert as_constraint({"json": {}, "whitespace_pattern": " ?"}).whitespace == " ?"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, "exactly one"),
        ({"json": {}, "regex": "a"}, "json, regex"),
        ({"jason": {}}, "unknown key 'jason'"),
        ({"regex": ""}, "regex"),
        ({"regex": 3}, "regex"),
        ({"choice": []}, "choice"),
        ({"choice": ["a", 3]}, "choice"),
        ({"choice": "ab"}, "choice"),
        ({"json": {"a": float("nan")}}, "not JSON"),
        ({"json": {"a": object()}}, "not JSON"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern"),
        ({"json": {}, "whitespace_pattern": " " * 257}, "whitespace_pattern"),
        ({"json_object": "yes"}, "json_object"),
        ({"regex": "a" * (MAX_SOURCE_CHARACTERS + 1)}, "at most"),
        ("a", "object"),
    ],
)
def test_what_is_no_constraint_is_refused_with_the_reason(given, why):
    with pytest.raises(UnusableConstraint, match=why):
        as_constraint(given)
    with pytest.raises(InvalidParameter, match=why) as error:
        SamplingParams(structured_outputs=given)
    assert error.value.param == "structured_outputs"


def test_the_digest_knows_everything():
    one = as_constraint({"json": {"a": 1, "b": 2}})
    others = [
        {"json": {"b": 2, "a": 1}},
        {"regex": '{"a":1,"b":2}'},
        {"json": {"a": 1, "b": 2}, "whitespace_pattern": ""},
    ]
    assert len({one.digest, *(as_constraint(other).digest for other in others)}) == 4
    assert as_constraint({"json": {"a": 1, "b": 2}}).digest == one.digest


def test_an_answer_cannot_go_on_past_the_end_of_its_grammar():
    with pytest.raises(InvalidParameter) as error:
        SamplingParams(structured_outputs={"regex": "a"}, ignore_eos=True)
    assert error.value.param == "ignore_eos"


def test_json_text_keeps_all_digits_of_numbers_that_have_them() -> None:
    digits = "0.1000000000000000055"
    value = {"a": WrittenFloat(digits), "b": [1, 2.5, "é", {}, [], None, (True,)], "c": Decimal("1E+3")}
    assert json_text(value, "it") == f'{{"a":{digits},"b":[1,2.5,"é",{{}},[],null,[true]],"c":1E+3}}'
    assert WrittenFloat(digits) == 0.1
    for wrong in ({"a": Decimal("NaN")}, {1: Decimal(1)}, [Decimal(1), float("inf")], [Decimal(1), object()]):
        with pytest.raises(UnusableConstraint, match="it is not JSON"):
            json_text(wrong, "it")
