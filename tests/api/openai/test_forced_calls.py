"""Forced and allowed calls on the wire: no marks of calls in the content, and templates that do not show tools."""

import json

import pytest

from headrace.compute.grammar.compiler import Compiler
from tests.api.conftest import time_runs_out
from tests.api.openai.test_chat import HI, PATH
from tests.api.openai.test_tool_use import (
    CALL,
    HOUSE,
    TWO,
    allowing,
    ask,
    joined,
    message_of,
    said,
)
from tests.api.tool_scenes import WEATHER
from tests.doubles.grammars import Compiled
from tests.text.vocabularies import byte_level

PLAIN_TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
PLAIN_CALL = '{"name": "get_weather", "parameters": {"city": "日本 {x}"}}'
TOKENIZER = byte_level()
REAL = Compiler(TOKENIZER.backend.to_str, TOKENIZER.vocab_size, TOKENIZER.eos_token_ids)
ONE = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture
def options(request):
    return HOUSE | {"grammars": Compiled()} | getattr(request, "param", {})


@said(CALL)
@pytest.mark.parametrize(
    ("choice", "apart"),
    [
        pytest.param("required", 1, marks=pytest.mark.slow),
        ("required", 3),
        (ONE, 9),
        (allowing(["get_weather"], "required")["tool_choice"], 9),
    ],
)
def test_a_forced_call_that_is_cut_has_no_content(house, choice, apart):
    lengths = ask(house, tool_choice=choice).json()["usage"]["completion_tokens"]
    reasons = []
    for length in range(lengths, 0, -apart):
        message, reason = message_of(ask(house, tool_choice=choice, max_tokens=length))
        assert message["content"] is None
        arguments = "".join(call["function"]["arguments"] for call in message.get("tool_calls", ()))
        assert '{"city": "日本 {x}"}'.startswith(arguments.rstrip("\ufffd"))
        streamed, why = joined(ask(house, tool_choice=choice, max_tokens=length, stream=True))
        assert streamed["content"] == ""
        assert len(streamed["tool_calls"]) == len(message.get("tool_calls", ()))
        reasons.append((reason, why))
    assert set(reasons[1:]) == {("length", "length")}
    assert reasons[0][0] in ("length", "tool_calls")


@said(CALL)
@pytest.mark.parametrize("stop", ["call>", "name", "Par", "city", "}", "日", "\n"])
def test_a_forced_call_that_a_stop_string_cuts_has_no_content(house, stop):
    message, _ = message_of(ask(house, tool_choice="required", stop=[stop]))
    assert message["content"] is None
    streamed, _ = joined(ask(house, tool_choice="required", stop=[stop], stream=True))
    assert streamed["content"] == ""


@said(CALL)
@pytest.mark.parametrize("step", [3, 4, 6, 9, 12, 20, 30])
def test_a_forced_call_that_a_deadline_cuts_has_no_content(house, step, monkeypatch):
    """Its stream ends with an error; what was written before is no content, but the beginning of the call."""
    time_runs_out(house, monkeypatch, step)
    body = {"messages": HI, "tools": [WEATHER], "tool_choice": "required", "stream": True}
    *chunks, error, done, _ = house.client.post(PATH, json=body).text.split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    assert done == "data: [DONE]"
    deltas = [json.loads(chunk.removeprefix("data: "))["choices"][0]["delta"] for chunk in chunks]
    assert not any(delta.get("content") for delta in deltas)
    arguments = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert '{"city": "日本 {x}"}'.startswith("".join(arguments))


@said(CALL)
def test_a_call_that_is_free_and_cut_keeps_its_text(house):
    message, reason = message_of(ask(house, max_tokens=8))
    assert (CALL.startswith(message["content"]), reason) == (True, "length")


@said(PLAIN_CALL, template=PLAIN_TEMPLATE)
@pytest.mark.parametrize("choice", ["required", ONE, allowing(["get_weather"], "required")["tool_choice"]])
def test_a_forced_call_needs_no_template_with_tools(house, choice):
    message, reason = message_of(ask(house, tool_choice=choice))
    assert (message["content"], reason) == (None, "tool_calls")
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "日本 {x}"}'}
    streamed, _ = joined(ask(house, tool_choice=choice, stream=True))
    assert streamed["tool_calls"][0]["function"] == call["function"]
    cut, reason = message_of(ask(house, tool_choice=choice, max_tokens=6))
    assert (cut["content"], reason) == (None, "length")


@said(CALL, template=PLAIN_TEMPLATE)
def test_without_calls_the_template_needs_no_tools(house):
    message, reason = message_of(ask(house, tool_choice="none"))
    assert (message["content"], reason) == (CALL, "stop")


@said(CALL, template=PLAIN_TEMPLATE)
@pytest.mark.parametrize("more", [{}, {"tool_choice": "auto"}, allowing(["get_time"])])
def test_free_calls_need_a_template_with_tools(house, more):
    error = ask(house, 400, **more).json()["error"]
    assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")


@said("Hi. " + TWO)
def test_calls_of_tools_that_are_not_allowed_are_text(house):
    message, _ = message_of(ask(house, **allowing(["get_time"])))
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_time"]
    assert "get_weather" in message["content"]
    both, _ = message_of(ask(house, **allowing(["get_time", "get_weather"])))
    assert [call["function"]["name"] for call in both["tool_calls"]] == ["get_weather", "get_time"]


@said(CALL)
def test_the_prompt_shows_all_tools_whichever_are_allowed(house):
    counts = {
        ask(house, max_tokens=1, **more).json()["usage"]["prompt_tokens"]
        for more in ({}, allowing(["get_time"]), allowing(["get_time"], "required"))
    }
    assert len(counts) == 1


NOT_ENFORCEABLE = {"type": "object", "properties": {"a/b": {"type": "array", "uniqueItems": True}}}
WHY = "function 'bad': keyword 'uniqueItems' at '#/properties/a~1b' is not supported"


def bad(**more):
    return {"type": "function", "function": {"name": "bad", "parameters": NOT_ENFORCEABLE, **more}}


@said(CALL, grammars=REAL)
@pytest.mark.parametrize(
    "more",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "bad"}}},
        allowing(["bad"], "required"),
        {"tools": [WEATHER, bad(strict=True)]},
        {"tools": [WEATHER, bad(strict=True)]} | allowing(["bad"]),
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_object"}, "tool_choice": "required"},
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_with_the_function_and_its_place(house, more):
    error = ask(house, 400, **({"tools": [WEATHER, bad()]} | more)).json()["error"]
    assert error["message"] == f"tools[1].function.parameters: {WHY}"
    assert (error["param"], error["code"]) == ("tools[1].function.parameters", "unsupported_schema")


@said(CALL, grammars=REAL)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"tool_choice": "none"},
        {"tool_choice": ONE},
        {"tools": [{**WEATHER, "function": WEATHER["function"] | {"strict": True}}, bad()]},
        allowing(["get_weather"], "required"),
    ],
)
def test_a_schema_that_is_not_enforced_is_no_error(house, more):
    ask(house, **({"tools": [WEATHER, bad()], "max_tokens": 3} | more))


@said(CALL, grammars=REAL)
def test_a_response_format_that_cannot_be_enforced_beside_tools_is_named(house):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"oneOf": [{}, {}]}}}
    error = ask(house, 400, response_format=form).json()["error"]
    assert error["message"].startswith("response_format: keyword 'oneOf' at '#'")
    assert (error["param"], error["code"]) == ("response_format", "unsupported_schema")


@said("a")
@pytest.mark.parametrize(
    ("path", "more"), [("/v1/chat/completions", {"messages": HI}), ("/v1/completions", {"prompt": "x"})]
)
@pytest.mark.parametrize("field", ["structured_outputs", "guided_choice"])
def test_a_choice_has_the_same_limit_on_each_route_and_field(house, path, more, field):
    choice = ["a"] * 10_001
    value = {"choice": choice} if field == "structured_outputs" else choice
    answer = house.client.post(path, json=more | {field: value})
    error = answer.json()["error"]
    assert error["message"] == f"{field}: choice has 10001 strings; at most 10000 are allowed"
    assert (answer.status_code, error["param"]) == (400, field)
