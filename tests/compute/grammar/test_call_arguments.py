"""Calls whose arguments are not JSON: what the grammar allows is read by the parser, and follows the schema."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from headrace.api.compile.bodies import Tool, call_rule
from headrace.api.compile.constrain import constraint_for_tools
from headrace.compute.grammar.compiler import Compiler
from headrace.core.constraint import Constraint, ConstraintKind, UnusableConstraint
from headrace.text.parsing.machine import Machine
from tests.doubles.scripted_model import with_special_tokens
from tests.text.parsing.corpus_files import TOOLS, read

NAMES = sorted(
    name for name, each in TOOLS.items() if each.written and (each.written.python or each.written.quote)
)
MARKS = ["<|tool_call>", "<tool_call|>", '<|"|>', "<|python_start|>", "<|python_end|>"]
TOKENIZER = with_special_tokens(MARKS)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "title": "Anything",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 9, "description": "A town."},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "deep": {"type": "boolean"},
        "unit": {"enum": ["celsius", "kelvin", 3, None]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "minItems": 1, "maxItems": 2},
        "place": {"$ref": "#/$defs/place"},
        "note": {"anyOf": [{"type": "null"}, {"type": "number", "minimum": 0, "maximum": 5}]},
    },
    "required": ["city", "deep"],
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}, "y z": {"type": "boolean"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
    "additionalProperties": False,
}
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


@pytest.fixture(scope="module", params=["special", "plain"])
def compiler(request):
    backend = with_special_tokens(MARKS, request.param == "special").backend
    made = Compiler(backend.to_str, TOKENIZER.vocab_size, [TOKENIZER.eos_token_id])
    yield made
    made.close()


def tool(schema: dict[str, Any] | None, **more: Any) -> Tool:
    function = {"name": "f", "parameters": schema} | more
    return Tool.model_validate({"type": "function", "function": function})


def constraint(name: str, schema: dict[str, Any] | None, choice: str = "required", **more: Any) -> Constraint:
    tag = constraint_for_tools([tool(schema, **more)], call_rule(choice), TOOLS[name], parallel=False)
    return Constraint(ConstraintKind.STRUCTURAL_TAG, json.dumps(tag))


def walk(matcher: Any, chance: random.Random, steps: int = 400) -> str | None:
    """A text that the grammar allows, drawn at random; None if it has no end in time."""
    drawn: list[int] = []
    for _ in range(steps):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[: TOKENIZER.vocab_size]).tolist()
        token = chance.choice(allowed)
        if token == TOKENIZER.eos_token_id:
            return TOKENIZER.decode(drawn, skip_special_tokens=False)
        assert matcher.consume_token(token)
        drawn.append(token)
    return None


def calls_of(name: str, text: str) -> list[dict[str, Any]]:
    content, _, calls = read(Machine(TOOLS[name], None, schemas={"f": SCHEMA["properties"]}), [text])
    assert not content.strip(), text
    assert [called for called, _ in calls] == ["f"] * len(calls)
    return [json.loads(arguments) for _, arguments in calls]


@pytest.mark.parametrize("name", NAMES)
def test_whatever_the_grammar_allows_is_read_as_a_call_of_the_schema(compiler, name):
    chance, found = random.Random(name), 0
    made = constraint(name, SCHEMA)
    for _ in range(20):
        text = walk(compiler.matcher(made), chance)
        if text is not None:
            found += 1
            (arguments,) = calls_of(name, text)
            VALIDATOR.validate(arguments)
    assert found >= 5


@pytest.mark.parametrize("name", NAMES)
def test_a_function_without_arguments_is_called_without(compiler, name):
    text = walk(compiler.matcher(constraint(name, None)), random.Random(1))
    assert calls_of(name, text or "") == [{}]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pythonic", '[f(city="Paris", deep=True)]'),
        ("pythonic", '[f(city="Paris \\" x", days=3, deep=False, tags=["a", "b"], place={"x": 1})]'),
        ("llama4_pythonic", '<|python_start|>[f(city="P", deep=True, unit=null)]<|python_end|>'),
        ("olmo3", '<function_calls>\nf(city="P", deep=True, note=null)\n</function_calls>'),
        ("gemma4", '<|tool_call>call:f{city:<|"|>Paris<|"|>,deep:true}<tool_call|>'),
        (
            "gemma4",
            '<|tool_call>call:f{city:<|"|>P<|"|>,days:3,deep:false,unit:<|"|>kelvin<|"|>,'
            'tags:[<|"|>a<|"|>,<|"|>b<|"|>],place:{x:1,<|"|>y z<|"|>:true},note:null}<tool_call|>',
        ),
        (
            "functiongemma",
            "<start_function_call>call:f{city:<escape>P<escape>,deep:true,unit:3}<end_function_call>",
        ),
    ],
)
def test_these_calls_are_allowed(compiler, name, text):
    assert compiler.is_complete(constraint(name, SCHEMA), text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pythonic", "[f(deep=True)]"),
        ("pythonic", '[f(city="Paris", deep=1)]'),
        ("pythonic", '[g(city="Paris", deep=True)]'),
        ("gemma4", '<|tool_call>call:f{city:<|"|><|"|>,deep:true}<tool_call|>'),
        ("gemma4", '<|tool_call>call:f{city:<|"|>Paris<|"|>,deep:true,days:15}<tool_call|>'),
        ("functiongemma", "<start_function_call>call:f{deep:true}<end_function_call>"),
    ],
)
def test_these_calls_are_not(compiler, name, text):
    assert not compiler.is_complete(constraint(name, SCHEMA), text)


@pytest.mark.parametrize("name", ["gemma4", "functiongemma"])
@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"a": {"type": "string", "pattern": "a+"}}, "keyword 'pattern' at '#/properties/a'"),
        ({"a": {"type": "array", "items": {"oneOf": []}}}, "'#/properties/a/items'"),
        ({"a": {}}, "any type"),
        ({"a": {"$ref": "#/$defs/b"}}, "there is no '#/$defs/b'"),
        ({"a": {"$ref": "#/properties/a"}}, "contains itself"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_its_place(compiler, name, schema, why):
    with pytest.raises(UnusableConstraint, match=r"'#/") as caught:
        compiler.check(constraint(name, {"type": "object", "properties": schema}))
    assert why in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_keywords_beside_the_properties_are_refused(compiler, name):
    with pytest.raises(UnusableConstraint, match="keyword 'minProperties' at '#'"):
        compiler.check(constraint(name, SCHEMA | {"minProperties": 3}))


@pytest.mark.parametrize("name", NAMES)
def test_numbers_of_calls_are_exact_and_constants_have_their_type(compiler, name):
    big = 1234567890123456789
    fields = {
        "a": {"const": big},
        "b": {"enum": [big + 2, "x", 1.5], "type": "integer"},
        "c": {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
    }
    made = constraint(name, {"type": "object", "properties": fields, "required": ["a", "b", "c"]})
    chance, texts = random.Random(name), set()
    for _ in range(30):
        text = walk(compiler.matcher(made), chance, 120)
        if text is not None:
            texts.add(text)
            _, _, calls = read(Machine(TOOLS[name], None, schemas={"f": fields}), [text])
            arguments = json.loads(calls[0][1])
            assert (arguments["a"], arguments["b"]) == (big, big + 2)
            assert 0 < arguments["c"] <= 0.5
    assert len(texts) >= 2


def test_a_reference_of_a_call_begins_at_the_whole_schema(compiler):
    inner = {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}
    schema = {"type": "object", "properties": {"sub": inner}, "additionalProperties": False}
    made = constraint("pythonic", schema)
    assert compiler.is_complete(made, '[f(sub=[{"sub":[]}])]')
    assert not compiler.is_complete(made, "[f(sub=[[]])]")


def test_a_strict_call_may_come_in_free_text(compiler):
    made = constraint("gemma4", SCHEMA, "auto", strict=True)
    call = '<|tool_call>call:f{city:<|"|>P<|"|>,deep:true}<tool_call|>'
    assert compiler.is_complete(made, "Let me see." + call)
    assert compiler.is_complete(made, "Just text.")
    assert not compiler.is_complete(made, "Let me see." + call.replace("true", "1"))


@pytest.mark.parametrize(
    "key", ["a b", 'a"b', "it's", "日本", "x=y", "", "a\\b", "a:b", "a\nb", "3", "True", "<a>", ")"]
)
@pytest.mark.parametrize("name", NAMES)
def test_any_property_name_is_read_back(compiler, name, key):
    schema = {"type": "object", "properties": {key: {"const": 'v"1'}}, "required": [key]}
    text = walk(compiler.matcher(constraint(name, schema)), random.Random(3))
    assert calls_of(name, text or "") == [{key: 'v"1'}]


@pytest.mark.parametrize(("name", "mark"), [("gemma4", '<|"|>'), ("functiongemma", "<escape>")])
@pytest.mark.parametrize("place", ["key", "value"])
def test_a_text_with_the_mark_around_strings_is_refused(compiler, name, mark, place):
    key, value = (mark, 1) if place == "key" else ("a", mark)
    schema = {"type": "object", "properties": {key: {"const": value}}}
    with pytest.raises(UnusableConstraint, match="cannot be written in this model's calls"):
        compiler.check(constraint(name, schema))


@pytest.mark.parametrize("name", NAMES)
def test_keys_and_constants_that_spell_special_tokens_stay_text(compiler, name):
    end = TOKENIZER.decode([TOKENIZER.eos_token_id], skip_special_tokens=False)
    texts = [each for each in (end, f"a{end}b", "x<|tool_call>") if name != "gemma4" or '<|"|>' not in each]
    schema = {
        "type": "object",
        "properties": {f"k{end}": {"enum": texts}, "n": {"const": end}},
        "required": [f"k{end}", "n"],
        "additionalProperties": False,
    }
    for seed in range(4):
        text = walk(compiler.matcher(constraint(name, schema)), random.Random(seed)) or ""
        content, _, calls = read(Machine(TOOLS[name], None, schemas={"f": schema["properties"]}), [text])
        assert not content.strip()
        ((called, arguments),) = calls
        assert called == "f"
        jsonschema.validate(json.loads(arguments), schema)


@pytest.mark.parametrize(
    ("name", "call"), [("llama3_json", '{"name": "f", "parameters": '), ("pythonic", "[f(")]
)
def test_a_call_without_a_mark_follows_a_strict_schema_and_other_text_is_free(compiler, name, call):
    made = constraint(name, SCHEMA, "auto", strict=True)
    for text in ("Hello!", " \n Let me see {x} [y].", "", "  "):
        assert compiler.is_complete(made, text), text
    for text in (call, " " + call, f"{call[0]}1", call[0]):
        assert not compiler.is_complete(made, text), text
    chance, found = random.Random(name), 0
    matcher = compiler.matcher(made)
    for each in call:
        assert matcher.consume_tokens(TOKENIZER.encode(each, add_special_tokens=False))
    for _ in range(30):
        rest = walk(matcher.deep_copy(), chance)
        if rest is not None:
            found += 1
            (arguments,) = calls_of(name, call + rest)
            VALIDATOR.validate(arguments)
    assert found >= 5
