"""Forced calls of the Messages API, and schemas of tools that cannot be enforced."""

import pytest

from tests.api.anthropic.scenes import CALL, COUNT, TIME, WEATHER, ask, events, said
from tests.api.openai.test_forced_calls import NOT_ENFORCEABLE, PLAIN_CALL, PLAIN_TEMPLATE, REAL, WHY

BAD = {"name": "bad", "input_schema": NOT_ENFORCEABLE}


@said(CALL)
@pytest.mark.parametrize(
    ("choice", "apart"), [({"type": "any"}, 3), ({"type": "tool", "name": "get_weather"}, 11)]
)
def test_a_forced_call_that_is_cut_has_no_text(house, choice, apart):
    for length in range(1, 90, apart):
        asked = {"tools": [WEATHER, TIME], "tool_choice": choice, "max_tokens": length}
        blocks = ask(house, **asked).json()["content"]
        assert {block["type"] for block in blocks} <= {"tool_use"}
        reported = events(ask(house, **asked, stream=True))
        begun = [each["content_block"]["type"] for each in reported if each["type"] == "content_block_start"]
        assert set(begun) <= {"tool_use"}
    assert blocks[0]["input"] == {"city": "日本 {x}"}


@said(PLAIN_CALL, template=PLAIN_TEMPLATE)
def test_a_forced_call_needs_no_template_with_tools(house):
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        (block,) = ask(house, tools=[WEATHER], tool_choice=choice).json()["content"]
        assert (block["type"], block["input"]) == ("tool_use", {"city": "日本 {x}"})
    (block,) = ask(house, tools=[WEATHER], tool_choice={"type": "none"}).json()["content"]
    assert block["text"] == PLAIN_CALL
    ask(house, 400, tools=[WEATHER])


@said(PLAIN_CALL, template=PLAIN_TEMPLATE)
def test_tokens_are_counted_as_the_request_would_be_answered(house):
    for choice in ({"type": "any"}, {"type": "none"}):
        assert ask(house, path=COUNT, tools=[WEATHER], tool_choice=choice).json()["input_tokens"] > 0
    ask(house, 400, path=COUNT, tools=[WEATHER])


@said(CALL, grammars=REAL)
@pytest.mark.parametrize(
    "more",
    [
        {"tool_choice": {"type": "any"}},
        {"tool_choice": {"type": "tool", "name": "bad"}},
        {"tools": [WEATHER, BAD | {"strict": True}]},
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_with_the_tool_and_its_place(house, more):
    error = ask(house, 400, **({"tools": [WEATHER, BAD]} | more)).json()["error"]
    assert f"tools[1].input_schema: {WHY}" in error["message"]


@said(CALL, grammars=REAL)
def test_a_schema_that_is_not_enforced_is_no_error(house):
    ask(house, tools=[WEATHER, BAD], max_tokens=3)
