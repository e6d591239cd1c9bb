""""""

from __future__ import annotations

import json
import re

import pytest

from headrace.api.compile.bodies import CallRule, Tool
from headrace.api.compile.constrain import constraint_for_tools
from headrace.text.parsing.catalogue import PLAIN_JSON, REASONING_FORMATS, TOOL_FORMATS
from headrace.text.parsing.message import CallPiece, MessageReader, Reading, new_id
from tests.text.parsing.corpus_files import REASONING, TOOLS

TWO = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><tool_call>{"name": "g", "arguments": {}}</tool_call>'


def reader(reading: Reading) -> MessageReader:
    ids = iter("abcdef")
    return MessageReader(reading, lambda short: next(ids))


def test_a_call_has_its_name_once_and_then_pieces_of_its_arguments():
    message = reader(Reading(TOOLS["hermes"], None))
    pieces = [message.push(TWO[at : at + 7]) for at in range(0, len(TWO), 7)]
    calls = [call for piece in pieces for call in piece.calls]
    assert [(call.index, call.id, call.name) for call in calls if call.name] == [(0, "a", "f"), (1, "b", "g")]
    assert all(call.id is None for call in calls if not call.name)
    assert "".join(call.arguments for call in calls if call.index == 0) == '{"a": 1}'
    assert "".join(call.arguments for call in calls if call.index == 1) == "{}"
    assert not message.finish()
    assert message.calls == 2


def test_a_step_adds_one_piece_per_call():
    message = reader(Reading(TOOLS["hermes"], None))
    assert message.push(TWO).calls == [CallPiece(0, "a", "f", '{"a": 1}'), CallPiece(1, "b", "g", "{}")]


def test_without_parallel_calls_only_the_first_is_returned():
    message = reader(Reading(TOOLS["hermes"], None, parallel=False))
    assert message.push(TWO).calls == [CallPiece(0, "a", "f", '{"a": 1}')]


def test_reasoning_is_counted_in_tokens_and_may_be_left_out():
    texts = ["<think>", "a ", "b", "</think>", "\n\n", "answer"]
    for show in (True, False):
        message = reader(Reading(None, REASONING["think"], show_reasoning=show))
        for text in texts:
            piece = message.push(text, [text])
        assert piece.content == "answer"
        assert message.reasoning_tokens == 4
    message = reader(Reading(None, REASONING["think"]))
    assert message.push("".join(texts), texts).reasoning == "a b"
    assert message.reasoning_tokens == 4


def test_reasoning_that_goes_on_counts_all_tokens():
    message = reader(Reading(None, REASONING["think"], opened=True))
    message.push("a b", ["a", " b"])
    assert message.reasoning_tokens == 2
    assert reader(Reading(None, None)).reasoning_tokens == 0


def test_the_text_may_lag_behind_its_tokens():
    message = reader(Reading(None, REASONING["think"], opened=True))
    message.push("", ["a"])
    message.push("a</think>", ["</think>", "b"])
    message.push("b")
    assert message.reasoning_tokens == 2


def test_ids_are_as_templates_demand_them():
    assert re.fullmatch("call_[0-9a-f]{24}", new_id(False))
    assert re.fullmatch("[A-Za-z0-9]{9}", new_id(True))
    short = Reading(TOOLS["mistral"], None).open().push("[TOOL_CALLS]f[ARGS]{}")
    assert re.fullmatch("[A-Za-z0-9]{9}", short.calls[0].id or "")


def test_the_markers_of_both_formats_must_be_seen():
    markers = Reading(TOOLS["hermes"], REASONING["think"]).markers()
    assert {"<tool_call>", "</tool_call>", "<think>", "</think>"} == markers


FORMATS = {each.name: each for each in (*TOOL_FORMATS, PLAIN_JSON)}
NAMES = ("get_weather", "3d_render", "-x", "a-b", "_", "n" * 128)
ARGUMENTS = {"city": 'a <b> {"[x]"} \\ 日本\n</tool_call>', "days": -1, "deep": True, "tags": ["a", ""]}


def tools(*names):
    return [Tool.model_validate({"type": "function", "function": {"name": name}}) for name in names]


def written(structure, arguments):
    """The arguments in the structure's notation."""
    if "python" in structure:
        return ", ".join(f"{key}={_python(value)}" for key, value in arguments.items())
    mark = structure.get("quote")
    if mark is None:
        return json.dumps(arguments, ensure_ascii=False)
    return ",".join(f"{key}:{_marked(value, mark)}" for key, value in arguments.items())


def _python(value):
    return str(value) if isinstance(value, bool) else json.dumps(value, ensure_ascii=False)


def _marked(value, mark):
    if isinstance(value, list):
        return "[" + ",".join(_marked(each, mark) for each in value) + "]"
    return f"{mark}{value}{mark}" if isinstance(value, str) else json.dumps(value)


def read(reading, texts):
    """The calls as name and arguments, the content and the reasoning."""
    reader = reading.open()
    pieces = [*(reader.push(text) for text in texts), reader.finish()]
    calls = []
    for call in (call for piece in pieces for call in piece.calls):
        if call.name is not None:
            calls.append([call.name, ""])
        calls[call.index][1] += call.arguments
    return calls, "".join(piece.content for piece in pieces), "".join(piece.reasoning for piece in pieces)


def forced(name, *functions, **more):
    """What a grammar forces in a format: the text of calls of ``functions``, and how it is parsed."""
    tag = constraint_for_tools(tools(*functions), CallRule("required"), FORMATS[name])
    structures = tag["structures"] if tag["many"] else tag["structures"][:1]
    text = "".join(each["begin"] + written(each, ARGUMENTS) + each["end"] for each in structures)
    return text, Reading(FORMATS[name], None, schemas={each: {} for each in functions}, forced=True, **more)


@pytest.mark.parametrize("function", NAMES)
@pytest.mark.parametrize("name", FORMATS)
def test_a_whole_call_of_any_name_is_read(name, function):
    text, reading = forced(name, function)
    calls, content, _ = read(reading, [text])
    assert [(each, json.loads(arguments)) for each, arguments in calls] == [(function, ARGUMENTS)]
    assert content == ""


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_is_cut_anywhere_has_no_content_and_the_beginning_of_its_arguments(name):
    text, reading = forced(name, "get_weather", "get_time")
    whole, _, _ = read(reading, [text])
    assert [each for each, _ in whole] == ["get_weather", "get_time"][: len(whole)]
    seen = set()
    for cut in range(len(text) + 1):
        by_character = [list(text[:cut])] if cut % 5 == 0 or cut == len(text) else []
        for pieces in ([text[:cut]], *by_character):
            calls, content, _ = read(reading, pieces)
            assert content == "", (cut, pieces)
            assert len(calls) <= len(whole)
            for (function, arguments), (expected, complete) in zip(calls, whole, strict=False):
                assert function == expected
                assert complete.startswith(arguments), (cut, arguments)
            seen.add(len(calls))
    assert seen == set(range(len(whole) + 1))


@pytest.mark.parametrize("name", FORMATS)
def test_without_parallel_calls_there_is_one_and_no_content(name):
    text, reading = forced(name, "get_weather", "get_time", parallel=False)
    for cut in range(len(text) + 1):
        calls, content, _ = read(reading, [text[:cut]])
        assert (content, len(calls) < 2) == ("", True)


@pytest.mark.parametrize("reasoning", REASONING_FORMATS, ids=lambda each: each.name)
@pytest.mark.parametrize("name", ["hermes", "json", "mistral", "harmony", "pythonic"])
def test_reasoning_before_a_forced_call_is_kept(name, reasoning):
    text, plain = forced(name, "get_weather")
    reading = Reading(plain.tools, reasoning, opened=True, schemas=plain.schemas, forced=True)
    text = "Hm." + reasoning.end[0] + text
    for cut in range(len(text) + 1):
        calls, content, thought = read(reading, [text[:cut]])
        assert content == ""
        assert thought.startswith("Hm."[:cut])
    assert thought == "Hm."
    assert json.loads(calls[0][1]) == ARGUMENTS
