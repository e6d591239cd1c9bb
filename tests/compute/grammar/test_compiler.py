"""Compilation: what is enforced, what is refused and how, and the bounds of it all."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from functools import partial

import pytest

from headrace.compute.grammar import compiler as module
from headrace.compute.grammar.compiler import Compiler
from headrace.core.constraint import UnusableConstraint, as_constraint
from tests.doubles.scripted_model import with_special_tokens
from tests.text.vocabularies import byte_level

TOKENIZER = byte_level()
R = range(12)


def make(**more) -> Compiler:
    ends = sorted(TOKENIZER.eos_token_ids)
    return Compiler(TOKENIZER.backend.to_str, TOKENIZER.vocab_size + 7, ends, **more)


@pytest.fixture(scope="module")
def compiler():
    made = make()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("given", "whole", "not_whole"),
    [
        ({"json_object": True}, ['{"a": [1, null]}', "{}"], ["[]", '{"a": 1', "1"]),
        ({"json": {"type": "integer"}}, ["12", "-3"], ["", "1.5", '"x"']),
        ({"json": True}, ["null", "[]"], ["", "nul"]),
        ({"json": {"enum": ["ü", "日本"]}}, ['"ü"'], ['"u"', '"ü']),
        ({"regex": r"\d{2}/\w+"}, ["12/ü"], ["1/a", "٣٣/a", "12/"]),
        ({"regex": "a\nb"}, ["a\nb"], ["a", "ab"]),
        ({"choice": ['say "ü"', "日本\n", "😀"]}, ['say "ü"', "日本\n", "😀"], ["say", ""]),
        ({"grammar": 'start: "a" (","  "a")*'}, ["a,a,a"], ["a,"]),
        ({"grammar": 'root ::= "a" ("," "a")*'}, ["a,a,a"], ["a,"]),
        ({"json": {"type": "array"}, "whitespace_pattern": ""}, ["[1,2]"], ["[1, 2]"]),
    ],
)
def test_a_text_is_complete_when_it_satisfies_the_whole_constraint(compiler, given, whole, not_whole):
    constraint = as_constraint(given)
    compiler.check(constraint)
    assert [compiler.is_complete(constraint, text) for text in whole] == [True] * len(whole)
    assert [compiler.is_complete(constraint, text) for text in not_whole] == [False] * len(not_whole)


@pytest.mark.parametrize("special", [True, False], ids=["special", "plain"])
def test_a_text_in_a_constraint_may_spell_tokens_with_letters(special):
    tokenizer = with_special_tokens(["<b>"], special)
    compiler = Compiler(tokenizer.backend.to_str, tokenizer.vocab_size, [tokenizer.eos_token_id])
    constraint = as_constraint({"json": {"type": "string"}})
    found = [compiler.is_complete(constraint, text) for text in ('"a <b> </s>"', '"<b>', "<b>")]
    assert found == [True, False, False]
    compiler.close()


def tag(**more):
    structures = [
        {"begin": "<f=a>", "schema": {"type": "object"}, "end": "</f>"},
        {
            "begin": "<f=b>",
            "schema": {"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}},
            "end": "</f>",
        },
        {"begin": "<s>g:", "schema": {"type": "boolean"}, "end": ""},
    ]
    return as_constraint({"structural_tag": {"structures": structures, "triggers": ["<f=", "<s>"]} | more})


def test_a_structural_tag_may_be_json_otherwise(compiler):
    number = {"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}}
    constraint = tag(required=True, many=True, otherwise=number)
    compiler.check(constraint)
    for text, expected in [
        ("<f=b>12</f><f=b>1</f>", True),
        ("12", True),
        ("12<f=b>12</f>", False),
        ('"a"', False),
        ("hello", False),
    ]:
        assert compiler.is_complete(constraint, text) == expected, text
    with pytest.raises(UnusableConstraint, match="false"):
        compiler.check(tag(required=True, otherwise=False))


def test_a_structural_tag_leaves_text_free_and_holds_structures_to_their_schemas(compiler):
    free, one, several = tag(), tag(required=True), tag(required=True, many=True)
    for text, expected in [
        ("hello <f", (True, False, False)),
        ("x<f=b>12</f>y", (True, False, False)),
        ("x<f=b>1s</f>y", (False, False, False)),
        ("x<f=c>12</f>y", (False, False, False)),
        ("x<f=b>12", (False, False, False)),
        ("<f=b>12</f>", (True, True, True)),
        ('<f=b>12</f><f=a>{"x": 1}</f>', (True, False, True)),
    ]:
        found = tuple(compiler.is_complete(constraint, text) for constraint in (free, one, several))
        assert found == expected, text


def test_a_special_token_in_a_tag_is_that_token_and_no_text(compiler):
    constraint = tag(required=True)
    special = TOKENIZER.backend.token_to_id("<s>")
    matcher = compiler.matcher(constraint)
    tokens = [special, *TOKENIZER.encode("g:true", add_special_tokens=False)]
    assert matcher.consume_tokens(tokens)
    assert matcher.is_accepting()


@pytest.mark.parametrize("marker", ["<mark>", "[MARK]"])
@pytest.mark.parametrize("special", [True, False], ids=["special", "plain"])
def test_markers_that_are_tokens_are_these_tokens_in_all_places_of_a_grammar(marker, special):
    """As Qwen's markers of calls and of reasoning, which are not special."""
    tokenizer = with_special_tokens([marker], special)
    compiler = Compiler(tokenizer.backend.to_str, tokenizer.vocab_size, [tokenizer.eos_token_id])
    one = {"begin": marker, "schema": {"type": "boolean"}, "end": marker}
    made = {"structures": [one], "triggers": [marker]}
    cases = [
        (as_constraint({"structural_tag": made | {"required": True}}), f"{marker}true{marker}"),
        (as_constraint({"structural_tag": made}), f"I look.{marker}true{marker}"),
        (replace(as_constraint({"regex": "[ab]+"}), after=marker), f"I think.{marker}ab"),
    ]
    for constraint, text in cases:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        assert tokens.count(tokenizer.backend.token_to_id(marker)) == text.count(marker)
        matcher = compiler.matcher(constraint)
        for token in tokens:
            assert matcher.compute_ff_tokens()[:1] in ([], [token])
            assert matcher.consume_token(token)
        assert matcher.is_accepting()
        assert compiler.is_complete(constraint, text)
    compiler.close()


@pytest.mark.parametrize("trigger", ["<call>", "[CALL]"])
def test_free_text_before_and_after_a_call_has_the_plain_markers_of_reasoning(trigger):
    plain = ["<think>", "</think>", "<call>", *(f"<unused{number}>" for number in R)]
    tokenizer = with_special_tokens(plain, special=False)
    compiler = Compiler(tokenizer.backend.to_str, tokenizer.vocab_size, [tokenizer.eos_token_id])
    one = {"begin": trigger, "schema": {"type": "boolean"}, "end": "."}
    constraint = as_constraint({"structural_tag": {"structures": [one], "triggers": [trigger]}})

    def follows(text: str) -> bool:
        matcher = compiler.matcher(constraint)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        return bool(matcher.consume_tokens(tokens)) and bool(matcher.is_accepting())

    call = f"{trigger}true."
    assert follows(f"<think>It is.</think>{call}{call}<think></think>So.")
    assert all(map(follows, (f"{call}<unused3>", "<think>", call, "No.")))
    assert not follows(f"<think></think>{trigger}1.")
    assert not follows(f"{call}{trigger}tru")
    compiler.close()


@pytest.mark.parametrize("marker", ["</think>", "</s>", "<s>final"])
@pytest.mark.parametrize(
    ("given", "whole", "cut"),
    [
        ({"json": {"type": "integer"}}, "12", "1x"),
        ({"regex": "[ab]+"}, "abba", "abc"),
        ({"choice": ["yes", "no"]}, "yes", "ye"),
        ({"grammar": 'start: "a" rest\nrest: "b"'}, "ab", "a"),
    ],
    ids=str,
)
def test_reasoning_is_free_and_what_follows_its_end_is_not(compiler, marker, given, whole, cut):
    constraint = replace(as_constraint(given), after=marker)
    matcher_of = partial(compiler.matcher, constraint)

    def follows(text: str) -> bool:
        matcher = matcher_of()
        tokens = TOKENIZER.encode(text, add_special_tokens=False)
        return bool(matcher.consume_tokens(tokens)) and bool(matcher.is_accepting())

    assert follows("I think: 12x\n" + marker + whole)
    assert not follows("I think: 12x\n" + marker + cut)
    assert not follows(whole)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (
            {"json": {"properties": {"a": {"items": {"uniqueItems": True}}}}},
            "'uniqueItems' at '#/properties/a/items'",
        ),
        ({"json": {"items": {"anyOf": [{}, {"not": {}}]}}}, "keyword 'not' at '#/items/anyOf/1'"),
        ({"json": {"if": {}, "then": {}}}, "'if', 'then' at '#'"),
        (
            {
                "json": {
                    "properties": {"a/b": {"$ref": "#/$defs/x"}},
                    "$defs": {"x": {"pattern": "(?=a)", "type": "string"}},
                }
            },
            "keyword 'pattern' at '#/\\$defs/x': look-around",
        ),
        (
            {"json": {"items": {"$ref": "https://example.com/s.json"}}},
            "'\\$ref' at '#/items'.*remote references are refused",
        ),
        ({"json": {"$ref": "#/$defs/none"}}, "'\\$ref' at '#': there is no '#/\\$defs/none'"),
        ({"json": {"items": {"type": "strin"}}}, "'type' at '#/items': 'strin'"),
        ({"json": {"type": "string", "format": "foo"}}, "'format' at '#'.*'foo'"),
        ({"json": {"oneOf": [{"type": "string"}, {"minLength": 3}]}}, "'oneOf' at '#'"),
        (
            {"json": {"type": "array", "items": False, "minItems": 1}},
            "no value satisfies",
        ),
        ({"json": False}, "no value satisfies"),
        ({"json": {"$ref": "#"}}, "no text satisfies"),
        ({"json": "{"}, "not valid JSON"),
        ({"json": "[1]"}, "must be an object"),
        ({"json": {"x-guidance": {"lenient": True}, "not": {}}}, "x-guidance"),
        ({"regex": "a(?=b)"}, "regex cannot be enforced: look-around"),
        ({"regex": "("}, "unclosed group"),
        ({"grammar": "start: foo"}, "unknown name"),
        ({"grammar": "what is this"}, "neither Lark nor GBNF"),
        ({"structural_tag": {"structures": []}}, "1 to 256"),
        ({"structural_tag": {"format": {}}}, "format is not supported"),
        (
            {"structural_tag": {"structures": [{"begin": "<a>", "end": ""}], "triggers": ["<b"]}},
            "none of the triggers",
        ),
        ({"structural_tag": {"structures": [{"begin": 3}], "triggers": ["<b"]}}, "begin and end"),
        ({"structural_tag": "[]"}, "structural_tag must be an object"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_its_place(compiler, given, why):
    constraint = as_constraint(given)
    for _ in range(2):  # a refusal is remembered
        with pytest.raises(UnusableConstraint, match=why):
            compiler.check(constraint)
    with pytest.raises(UnusableConstraint, match=why):
        compiler.ready(constraint)


def nested(depth: int) -> dict:
    schema: dict = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def test_a_schema_has_a_greatest_depth(compiler):
    compiler.check(as_constraint({"json": nested(25)}))
    with pytest.raises(UnusableConstraint, match="levels deep"):
        compiler.check(as_constraint({"json": nested(70)}))
    with pytest.raises(UnusableConstraint):
        compiler.check(as_constraint({"json": '{"items":' * 5000 + "{}" + "}" * 5000}))


@pytest.mark.parametrize(
    "given",
    [
        {"regex": "(" * 2000 + "a" + ")" * 2000},
        {"grammar": "start: " + "(" * 3000 + '"a"' + ")" * 3000},
        {"grammar": "start: start"},
        {
            "json": {
                "allOf": [
                    {"anyOf": [{"properties": {f"p{i}": {"minLength": j}}} for j in range(12)]}
                    for i in range(12)
                ]
            }
        },
        {"json": {"enum": [f"value {i}" for i in range(9000)]}},
        {"choice": [f"value {i}" for i in range(9000)]},
        {"json": {"type": "array", "minItems": 10**12}},
        {"json": {"type": "string", "minLength": 10**12}},
        {"regex": "((a{0,1000}){0,1000}){0,1000}b"},
        {"json": {"type": "integer", "minimum": -(10**400), "maximum": 10**400}},
        {"json": {"type": "number", "multipleOf": 1e-300}},
    ],
    ids=lambda given: str(given)[:60],
)
def test_what_is_meant_to_take_long_is_bounded(compiler, given):
    """Each is compiled or refused, and either within the time that a request waits."""
    began = time.monotonic()
    try:
        compiler.check(as_constraint(given))
    except UnusableConstraint as refused:
        assert str(refused)  # noqa: PT017
    assert time.monotonic() - began < 2 * module.COMPILE_SECONDS


def test_compilation_runs_in_the_background_and_a_wait_that_is_too_long_fails(monkeypatch):
    compiler = make(seconds=0.5)
    going = threading.Event()
    real = module.grammar
    monkeypatch.setattr(module, "grammar", lambda *given: (going.wait(60), real(*given))[1])
    constraint = as_constraint({"regex": "a+"})
    assert not compiler.ready(constraint)
    with pytest.raises(UnusableConstraint, match=r"longer than 0\.5 seconds"):
        compiler.check(constraint)
    going.set()
    assert compiler._known[constraint.digest].matcher.result(60)
    assert compiler.ready(constraint)
    compiler.close()


def test_what_is_remembered_is_bounded():
    compiler = make(entries=3)
    for number in range(9):
        compiler.check(as_constraint({"regex": f"a{number}"}))
    assert compiler.remembered == 3
    by_size = make(source_bytes=100)
    for number in range(9):
        by_size.check(as_constraint({"regex": "b" * 40 + str(number)}))
    assert by_size.remembered == 2
    by_size.check(as_constraint({"regex": "c" * 200}))
    assert by_size.remembered == 1
    compiler.close()
    by_size.close()


def test_one_schema_is_compiled_once_however_many_wait(monkeypatch):
    compiler, calls = make(), []
    real = module.grammar
    monkeypatch.setattr(
        module, "grammar", lambda *given: (calls.append(1), time.sleep(0.05), real(*given))[2]
    )
    constraint = as_constraint({"json": {"type": "object"}})
    threads = [threading.Thread(target=compiler.check, args=(constraint,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    compiler.close()


def test_a_panic_of_the_library_is_a_refusal(monkeypatch):
    class Panic(BaseException):
        pass

    def panic(*given, **more):
        raise Panic("index out of bounds")

    compiler = make()
    monkeypatch.setattr(module, "LLMatcher", panic)
    with pytest.raises(UnusableConstraint, match="cannot be compiled: index out of bounds"):
        compiler.check(as_constraint({"regex": "a"}))
    compiler.close()


def test_a_tokenizer_that_the_library_cannot_read_is_the_servers_matter():
    described = json.loads(TOKENIZER.backend.to_str())
    described["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    described["model"]["vocab"] = {}
    broken = Compiler(lambda: "{}", 10, [1])
    with pytest.raises(UnusableConstraint, match="tokenizer cannot be used") as error:
        broken.check(as_constraint({"regex": "a"}))
    assert error.value.server
    broken.close()


def test_a_choice_has_one_limit_which_its_message_names(compiler):
    most = [f"x{at}" for at in range(10_000)]
    compiler.check(as_constraint({"choice": most}))
    with pytest.raises(UnusableConstraint, match="choice has 10001 strings; at most 10000 are allowed"):
        as_constraint({"choice": [*most, "y"]})
