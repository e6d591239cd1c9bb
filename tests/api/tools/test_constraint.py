"""What is forced is read as a call by the parser of the same format."""

import json

import pytest

from headrace.api.compile.bodies import AllowedChoice, CallRule, NamedChoice, Tool, call_rule
from headrace.api.compile.constrain import constraint_for_tools
from headrace.text.parsing.catalogue import PLAIN_JSON, TOOL_FORMATS
from headrace.text.parsing.message import Reading
from tests.api.tool_scenes import TIME, WEATHER

TOOLS = [Tool.model_validate(WEATHER), Tool.model_validate(TIME)]
FORMATS = {each.name: each for each in (*TOOL_FORMATS, PLAIN_JSON)}
HERMES = FORMATS["hermes"]
NAMED = NamedChoice.model_validate({"type": "function", "function": {"name": "get_weather"}})


def strict(tool: dict) -> Tool:
    return Tool.model_validate({"type": "function", "function": tool["function"] | {"strict": True}})


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_free_choices_have_no_constraint(choice):
    assert constraint_for_tools(TOOLS, call_rule(choice), HERMES) is None
    assert constraint_for_tools([], call_rule(choice), HERMES) is None


def test_required_allows_any_tool_and_several_calls():
    tag = constraint_for_tools(TOOLS, CallRule("required"), HERMES)
    assert tag == {
        "structures": [
            {
                "begin": '<tool_call>\n{"name": "get_weather", "arguments": ',
                "schema": WEATHER["function"]["parameters"],
                "end": "}\n</tool_call>",
                "name": "get_weather",
                "path": "tools[0].function.parameters",
            },
            {
                "begin": '<tool_call>\n{"name": "get_time", "arguments": ',
                "schema": {"type": "object", "properties": {}, "additionalProperties": False},
                "end": "}\n</tool_call>",
                "name": "get_time",
                "path": "tools[1].function.parameters",
            },
        ],
        "triggers": ['<tool_call>\n{"name": "'],
        "required": True,
        "many": True,
    }
    assert not constraint_for_tools(TOOLS, CallRule("required"), HERMES, parallel=False)["many"]


def test_a_named_choice_allows_one_call_of_it():
    tag = constraint_for_tools(TOOLS, call_rule(NAMED), HERMES)
    assert [each["begin"] for each in tag["structures"]] == [
        '<tool_call>\n{"name": "get_weather", "arguments": '
    ]
    assert (tag["required"], tag["many"]) == (True, False)


def test_strict_tools_constrain_calls_inside_free_text():
    tag = constraint_for_tools([strict(WEATHER), TOOLS[1]], CallRule("auto"), HERMES)
    assert tag["triggers"] == ["<tool_call>"]
    assert "required" not in tag
    assert [each["schema"] for each in tag["structures"]] == [
        WEATHER["function"]["parameters"],
        {"type": "object"},
    ]
    # where a call is plain JSON, nothing tells it from an answer in JSON
    assert constraint_for_tools([strict(WEATHER)], CallRule("auto"), FORMATS["llama3_json"]) is None


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_what_is_forced_is_read_as_a_call(name):
    tag = constraint_for_tools(TOOLS, CallRule("required"), FORMATS[name])
    assert all(each["begin"].startswith(tuple(tag["triggers"])) for each in tag["structures"])
    first, second = tag["structures"]
    paris, nothing = '{"city": "Paris"}', "{}"
    if "python" in first:
        paris, nothing = 'city="Paris"', ""
    elif mark := first.get("quote"):
        paris, nothing = f"city:{mark}Paris{mark}", ""
    text = first["begin"] + paris + first["end"]
    if tag["many"]:
        text += second["begin"] + nothing + second["end"]
    reader = Reading(FORMATS[name], None, schemas={"get_weather": {}, "get_time": {}}).open()
    piece = reader.push(text)
    assert [(call.name, json.loads(call.arguments)) for call in piece.calls] == [
        ("get_weather", {"city": "Paris"}),
        ("get_time", {}),
    ][: len(piece.calls)]
    assert len(piece.calls) == (2 if tag["many"] else 1)
    assert piece.content + reader.finish().content == ""


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_may_be_called(mode):
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "get_time"}}]}
    choice = AllowedChoice.model_validate({"type": "allowed_tools", "allowed_tools": allowed})
    tag = constraint_for_tools(TOOLS, call_rule(choice), HERMES)
    assert [(each["name"], each["path"]) for each in tag["structures"]] == [
        ("get_time", "tools[1].function.parameters")
    ]
    assert ("required" in tag, tag.get("many")) == ((True, True) if mode == "required" else (False, None))


def test_allowing_all_tools_is_no_constraint():
    rule = CallRule("auto", frozenset({"get_weather", "get_time"}))
    assert constraint_for_tools(TOOLS, rule, HERMES) is None
