"""A ``oneOf`` is enforced if its alternatives cannot overlap, and refused otherwise; the proof is never wrong."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from jsonschema import Draft202012Validator

from headrace.compute.grammar.sources import read_schema, schema_grammar
from headrace.core.constraint import UnusableConstraint, as_constraint


def check_alternatives(schema):
    schema_grammar(read_schema(json.dumps(schema)))


def tagged(key, value, **more):
    return {"type": "object", "properties": {key: value, **more}, "required": [key]}


CAT, DOG = tagged("kind", {"const": "cat"}, lives={"type": "integer"}), tagged("kind", {"const": "dog"})
DEFS = {"Cat": CAT, "Dog": DOG}
REFS = [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]
EXCLUSIVE = {
    "types": {"oneOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]},
    "references": {"$defs": DEFS, "oneOf": REFS},
    "reference and null": {"$defs": DEFS, "oneOf": [REFS[0], {"type": "null"}]},
    "discriminator": {
        "$defs": DEFS,
        "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}},
        "oneOf": REFS,
    },
    "behind allOf": {"$defs": DEFS, "oneOf": [{"allOf": [REFS[0], {"title": "A cat"}]}, REFS[1]]},
    "nested oneOf": {
        "$defs": DEFS | {"Pet": {"oneOf": REFS}},
        "oneOf": [{"$ref": "#/$defs/Pet"}, tagged("kind", {"const": "car"})],
    },
    "nested anyOf": {"$defs": DEFS, "oneOf": [{"anyOf": REFS}, {"type": "null"}]},
    "enums": {"oneOf": [{"enum": ["a", "b"]}, {"enum": ["c", 1]}, {"const": 2}]},
    "one and true": {"oneOf": [{"const": 1}, {"const": True}]},
    "zero and false": {"oneOf": [{"enum": [0]}, {"enum": [False]}, {"enum": [None]}]},
    "enum tags": {"oneOf": [tagged("k", {"enum": ["a", "b"]}), tagged("k", {"enum": ["c"]})]},
    "types of a tag": {"oneOf": [tagged("k", {"type": "string"}), tagged("k", {"type": "integer"})]},
    "nested tag": {"oneOf": [tagged("k", CAT), tagged("k", DOG)]},
    "closed": {
        "oneOf": [
            {"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": False},
            {"type": "object", "properties": {"b": {}}, "required": ["b"], "additionalProperties": False},
        ]
    },
    "a forbidden property": {
        "oneOf": [{"type": "object", "properties": {"a": False}}, tagged("a", {"type": "integer"})]
    },
    "rest of the schema": {
        "type": "object",
        "properties": {"k": {"type": "string"}},
        "required": ["k"],
        "oneOf": [{"properties": {"k": {"const": "a"}}}, {"properties": {"k": {"const": "b"}}}],
    },
    "ranges": {"oneOf": [{"type": "integer", "maximum": 1}, {"type": "number", "exclusiveMinimum": 1}]},
    "no integer between": {
        "oneOf": [{"type": "integer", "exclusiveMaximum": 2}, {"type": "number", "exclusiveMinimum": 1}]
    },
    "lengths": {"oneOf": [{"type": "string", "maxLength": 2}, {"type": "string", "minLength": 3}]},
    "tuples": {
        "oneOf": [
            {"type": "array", "prefixItems": [{"const": kind}], "items": {"type": "integer"}, "minItems": 1}
            for kind in ("a", "b")
        ]
    },
    "contains itself": {
        "$defs": {
            "Tree": {
                "oneOf": [
                    tagged("op", {"const": "leaf"}),
                    tagged("op", {"const": "node"}, left={"$ref": "#/$defs/Tree"}),
                ]
            }
        },
        "$ref": "#/$defs/Tree",
    },
    "beside anyOf": {
        "anyOf": [{"type": "string"}, {"type": "integer"}],
        "oneOf": [{"type": "string"}, {"const": 3}],
    },
    "patterns": {"oneOf": [{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "^b"}]},
    "one alternative": {"oneOf": [{"type": "string"}]},
    "not reachable": {"$defs": {"x": {"oneOf": [{}, {}]}}, "type": "integer"},
}
OVERLAP = {
    "anything": {"oneOf": [{}, {"type": "string"}]},
    "integers are numbers": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "one and 1.0": {"oneOf": [{"const": 1}, {"const": 1.0}]},
    "1.0 is an integer": {"oneOf": [{"type": "integer"}, {"const": 1.0}]},
    "equal objects": {"oneOf": [{"const": {"a": 1, "b": 2}}, {"const": {"b": 2, "a": 1.0}}]},
    "an optional tag": {
        "oneOf": [{"type": "object", "properties": {"k": {"const": value}}} for value in ("a", "b")]
    },
    "a tag of objects without a type": {
        "oneOf": [{"properties": {"k": {"const": value}}, "required": ["k"]} for value in ("a", "b")]
    },
    "closed, but both have the property": {
        "oneOf": [
            {
                "type": "object",
                "properties": {"a": {}, "b": {}},
                "required": [name],
                "additionalProperties": False,
            }
            for name in ("a", "b")
        ]
    },
    "closed, but a pattern": {
        "oneOf": [
            {"type": "object", "patternProperties": {"^": {}}, "additionalProperties": False},
            tagged("b", {"type": "string"}),
        ]
    },
    "ranges that touch": {"oneOf": [{"type": "integer", "maximum": 1}, {"type": "integer", "minimum": 1}]},
    "empty arrays": {
        "oneOf": [
            {"type": "array", "items": {"type": "string"}},
            {"type": "array", "items": {"type": "null"}},
        ]
    },
    "the same reference": {"$defs": DEFS, "oneOf": [REFS[0], REFS[0]]},
    "keywords beside a reference of an old draft": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"x": {}},
        "oneOf": [{"$ref": "#/definitions/x", "type": "string"}, {"$ref": "#/definitions/x", "type": "null"}],
    },
}


REFUSED = {
    "only itself": {
        "$defs": {"a": {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}},
        "$ref": "#/$defs/a",
    },
    "a schema of its own": {
        "$defs": {"x": {"$id": "http://a/b", "$defs": DEFS, "oneOf": REFS}, "Cat": {}, "Dog": {}},
        "$ref": "#/$defs/x",
    },
}
"""Refused for another reason."""


@pytest.mark.parametrize("schema", EXCLUSIVE.values(), ids=EXCLUSIVE)
def test_alternatives_that_cannot_overlap_are_enforced(compiler, schema):
    compiler.check(as_constraint({"json": schema}))


@pytest.mark.parametrize("schema", OVERLAP.values(), ids=OVERLAP)
def test_alternatives_that_may_overlap_are_refused_with_their_place(compiler, schema):
    with pytest.raises(
        UnusableConstraint, match=r"keyword 'oneOf' at '#.*' *: alternatives that may overlap"
    ):
        compiler.check(as_constraint({"json": {"type": "array", "items": schema} | _shared(schema)}))


@pytest.mark.parametrize(
    ("name", "why"), [("only itself", "refers to itself"), ("a schema of its own", "'\\$id'")]
)
def test_references_that_leave_the_schema_or_never_end_are_refused(compiler, name, why):
    with pytest.raises(UnusableConstraint, match=why):
        compiler.check(as_constraint({"json": REFUSED[name]}))


def _shared(schema):
    return {key: schema[key] for key in ("$defs", "definitions", "$schema") if key in schema}


def test_the_place_is_that_of_the_schema_which_is_refused(compiler):
    schema = {"$defs": {"a/b": {"properties": {"x": {"oneOf": [{}, {}]}}}}, "$ref": "#/$defs/a~1b"}
    with pytest.raises(UnusableConstraint, match="'oneOf' at '#/\\$defs/a~1b/properties/x'"):
        compiler.check(as_constraint({"json": schema}))


def test_a_discriminated_union_allows_each_of_its_alternatives_only(compiler):
    constraint = as_constraint({"json": EXCLUSIVE["discriminator"]})
    for text in ('{"kind": "cat", "lives": 9}', '{"kind": "cat"}', '{"kind": "dog"}'):
        assert compiler.is_complete(constraint, text)
    assert not compiler.is_complete(constraint, '{"kind": "cow"}')
    assert not compiler.is_complete(constraint, '{"kind": "cat", "lives": "x"}')


def test_the_work_for_one_schema_is_bounded():
    chain = {f"d{at}": {"anyOf": [{"$ref": f"#/$defs/d{at + 1}"}] * 2} for at in range(60)}
    with pytest.raises(UnusableConstraint, match="may overlap"):
        check_alternatives(
            {"$defs": chain | {"d60": {}}, "oneOf": [{"$ref": "#/$defs/d0"}, {"$ref": "#/$defs/d1"}]}
        )
    check_alternatives({"oneOf": [tagged("kind", {"const": f"k{at}"}) for at in range(100)]})


VALUES = [
    *(
        None,
        True,
        False,
        0,
        1,
        1.0,
        2,
        1.5,
        -1,
        "",
        "a",
        "b",
        "ab",
        [],
        [1],
        ["a"],
        ["b", 1],
        [None, "a"],
        {},
    ),
    *(
        {"a": 1},
        {"a": "a"},
        {"b": 1},
        {"a": 1, "b": "a"},
        {"a": {"a": 1}},
        {"a": True},
        {"c": None},
        {"a": [1]},
    ),
]


def random_schema(rng, depth=0):
    """A small schema over the properties a and b, with references to x and y."""
    kind = rng.randrange(12 if depth < 3 else 6)
    if kind == 0:
        return rng.choice([True, False, {}, {"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}])
    if kind == 1:
        return {rng.choice(["const"]): rng.choice(VALUES)}
    if kind == 2:
        return {"enum": rng.sample(VALUES, 3)}
    if kind == 3:
        names = ["null", "boolean", "integer", "number", "string", "array", "object"]
        return {"type": rng.choice([rng.choice(names), rng.sample(names, 2)])}
    if kind == 4:
        low, high = rng.choice(["minimum", "exclusiveMinimum"]), rng.choice(["maximum", "exclusiveMaximum"])
        return {
            "type": rng.choice(["integer", "number"]),
            low: rng.randrange(3),
            high: rng.choice([0, 1, 1.5, 2]),
        }
    if kind == 5:
        return {"minLength": rng.randrange(3), "maxLength": rng.randrange(3), "type": "string"}
    if kind == 6:
        return {rng.choice(["allOf", "anyOf"]): [random_schema(rng, depth + 1) for _ in range(2)]}
    if kind == 7:
        items = rng.choice(["items", "prefixItems"])
        inner = random_schema(rng, depth + 1)
        return {
            "type": "array",
            items: [inner] if items == "prefixItems" else inner,
            "minItems": rng.randrange(2),
        }
    if kind == 8:
        return {
            "oneOf": [random_schema(rng, depth + 1) for _ in range(2)],
            "type": rng.choice(["object", "array"]),
        }
    made = {
        "properties": {name: random_schema(rng, depth + 1) for name in rng.sample("ab", rng.randrange(1, 3))}
    }
    made |= {"required": rng.sample("abc", rng.randrange(3))} if rng.random() < 0.7 else {}
    made |= {"type": "object"} if rng.random() < 0.8 else {}
    return made | ({"additionalProperties": random_schema(rng, depth + 1)} if rng.random() < 0.4 else {})


def test_no_value_satisfies_two_alternatives_of_a_union_that_is_accepted():
    rng, accepted = random.Random(7), 0
    for _ in range(250):
        defs = {name: random_schema(rng, 1) for name in "xy"}
        schema = {"$defs": defs, "oneOf": [random_schema(rng), random_schema(rng)]}
        try:
            check_alternatives(schema)
        except UnusableConstraint:
            continue
        accepted += 1
        validators = [Draft202012Validator({"$defs": defs, "allOf": [each]}) for each in schema["oneOf"]]
        for value in _and_wrapped(VALUES):
            try:
                valid = sum(each.is_valid(value) for each in validators)
            except RecursionError:  # a reference to itself
                break
            assert valid < 2, (json.dumps(schema), value)
    assert accepted > 60


def _and_wrapped(values):
    return itertools.chain(values, ({"a": value} for value in values), ([value] for value in values))
