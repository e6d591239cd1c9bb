"""Input items in their stored form, and as chat messages."""

import pytest

from headrace.api.responses.conversation import chat_body
from headrace.api.responses.items import chat_messages, stored_items
from headrace.api.responses.wire import ResponsesBody

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "21"}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


def messages(given):
    return chat_messages(stored_items(ResponsesBody.model_validate({"input": given}).input))


CALLED = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("hi", [user("hi")]),
        ([user("hi"), said("ho")], [user("hi"), said("ho")]),
        ([{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}], [user("hi")]),
        (
            [{"role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]}],
            [user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])],
        ),
        (
            [user("q"), THOUGHT, said("I look."), CALL, CALL | {"call_id": "c2"}, OUTPUT],
            [
                user("q"),
                said("I look.") | {"reasoning_content": "Hm.", "tool_calls": [CALLED, CALLED | {"id": "c2"}]},
                {"role": "tool", "tool_call_id": "c1", "content": "21"},
            ],
        ),
        ([CALL, said("done")], [{"role": "assistant", "tool_calls": [CALLED]}, said("done")]),
        ([said("a"), said("b"), CALL], [said("a"), said("b") | {"tool_calls": [CALLED]}]),
        (
            [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "S"}]}, said("a")],
            [said("a") | {"reasoning_content": "S"}],
        ),
        ([{"type": "reasoning", "summary": []}, user("a")], [user("a")]),
    ],
)
def test_items_become_messages(given, expected):
    assert messages(given) == expected


def test_stored_items_have_ids_and_are_accepted_again():
    given = [user("q"), THOUGHT, said("x") | {"phase": "commentary"}, CALL, OUTPUT | {"id": "own"}]
    stored = stored_items(ResponsesBody.model_validate({"input": given}).input)
    assert all(item["id"] for item in stored)
    assert stored[-1]["id"] == "own"
    assert stored[2]["phase"] == "commentary"
    again = stored_items(ResponsesBody.model_validate({"input": stored}).input)
    assert again == stored


def test_settings_become_those_of_chat():
    body = ResponsesBody.model_validate(
        {
            "input": "q",
            "instructions": "Be brief.",
            "max_output_tokens": 5,
            "temperature": 0.5,
            "top_k": 3,
            "reasoning": {"effort": "low"},
            "chat_template_kwargs": {"enable_thinking": False},
            "text": {
                "format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
            },
            "tools": [{"type": "function", "name": "f", "strict": True}],
            "tool_choice": {"type": "function", "name": "f"},
            "parallel_tool_calls": False,
            "prompt_cache_key": "k",
            "metadata": {"a": "b"},
            "include": ["message.output_text.logprobs"],
        }
    )
    chat = chat_body(body, stored_items(body.input))
    assert [message.role for message in chat.messages] == ["system", "user"]
    assert (chat.max_completion_tokens, chat.temperature, chat.top_k) == (5, 0.5, 3)
    assert chat.reasoning_effort == "low"
    assert chat.chat_template_kwargs == {"enable_thinking": False}
    assert chat.response_format.json_schema.schema_ == {"type": "object"}
    assert (chat.tools[0].function.name, chat.tools[0].function.strict) == ("f", True)
    assert chat.tool_choice.function.name == "f"
    assert chat.parallel_tool_calls is False
    assert (chat.prompt_cache_key, chat.metadata) == ("k", {"a": "b"})
    assert (chat.logprobs, chat.top_logprobs) == (True, 0)
