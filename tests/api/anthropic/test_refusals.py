"""Bad input of the Messages API is refused by name, and never an error of the server."""

import json
import random

import pytest

from tests.api.anthropic.scenes import COUNT, HI, PATH, TIME, WEATHER, ask, said
from tests.api.conftest import ANSWER

IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
USE = {"type": "tool_use", "id": "a", "name": "get_time", "input": {}}


def user(*blocks):
    return {"messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"max_tokens": ...}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"messages": ...}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (user({"type": "text"}), "messages[0].content[0].text"),
        (user({"type": "text", "text": 5}), "messages[0].content[0].text"),
        (user({"type": "video"}), "messages[0].content[0]"),
        (user(IMAGE), "messages[0].content[0]"),
        (user({"type": "document"}), "messages[0].content[0]"),
        (user({"type": "thinking", "thinking": "x"}), "messages[0].content[0]"),
        (user(USE), "messages[0].content[0]"),
        (user({"type": "tool_result", "tool_use_id": "x"}), "messages[0].content[0].tool_use_id"),
        (
            {
                "messages": [
                    *HI,
                    {"role": "assistant", "content": [USE]},
                    *user({"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]})["messages"],
                ]
            },
            "messages[2].content[0].content[0].type",
        ),
        ({"messages": [*HI, {"role": "assistant", "content": [USE]}]}, "messages[1]"),
        ({"system": 5}, "system"),
        ({"system": [IMAGE]}, "system[0]"),
        ({"temperature": 1.5}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stream": "yes"}, "stream"),
        ({"metadata": {"user_id": 5}}, "metadata.user_id"),
        ({"metadata": {"other": "x"}}, "metadata.other"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "a", "input_schema": {"type": "string"}}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "a", "input_schema": None}]}, "tools[0].input_schema"),
        ({"tools": [TIME, TIME]}, "tools"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [TIME | {"defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "some"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TIME], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice.name"),
        ({"cache_control": {"type": "for ever"}}, "cache_control.type"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": "x"}, "container"),
        ({"nonsense": 1}, "nonsense"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ],
)
@said(ANSWER)
def test_bad_input_is_refused_by_name(house, fields, name):
    answer = ask(house, 400, **fields)
    shown = answer.json()
    assert (shown["type"], shown["error"]["type"]) == ("error", "invalid_request_error")
    assert name in shown["error"]["message"]
    assert shown["request_id"] == answer.headers["request-id"]


@pytest.mark.parametrize(
    "fields",
    [
        {"mcp_servers": []},
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        {"speed": "standard"},
        {"tools": [TIME | {"defer_loading": False, "type": "custom", "eager_input_streaming": True}]},
        {"output_config": {"effort": "high"}},
        {"system": []},
    ],
)
@said(ANSWER)
def test_what_asks_for_nothing_passes(house, fields):
    assert ask(house, **fields).json()["content"]


VALID = {
    "model": "fox",
    "max_tokens": 8,
    "system": [{"type": "text", "text": "S", "cache_control": {"type": "ephemeral", "ttl": "5m"}}],
    "messages": [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "text", "text": "x"},
                {"type": "tool_use", "id": "a", "name": "get_time", "input": {"deep": [1, {"x": None}]}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "a",
                    "content": [{"type": "text", "text": "12"}],
                    "is_error": False,
                }
            ],
        },
    ],
    "tools": [WEATHER | {"cache_control": {"type": "ephemeral"}}, TIME],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
    "thinking": {"type": "disabled"},
    "stop_sequences": ["END"],
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "metadata": {"user_id": "u"},
    "stream": False,
    "service_tier": "auto",
    "output_config": {"effort": "low"},
}
JUNK = [
    None,
    True,
    False,
    0,
    -1,
    1,
    3.5,
    2**70,
    "",
    "x",
    "auto",
    "\u2028",
    [],
    [[]],
    [None],
    {},
    {"type": "text"},
]


def places(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def mutated(chance):
    body = json.loads(json.dumps(VALID))
    for _ in range(chance.randint(1, 2)):
        *road, last = chance.choice([place for place in places(body) if place])
        inner = body
        for step in road:
            inner = inner[step]
        match chance.randrange(4):
            case 0:
                del inner[last]
            case 1 if isinstance(inner, dict):
                inner[chance.choice(("type", "text", "extra", "name", "content"))] = chance.choice(JUNK)
            case 2 if isinstance(inner, list):
                inner.append(inner[last])
            case _:
                inner[last] = chance.choice(JUNK)
    return body


@said(ANSWER)
def test_no_mutation_of_a_valid_body_is_an_error_of_the_server(house):
    chance = random.Random(27)
    counts = {}
    for _ in range(300):
        body = mutated(chance)
        answer = house.client.post(PATH, json=body)
        counts[answer.status_code] = counts.get(answer.status_code, 0) + 1
        assert answer.status_code < 500, (body, answer.text)
        if answer.status_code != 200:
            assert answer.json()["error"]["message"]
        body.pop("max_tokens", None)
        assert house.client.post(COUNT, json=body).status_code < 500, body
    assert counts[200] > 25
    assert counts[400] > 100


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
def test_a_thread_is_refused_so_that_clients_send_the_whole_conversation(house, thread):
    answer = house.client.post(PATH, json={"messages": HI, "max_tokens": 5, "thread": thread})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert "thread" in error["message"]
    none = house.client.post(PATH, json={"messages": HI, "max_tokens": 5, "thread": None})
    assert none.status_code == 200
