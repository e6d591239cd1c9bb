"""Keywords that allow everything have no effect; those that allow less stay."""

from __future__ import annotations

import pytest

from headrace.compute.grammar.sources import plain
from headrace.core.constraint import as_constraint


@pytest.mark.parametrize(
    "schema",
    [
        {"uniqueItems": False},
        {"minItems": 0, "minLength": 0, "minProperties": 0, "additionalItems": True, "patternProperties": {}},
        {
            "deprecated": True,
            "readOnly": True,
            "writeOnly": False,
            "$comment": "x",
            "examples": [1],
            "default": 2,
        },
        {
            "title": "a",
            "description": "b",
            "$anchor": "c",
            "nullable": False,
            "contentMediaType": "text/plain",
        },
        {"minContains": 2, "maxContains": 3},
        {"contains": {"type": "string"}, "minContains": 0},
        {"not": False},
        {"propertyNames": {}, "unevaluatedProperties": True, "unevaluatedItems": {}},
        {"dependentRequired": {}, "dependentSchemas": {}, "dependencies": {}},
        {"if": {"type": "string"}},
        {"then": False, "else": False},
        {"$dynamicAnchor": "a"},
    ],
)
def test_keywords_that_allow_everything_have_no_effect(compiler, schema):
    constraint = as_constraint({"json": {"type": "object", "properties": {"a": schema}, "required": ["a"]}})
    assert all(compiler.is_complete(constraint, f'{{"a": {text}}}') for text in ("[1, 1]", '"x"', "{}", "[]"))


@pytest.mark.parametrize(
    "schema",
    [
        {"uniqueItems": True},
        {"uniqueItems": 0},
        {"contains": {}},
        {"contains": {}, "minContains": 0, "maxContains": 1},
        {"contains": {}, "minContains": False},
        {"not": {}},
        {"not": True},
        {"propertyNames": {"maxLength": 1}},
        {"if": {}, "then": {"type": "string"}},
        {"unevaluatedProperties": False},
        {"dependentRequired": {"a": ["b"]}},
    ],
)
def test_keywords_that_allow_less_are_not_removed(schema):
    assert plain({"items": schema}) == {"items": schema}


def test_a_property_may_have_the_name_of_a_keyword():
    schema = {
        "properties": {"not": False, "if": {}, "uniqueItems": {"uniqueItems": False}},
        "const": {"if": 1},
    }
    assert plain(schema) == schema | {"properties": {"not": False, "if": {}, "uniqueItems": {}}}
