"""JSON schemas, keyword by keyword: which texts are accepted, and what is refused with keyword and pointer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from headrace.compute.grammar.compiler import LIMITS
from headrace.compute.grammar.sources import read_schema, schema_grammar
from headrace.core.constraint import UnusableConstraint
from tests.judges.structured_exactness import Fuzz, Judge, decoded

BYTES = LLTokenizer("byte")
BIG = 1234567890123456789


def matcher_of(schema: Any, whitespace: str | None = None) -> LLMatcher:
    source = schema if isinstance(schema, str) else json.dumps(schema)
    made = schema_grammar(read_schema(source), whitespace)
    matcher = LLMatcher(BYTES, made, log_level=0, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepted(schema: Any, *texts: str, whitespace: str | None = None) -> list[str]:
    matcher, found = matcher_of(schema, whitespace), []
    for text in texts:
        copy, tokens = matcher.deep_copy(), list(text.encode())
        if copy.try_consume_tokens(tokens) == len(tokens) and copy.is_accepting():
            found.append(text)
    return found


def named(*names: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"type": "integer"} for name in names}} | more


CLOSED = {"additionalProperties": False}
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]} | CLOSED
DOG = {"type": "object", "properties": {"kind": {"const": "dog"}}, "required": ["kind"]} | CLOSED


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        # bounds that equal the whole part of a range
        (
            {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
            ["0.5", "0.50", "0.001", "0.4999"],
            ["0", "-0", "0.0", "0.00", "0e5", "0E0", "0.51", "0.500001", "-0.1", "5e-1"],
        ),
        (
            {"type": "number", "minimum": -0.5, "exclusiveMaximum": 0},
            ["-0.5", "-0.1"],
            ["0", "-0", "-0.0", "0.0"],
        ),
        (
            {"type": "number", "exclusiveMinimum": 5, "maximum": 5.5},
            ["5.5", "5.01"],
            ["5", "5.0", "5.00", "5e0"],
        ),
        (
            {"type": "number", "exclusiveMinimum": -1, "exclusiveMaximum": 1},
            ["0", "-0.99", "0.99"],
            ["1", "-1", "1.0"],
        ),
        ({"type": "integer", "minimum": 0.5, "maximum": 2.5}, ["1", "2"], ["0", "3", "0.5", "1.5"]),
        ({"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 3}, ["2"], ["1", "3"]),
        (
            '{"type":"number","minimum":1e2,"maximum":1.5E2}',
            ["100", "150", "149.9"],
            ["99.9", "150.1", "1e2"],
        ),
        ('{"type":"integer","minimum":5,"exclusiveMinimum":true}', ["6"], ["5"]),
        # integers beyond 2^53
        ({"const": BIG}, [str(BIG)], ["1234567890123456768", "1234567890123456790"]),
        ({"enum": [BIG, "a", BIG + 1]}, [str(BIG), str(BIG + 1), '"a"'], [str(BIG + 2), str(BIG - 1)]),
        ({"type": "integer", "maximum": 2**63 - 1}, [str(2**63 - 1), "-5"], [str(2**63)]),
        ({"type": "integer", "minimum": -(2**63)}, [str(-(2**63))], [str(-(2**63) - 1)]),
        ({"type": "number", "maximum": 1e20}, ["1" + "0" * 20], ["1" + "0" * 19 + "1"]),
        ({"type": "integer", "exclusiveMaximum": 2**64}, [str(2**64 - 1)], [str(2**64)]),
        (
            {"items": {"$ref": "#/$defs/n"}, "$defs": {"n": {"const": BIG}}, "type": "array"},
            [f"[{BIG}]"],
            ["[1]"],
        ),
        ({"allOf": [{"minimum": BIG}, {"maximum": BIG, "type": "integer"}]}, [str(BIG)], [str(BIG + 1)]),
        ({"const": {"id": BIG}}, [f'{{"id":{BIG}}}'], [f'{{"id":{BIG + 1}}}']),
        ('{"const":0.1000000000000000055511151231257827}', ["0.1000000000000000055511151231257827"], ["0.1"]),
        ('{"enum":[1.0,2.50]}', ["1", "2.5"], ["1.5"]),
        ({"enum": [1, True]}, ["1", "true"], ["false", "0"]),
        ({"type": "integer", "enum": [1.5, 2, "2"]}, ["2"], ["1.5", '"2"']),
        # multiples
        ({"type": "number", "multipleOf": 0.01}, ["1.25", "1.250", "7", "-0.1"], ["1.255", "0.001"]),
        ({"type": "integer", "multipleOf": 7, "minimum": 1}, ["7", "700"], ["0", "8", "-7"]),
        (
            {"type": "integer", "multipleOf": 1000, "maximum": 2**63 - 1},
            [str(10**18), "0"],
            [str(10**18 + 1)],
        ),
        (
            {"allOf": [{"multipleOf": 2}, {"multipleOf": 5}], "type": "integer"},
            ["10", "0", "-20"],
            ["4", "5"],
        ),
        ({"type": "integer", "multipleOf": 0.5}, ["3"], ["0.5"]),
        # names
        (
            named("a"),
            ['{"a":1}', '{"b":"x"}', '{"a":1,"b":2}', "{}"],
            [r'{"\u0061":"x"}', r'{"\u0061":1}', '{"a":"x"}'],
        ),
        (named("a"), [], ['{"a":1,"a":"x"}', r'{"a":1,"\u0061":"x"}', '{"b":1,"a":"x"}', '{"a":1,"a":2}']),
        (
            named('q"', "\n"),
            [r'{"q\"":1,"\n":2}'],
            [r'{"q\u0022":"x"}', r'{"\u000a":"x"}', r'{"\u000A":"x"}'],
        ),
        (named("a/b"), ['{"a/b":1}'], [r'{"a\/b":"x"}']),
        (named("é"), ['{"é":1}'], [r'{"\u00e9":"x"}', '{"é":"x"}']),
        (
            {"patternProperties": {"^x": {"type": "null"}}},
            ['{"x1":null,"y":1}'],
            ['{"x1":1}', r'{"\u0078":1}'],
        ),
        (
            {"patternProperties": {"^x": {"type": "null"}, "1$": {"type": ["null", "string"]}}} | CLOSED,
            ['{"x1":null,"a1":"b"}'],
            ['{"x1":"b"}', '{"y":1}'],
        ),
        (
            {"properties": {"x": {"minimum": 1}}, "patternProperties": {"x": {"maximum": 2}}},
            ['{"x":2}'],
            ['{"x":3}'],
        ),
        # counts
        (
            named("a", "b", "c", minProperties=2, maxProperties=2) | CLOSED,
            ['{"a":1,"c":2}'],
            ['{"a":1}', "{}"],
        ),
        (named("a", minProperties=1), ['{"a":1}', '{"x":1}'], ["{}"]),
        (named("a", "b", minProperties=2), ['{"a":1,"x":1}', '{"a":1,"b":2}'], ['{"a":1}', '{"x":1,"x":2}']),
        ({"type": "object", "maxProperties": 1}, ["{}", '{"x":1}'], ['{"x":1,"y":1}', '{"x":1,"x":1}']),
        (
            named("a", "b", maxProperties=1),
            ['{"b":1}', '{"x":1}'],
            ['{"a":1,"b":1}', '{"a":1,"x":1}', '{"a":1,'],
        ),
        # arrays
        (
            {
                "type": "array",
                "prefixItems": [{"type": "null"}, {"type": "integer"}],
                "items": False,
                "minItems": 1,
            },
            ["[null]", "[null,1]"],
            ["[]", "[null,1,2]", "[1]"],
        ),
        (
            {"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 3},
            ["[null,null]"],
            ["[null]"],
        ),
        (
            {"items": [{"type": "null"}], "additionalItems": False, "type": "array"},
            ["[null]", "[]"],
            ["[1]", "[null,1]"],
        ),
        (
            '{"$schema":"https://json-schema.org/draft/2019-09/schema","type":"array","prefixItems":[{}],'
            '"items":{"type":"null"}}',
            ["[null]"],
            ["[1]"],
        ),
        # alternatives and references
        (
            {"oneOf": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/d"}], "$defs": {"c": CAT, "d": DOG}},
            ['{"kind":"cat"}'],
            ["{}"],
        ),
        (
            {"oneOf": [{"$ref": "#/$defs/c"}, {"type": "null"}], "$defs": {"c": CAT}},
            ["null", '{"kind":"cat"}'],
            ["1"],
        ),
        (
            {"oneOf": [{"type": "integer", "maximum": 3}, {"type": "number", "exclusiveMinimum": 3}]},
            ["3", "3.5"],
            ["2.5"],
        ),
        ({"anyOf": [{"type": "null"}, {"items": {"$ref": "#"}, "type": "array"}]}, ["[[],null]"], ["[1]"]),
        (
            {"$ref": "#/$defs/n", "minimum": 3, "$defs": {"n": {"type": "integer", "$anchor": "here"}}},
            ["3"],
            ["2"],
        ),
        ({"$ref": "#here", "$defs": {"n": {"type": "integer", "$anchor": "here"}}}, ["3"], ["2.5"]),
        ({"$ref": "#/$defs/a%20b", "$defs": {"a b": {"type": "null"}}}, ["null"], ["1"]),
        ({"type": "array", "items": {"type": "null"}, "uniqueItems": False}, ["[null,null]"], ["[1]"]),
        # strings
        (
            {"type": "string", "minLength": 1, "maxLength": 2},
            ['"a"', '"é😀"', r'"\"\\"', r'"\u0001"'],
            ['""', '"abc"'],
        ),
        (
            {"type": "string", "pattern": "^[a-z]+$", "enum": ["ab", "A", "b"]},
            ['"ab"', '"b"'],
            ['"A"', '"c"'],
        ),
        ({"type": "string", "pattern": "^a"}, ['"a"', '"ab"'], ['"ba"', r'"\u0061"']),
        ({"pattern": "^a"}, ['"a"', "1", "null"], ['"b"']),
        ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2023-02-29"']),
        ({"type": "integer", "format": "int64"}, ["1"], ['"a"']),
        ({"type": "number"}, ["1e5", "-0.5E-3", "1e299"], ["1e300", "1e400", "01", ".5", "+1", "NaN"]),
    ],
    ids=str,
)
def test_a_text_is_accepted_if_its_value_satisfies_the_schema(schema, good, bad):
    assert accepted(schema, *good, *bad) == good


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (
            {"type": "object", "minProperties": 2},
            "keyword 'minProperties' at '#': 2 different names cannot be enforced",
        ),
        ({"items": {"minimum": "1"}}, "keyword 'minimum' at '#/items': it must be a number"),
        ({"maximum": True}, "keyword 'maximum' at '#': it must be a number"),
        ('{"maximum":1e999}', "keyword 'maximum' at '#': it has more than 400 digits"),
        ('{"type":"integer","multipleOf":7,"maximum":1e20}', "keyword 'multipleOf' at '#': multiples of 7"),
        ({"type": "integer", "multipleOf": 999_983}, "keyword 'multipleOf' at '#': multiples of 999983"),
        (
            {"type": "integer", "multipleOf": 0.123456789},
            "keyword 'multipleOf' at '#': multiples of 123456789",
        ),
        ({"multipleOf": 0}, "keyword 'multipleOf' at '#': it must not be 0"),
        ({"minLength": -1}, "keyword 'minLength' at '#': it must be a whole number"),
        ({"type": "array", "minItems": 10**12}, "keyword 'minItems' at '#': more than 1000000"),
        ({"enum": 3}, "keyword 'enum' at '#': it must be a list"),
        ({"required": "a"}, "keyword 'required' at '#': it must be a list of names"),
        ({"properties": []}, "keyword 'properties' at '#': it must be an object"),
        ({"properties": {"a/b": 3}}, "the schema at '#/properties/a~1b' must be an object"),
        ({"anyOf": []}, "keyword 'anyOf' at '#': it must be a list of schemas"),
        ({"patternProperties": {"(": {}}}, "keyword 'patternProperties' at '#': unclosed group"),
        ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "'#/$defs/a': it refers to itself"),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "the schema at '#/anyOf/0' refers to itself"),
        ({"$ref": "#nowhere"}, "keyword '$ref' at '#': there is no '#nowhere'"),
        ({"oneOf": [CAT, {"type": "object"}]}, "keyword 'oneOf' at '#': alternatives that may overlap"),
        ({"oneOf": [{"maximum": 3}, {"minimum": 3}]}, "keyword 'oneOf' at '#'"),
        (
            {"oneOf": [{"pattern": r"^\s$", "type": "string"}, {"pattern": "^\ufeff$", "type": "string"}]},
            "overlap",
        ),
        ({"properties": {"a": {"items": {"$id": "x"}}}}, "keyword '$id' at '#/properties/a/items'"),
        # no value at all
        (named("a", required=["b"]) | CLOSED, "no value satisfies the schema at '#'"),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object"}, "no value satisfies"),
        (
            {"type": "array", "items": {"minimum": 3, "maximum": 2, "type": "number"}, "minItems": 1},
            "'#/items'",
        ),
        ({"type": "string", "pattern": "^a$", "minLength": 2}, "no value satisfies"),
        ({"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2}, "no value satisfies"),
        ({"const": 1, "type": "string"}, "no value satisfies"),
    ],
    ids=str,
)
def test_what_cannot_be_enforced_is_refused_with_keyword_and_pointer(schema, why):
    with pytest.raises(UnusableConstraint) as caught:
        matcher_of(schema)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "dead"),
    [
        ({"properties": {"a": {}}, "patternProperties": {".*": False}, "type": "object"}, '{"a":1,'),
        ({"properties": {"a": {}}, "patternProperties": {"^a$": {}}} | CLOSED, '{"a":1,'),
        ({"properties": {"a": False, "b": {}}, "type": "object"} | CLOSED, '{"a'),
        (named("a", "b", maxProperties=1), '{"a":1,'),
        (
            {
                "type": "object",
                "properties": {"a": {"$ref": "#/$defs/n"}},
                "$defs": {
                    "n": {"type": "object", "properties": {"b": {"$ref": "#/$defs/n"}}, "required": ["b"]}
                },
            }
            | CLOSED,
            '{"',
        ),
        ({"type": "array", "prefixItems": [{}, {"enum": []}]}, "[1,"),
        ({"type": "array", "items": {"allOf": [{"type": "null"}, {"type": "string"}]}}, "[n"),
        ({"anyOf": [{"type": "string", "pattern": "^a{3}$", "maxLength": 2}, {"type": "null"}]}, '"'),
    ],
    ids=str,
)
def test_no_token_leads_to_where_nothing_can_follow(schema, dead):
    matcher = matcher_of(schema)
    assert matcher.try_consume_tokens(list(dead.encode())) < len(dead)


def test_whitespace_is_as_the_client_says_but_nothing_else():
    schema = {"type": "array", "items": {"type": "null"}}
    texts = ["[]", "[ ]", "[ null , null ]", "[\n  null]", "[  null]", " []", "[] "]
    assert accepted(schema, *texts) == texts[:4]
    assert accepted(schema, *texts, whitespace="") == ["[]"]
    assert accepted(schema, *texts, whitespace=r"[ \n]*") == texts[:5]
    assert accepted(schema, *texts, whitespace=" ") == texts[:3]
    for pattern, why in (
        ("a?", "blanks, tabs and line breaks only"),
        ("[/]", "blanks"),
        ("(", "whitespace_pattern: "),
    ):
        with pytest.raises(UnusableConstraint, match=why):
            matcher_of(schema, pattern)


def test_large_unions_are_told_apart_by_the_constants_of_a_property():
    def model(number: int) -> dict[str, Any]:
        fields = {f"field_{i}": {"type": "string", "maxLength": 9} for i in range(20)}
        return {
            "type": "object",
            "properties": {"kind": {"const": f"k{number}"}} | fields,
            "required": ["kind"],
            "additionalProperties": False,
        }

    union = {
        "oneOf": [{"$ref": f"#/$defs/{i}"} for i in range(60)],
        "$defs": {str(i): model(i) for i in range(60)},
    }
    assert accepted(union, '{"kind":"k7"}', '{"kind":"k60"}') == ['{"kind":"k7"}']
    union["$defs"]["3"]["properties"]["kind"] = {"enum": ["k3", "k4"]}
    with pytest.raises(UnusableConstraint, match="overlap"):
        matcher_of(union)
    optional = {str(i): model(i) | {"required": []} for i in (3, 4)}
    with pytest.raises(UnusableConstraint, match="overlap"):  # {} satisfies both
        matcher_of({"oneOf": [{"$ref": "#/$defs/3"}, {"$ref": "#/$defs/4"}], "$defs": optional})


def test_many_parts_are_bounded():
    parts = [{"anyOf": [{"properties": {f"p{i}": {"minLength": j}}} for j in range(12)]} for i in range(12)]
    with pytest.raises(UnusableConstraint, match="combinations of its parts"):
        matcher_of({"allOf": parts})


def test_what_is_accepted_is_valid_and_every_walk_comes_to_an_end(pytestconfig):
    found = Fuzz(seed=39).run(pytestconfig.getoption("--pairs"))
    assert found.unsound == []
    assert found.dead == []
    assert found.accepted > found.pairs / 3
    assert found.walked > found.schemas
    assert found.pairs >= pytestconfig.getoption("--pairs")
    assert found.unexplained == []


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ('{"maximum":12345678901234567890}', "12345678901234567891"),
        ('{"properties":{"a":{"type":"null"}}}', r'{"\u0061":1}'),
        ('{"minProperties":2,"properties":{"a":{},"b":{}}}', '{"a":1,"a":2}'),
        ('{"multipleOf":0.1}', "0.15"),
        ('{"type":"string","maxLength":1}', '"ab"'),
    ],
)
def test_the_judge_notices_what_is_wrong(schema, text):
    """Each text is accepted by a grammar that does not follow the schema."""
    fuzz = Fuzz(seed=1)
    lenient = LLMatcher(fuzz._tokenizer, LLMatcher.grammar_from_lark(r"start: /(.|\n)*/"), log_level=0)
    fuzz._judge(Judge(decoded(schema)), lenient, schema, text)
    assert fuzz.found.unsound == [(schema, text)]
    exact = LLMatcher(fuzz._tokenizer, schema_grammar(read_schema(schema)), log_level=0)
    assert not fuzz.accepts(exact, text)


def test_a_dead_end_is_noticed():
    fuzz = Fuzz(seed=1)
    dead = LLMatcher(
        fuzz._tokenizer, LLMatcher.grammar_from_lark('start: "a" NOTHING\nNOTHING: /x/ & /y/'), log_level=0
    )
    assert fuzz._walk(dead, "") is None
    assert fuzz.found.dead == [("", "a")]
