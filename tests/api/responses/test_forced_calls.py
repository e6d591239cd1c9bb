"""Forced and allowed calls of the Responses API, and schemas of tools that cannot be enforced."""

import pytest

from tests.api.openai.test_forced_calls import NOT_ENFORCEABLE, PLAIN_CALL, PLAIN_TEMPLATE, REAL, WHY
from tests.api.responses.test_routes import TOOLS, create, events
from tests.api.tool_scenes import TOOL_TEMPLATE
from tests.doubles.grammars import Compiled

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ONE = {"type": "function", "name": "get_weather"}
BAD = {"type": "function", "name": "bad", "parameters": NOT_ENFORCEABLE}


def allowing(*names, mode="auto"):
    tools = [{"type": "function", "name": name} for name in names]
    return {"type": "allowed_tools", "mode": mode, "tools": tools}


@pytest.fixture
def options(request):
    scene = {"template": TOOL_TEMPLATE, "max_model_len": 2000, "num_blocks": 2000, "grammars": Compiled()}
    return scene | getattr(request, "param", {})


def said(text, **more):
    return pytest.mark.parametrize("options", [{"answer": text, **more}], indirect=True)


def text_of(item):
    """The text of an item; a response without a call has an empty message."""
    return item["content"][0]["text"] if item["type"] == "message" else ""


@said(CALL)
@pytest.mark.parametrize(
    ("choice", "apart"), [("required", 3), (ONE, 12), (allowing("get_weather", mode="required"), 12)]
)
def test_a_forced_call_that_is_cut_has_no_text(house, choice, apart):
    for length in range(16, 90, apart):
        response = create(house, tools=TOOLS, tool_choice=choice, max_output_tokens=length)
        assert [text_of(item) for item in response["output"]] == [""]
        reported = events(house, tools=TOOLS, tool_choice=choice, max_output_tokens=length)
        assert not [event for event in reported if event["type"] == "response.output_text.delta"]
    assert response["output"][0]["arguments"] == '{"city": "Paris"}'


@said(PLAIN_CALL, template=PLAIN_TEMPLATE)
def test_a_forced_call_needs_no_template_with_tools(house):
    (call,) = create(house, tools=TOOLS, tool_choice="required")["output"]
    assert (call["type"], call["arguments"]) == ("function_call", '{"city": "日本 {x}"}')
    (text,) = create(house, tools=TOOLS, tool_choice="none")["output"]
    assert text["content"][0]["text"] == PLAIN_CALL
    assert create(house, 400, tools=TOOLS)["error"]["param"] == "tools"


@said(CALL)
def test_only_allowed_tools_are_called(house):
    choice = allowing("get_time")
    response = create(house, tools=TOOLS, tool_choice=choice)
    assert [item["type"] for item in response["output"]] == ["message"]
    assert response["tool_choice"] == choice
    response = create(house, tools=TOOLS, tool_choice=allowing("get_time", "get_weather"))
    assert [item["type"] for item in response["output"]] == ["function_call"]


@said(CALL)
@pytest.mark.parametrize(
    ("choice", "param"),
    [
        (allowing(), "tool_choice.tools"),
        (allowing("get_time", "other"), "tool_choice.tools[1].name"),
        (allowing("get_time", mode="none"), "tool_choice.mode"),
        (allowing("get_time") | {"x": 1}, "tool_choice.x"),
        (
            allowing("get_time") | {"tools": [{"type": "mcp", "server_label": "x"}]},
            "tool_choice.tools[0].type",
        ),
        ({"type": "allowed_tools"}, "tool_choice.mode"),
    ],
)
def test_wrong_lists_of_allowed_tools_are_refused_by_their_path(house, choice, param):
    error = create(house, 400, tools=TOOLS, tool_choice=choice)["error"]
    assert error["param"] == param
    assert param in error["message"] or "type 'mcp'" in error["message"]


SPACE = {"type": "namespace", "name": "space", "tools": [TOOLS[0], BAD]}


@said(CALL, grammars=REAL)
@pytest.mark.parametrize(
    ("tools", "path", "name"),
    [
        ([BAD], "tools[0].parameters", "bad"),
        ([{"type": "web_search"}, *TOOLS, BAD], "tools[3].parameters", "bad"),
        ([{"type": "web_search"}, TOOLS[1], SPACE], "tools[2].tools[1].parameters", "space__bad"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_with_the_function_and_its_place(
    house, tools, path, name
):
    error = create(house, 400, tools=tools, tool_choice="required")["error"]
    assert error["message"] == f"{path}: {WHY.replace('bad', name)}"
    assert (error["param"], error["code"]) == (path, "unsupported_schema")
