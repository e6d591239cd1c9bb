"""A call that a grammar forces has no content: neither whole, nor cut off after any character, nor in a stream."""

from __future__ import annotations

import json

import pytest

from headrace.api.compile.bodies import CallRule, Tool
from headrace.api.compile.constrain import constraint_for_tools
from headrace.text.parsing.catalogue import PLAIN_JSON, REASONING_FORMATS, TOOL_FORMATS
from headrace.text.parsing.message import Reading

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
        for pieces in ([text[:cut]], list(text[:cut])):
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
