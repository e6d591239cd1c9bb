import json

import jsonschema
import pytest

from headrace.api.constraints import (
    Structure,
    after,
    json_object,
    json_schema,
    structural_tag,
    tool_call_array,
)
from headrace.core.constraint import Constraint, ConstraintKind, UnusableConstraint

POINT = {"$defs": {"n": {"type": "number"}}, "type": "object", "properties": {"x": {"$ref": "#/$defs/n"}}}
NAMED = {
    "definitions": {"n": {"type": "string"}},
    "type": "object",
    "properties": {"x": {"$ref": "#/definitions/n"}},
}


def test_a_schema_is_its_text_with_properties_in_order():
    assert json_schema({"b": 1, "a": 2}) == Constraint(ConstraintKind.JSON, '{"b":1,"a":2}')
    assert json_schema({"const": 2**63 + 1}).source == '{"const":9223372036854775809}'
    assert json_schema('{"b": 1}').source == '{"b": 1}'
    assert json_object().source == '{"type":"object"}'
    with pytest.raises(UnusableConstraint, match="not JSON"):
        json_schema({"a": {1, 2}})


def test_tools_keep_their_own_definitions():
    made = json.loads(tool_call_array({"move": POINT, "say": NAMED}, most=2).source)
    judge = jsonschema.Draft202012Validator(made)
    judge.validate([{"name": "move", "arguments": {"x": 1.5}}])
    judge.validate([{"name": "say", "arguments": {"x": "y"}}, {"name": "move", "arguments": {"x": 2}}])
    for wrong in (
        [],
        [{"name": "move", "arguments": {"x": "y"}}],
        [{"name": "say", "arguments": {"x": 1}}],
        [{"name": "jump", "arguments": {}}],
        [{"name": "move"}],
        [{"name": "move", "arguments": {}}] * 3,
    ):
        assert not judge.is_valid(wrong), wrong


def test_a_structural_tag_says_what_is_required():
    structure = Structure("<f>", {"type": "integer"}, "</f>")
    free = json.loads(structural_tag([structure], ["<f"]).source)
    assert free == {
        "structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}],
        "triggers": ["<f"],
    }
    bound = json.loads(structural_tag([structure], ["<f>"], required=True, many=False).source)
    assert (bound["required"], bound["many"]) == (True, False)


def test_reasoning_ends_before_the_constraint_begins():
    made = after(json_object(), "</think>")
    assert (made.after, made.source) == ("</think>", json_object().source)
    assert made.digest != json_object().digest
