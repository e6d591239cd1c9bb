"""Marks and priorities of Lark's rules have no effect on what a grammar allows."""

from __future__ import annotations

import pytest

from headrace.compute.grammar.sources import as_lark, plain
from headrace.core.constraint import UnusableConstraint, as_constraint


@pytest.mark.parametrize(
    ("source", "allowed", "not_allowed"),
    [
        ('?start: "a" | "b"', ["a", "b"], ["c", ""]),
        ('!start: "a"', ["a"], ["b"]),
        ('?!start: x\n!?x: "a"', ["a"], ["b"]),
        ('start.2: "a"', ["a"], [".2"]),
        ('start.-1 : "a"', ["a"], ["b"]),
        ('start: A B\nA.1: "a"\nB.-2: /b+/', ["abb"], ["a"]),
        (
            '// ?x: y\n%ignore " "\n?start: sum\n?sum: product | sum "+" product\n?product: /[0-9]/',
            ["1+2"],
            ["+"],
        ),
        ('  ?start: "a" -> first\n    | "b" -> second', ["a", "b"], ["c"]),
        ('start: "?x: y"\n', ["?x: y"], ["x"]),
        ('start: x\nx: "\\"\\n?y.2: z" | /a:/', ["a:", '"\n?y.2: z'], ["a"]),
        ('?start: x | y\nx.2: "if"\ny.1: /[a-z]+/', ["if", "of"], ["1"]),
        ('%llguidance {}\n?start: "a"', ["a"], ["b"]),
        ("start[max_tokens=3]: /a*/", ["aa"], ["b"]),
        ("?start: x\n?x: /a\\/b/ // ?y: z", ["a/b"], ["b"]),
        ('root ::= "a" | "b"', ["a", "b"], ["c"]),
        ('root ::= [a-z]+ # "x.2: y\n', ["ab"], ["1"]),
    ],
)
def test_marks_and_priorities_have_no_effect(compiler, source, allowed, not_allowed):
    constraint = as_constraint({"grammar": source})
    assert all(compiler.is_complete(constraint, text) for text in allowed)
    assert not any(compiler.is_complete(constraint, text) for text in not_allowed)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ('??start: "a"', "the rule 'start' cannot begin with '[?][?]'"),
        ('start: A\n?A: "a"', "the terminal 'A' cannot begin with '[?]'"),
        ('start: A\n!_A.2: "a"', "the terminal '_A' cannot begin with '!'"),
        ("? what", "neither Lark nor GBNF"),
    ],
)
def test_marks_that_lark_does_not_have_are_refused_with_the_rule(source, why):
    with pytest.raises(UnusableConstraint, match=why):
        as_lark(source)


@pytest.mark.parametrize("source", ['?start: x{"a"}\nx{t}: t t', "?start: A\n%declare A", "?start: foo"])
def test_what_llguidance_does_not_have_is_still_refused(compiler, source):
    with pytest.raises(UnusableConstraint, match="the grammar cannot be enforced"):
        compiler.check(as_constraint({"grammar": source}))


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
