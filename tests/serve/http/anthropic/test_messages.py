"""The Messages API on the wire: blocks in, blocks out, events, errors by name."""

import json
import random
import threading
import time

import pytest
from starlette.testclient import TestClient

from headrace.serve.auth.api_keys import Grant
from headrace.serve.auth.roles import Role
from tests.serve.http.cache.test_cache_marks import Spy
from tests.serve.http.caching import with_memory
from tests.serve.http.conftest import ANSWER, build_house
from tests.serve.http.tool_scenes import TOOL_TEMPLATE

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HI = [{"role": "user", "content": "hi"}]
WEATHER = {
    "name": "get_weather",
    "description": "The weather now.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TIME = {"name": "get_time", "input_schema": {"type": "object"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "日本 {x}"}}\n</tool_call>'
TWO = CALL + '\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
TOOLED = {"template": TOOL_TEMPLATE, "max_model_len": 1200, "num_blocks": 1024}
THINK = {"type": "enabled", "budget_tokens": 1024}


@pytest.fixture
def options(request):
    return {"recall": Spy} | getattr(request, "param", {})


def said(text, **more):
    """Decorates a test with what the model says, after a template that knows tools and reasoning."""
    return pytest.mark.parametrize("options", [TOOLED | {"answer": text, **more}], indirect=True)


def ask(house, status=200, path=PATH, **more):
    body = {"model": "fox", "messages": HI} | ({"max_tokens": 200} if path == PATH else {}) | more
    answer = house.client.post(path, json={name: value for name, value in body.items() if value is not ...})
    assert answer.status_code == status, answer.text
    return answer


def events(answer):
    """The events of a stream; each says its type twice."""
    *told, rest = answer.text.split("\n\n")
    assert rest == ""
    found = []
    for event in told:
        if event.startswith(":"):
            continue
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def joined(told):
    """The message that events spell, by Anthropic's rules for their order."""
    start, *middle, delta, stop = [event for event in told if event["type"] != "ping"]
    assert (start["type"], delta["type"], stop) == (
        "message_start",
        "message_delta",
        {"type": "message_stop"},
    )
    message = start["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    blocks, parts, at = message["content"], [], None
    for event in middle:
        if event["type"] == "content_block_start":
            assert at is None
            at = event["index"]
            assert at == len(blocks)
            blocks.append(event["content_block"])
            parts.append("")
        elif event["type"] == "content_block_stop":
            assert event["index"] == at
            if blocks[at]["type"] == "tool_use":
                blocks[at]["input"] = json.loads(parts[at] or "{}")
            at = None
        else:
            assert (event["type"], event["index"]) == ("content_block_delta", at)
            change = event["delta"]
            if change["type"] == "signature_delta":
                blocks[at]["signature"] = change["signature"]
            elif change["type"] == "input_json_delta":
                parts[at] += change["partial_json"]
            else:
                kind = change["type"].removesuffix("_delta")
                assert blocks[at]["type"] == kind
                blocks[at][kind] += change[kind]
    assert at is None
    return message | delta["delta"] | {"usage": message["usage"] | delta["usage"]}


def without_ids(message):
    content = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    usage = {k: v for k, v in message["usage"].items() if not k.endswith("input_tokens")}
    return message | {"id": "", "content": content, "usage": usage}


def test_a_whole_message(house):
    answer = ask(house).json()
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "fox")
    assert answer["content"] == [{"type": "text", "text": ANSWER}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    spoken = house.model.tokenizer.encode(ANSWER, add_special_tokens=False)
    prompt = house.model.tokenizer.encode("[user] hi\n[assistant] ", add_special_tokens=False)
    usage = answer["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (len(prompt), len(spoken) + 1)
    assert (usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (0, 0)


@pytest.mark.parametrize("options", [{"step_seconds": 0.002}], indirect=True)
def test_a_stream_spells_the_same_message(house):
    told = events(ask(house, stream=True))
    assert sum(event["type"] == "content_block_delta" for event in told) > 5
    assert without_ids(joined(told)) == without_ids(ask(house).json())


def test_stop_sequences(house):
    for stream in (False, True):
        answer = ask(house, stop_sequences=["nothing", "jumps"], stream=stream)
        message = joined(events(answer)) if stream else answer.json()
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "jumps")
        assert message["content"][0]["text"] == ANSWER.split("jumps")[0]


def test_max_tokens(house):
    answer = ask(house, max_tokens=3).json()
    assert (answer["stop_reason"], answer["usage"]["output_tokens"]) == ("max_tokens", 3)


@pytest.mark.parametrize("options", [{"max_model_len": 24}], indirect=True)
def test_an_answer_ends_where_the_context_ends(house):
    assert ask(house, max_tokens=32_000).json()["stop_reason"] == "model_context_window_exceeded"
    error = ask(house, 400, messages=[{"role": "user", "content": "long " * 40}]).json()["error"]
    assert error["message"].startswith("prompt is too long: ")
    assert error["message"].endswith(" tokens > 23 maximum")


def test_prefill_continues_the_answer(house):
    ask(house, messages=[*HI, {"role": "assistant", "content": "The na"}])
    text = house.model.tokenizer.decode(house.recall.requests[-1].tokens)
    assert text == "[user] hi\n[assistant] The na"


def prompt_of(house, **more):
    """The prompt of a request, as the model gets it, and how many tokens count_tokens says it has."""
    more = {"messages": HI} | more
    ask(house, **more)
    tokens = house.recall.requests[-1].tokens
    more.pop("max_tokens", None)
    assert ask(house, path=COUNT, **more).json() == {"input_tokens": len(tokens)}
    return house.model.tokenizer.decode(tokens, skip_special_tokens=False)


@said(ANSWER)
def test_a_conversation_with_everything_reaches_the_template(house):
    history = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Ü"}},
                {"type": "tool_use", "id": "toolu_2", "name": "get_time", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "and?"},
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [{"type": "text", "text": "21"}],
                },
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no clock", "is_error": True},
            ],
        },
    ]
    text = prompt_of(
        house, system=[{"type": "text", "text": "Be brief."}], messages=history, tools=[WEATHER, TIME]
    )
    assert text.startswith("[tools] ")
    assert '"name": "get_weather"' in text
    rest = text[text.index("[system]") :]
    assert rest == (
        "[system] Be brief.\n[user] a\nb\n"
        '[assistant] <think>hm</think>I look.<tool_call>{"name": "get_weather", "arguments": {"city": "Ü"}}</tool_call>'
        '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>\n'
        "[tool get_weather] 21 (toolu_1)\n[tool get_time] Error: no clock (toolu_2)\n[user] and?\n"
        "[assistant] <think></think>"
    )


def test_neighbours_of_one_role_are_one_turn(house):
    text = prompt_of(house, messages=[*HI, {"role": "user", "content": "there"}], system="S")
    assert text == "[system] S\n[user] hi\nthere\n[assistant] "


@said("Let me look.\n" + TWO, step_seconds=0.002)
def test_calls_are_blocks(house):
    answer = ask(house, tools=[WEATHER, TIME]).json()
    text, weather, time = answer["content"]
    assert text == {"type": "text", "text": "Let me look."}
    assert (weather["type"], weather["name"], weather["input"]) == (
        "tool_use",
        "get_weather",
        {"city": "日本 {x}"},
    )
    assert (time["name"], time["input"]) == ("get_time", {})
    assert weather["id"].startswith("toolu_")
    assert weather["id"] != time["id"]
    assert answer["stop_reason"] == "tool_use"
    assert without_ids(joined(events(ask(house, tools=[WEATHER, TIME], stream=True)))) == without_ids(answer)


@said(TWO)
def test_at_most_one_call_where_parallel_use_is_disabled(house):
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    answer = ask(house, tools=[WEATHER, TIME], tool_choice=choice).json()
    assert [block["name"] for block in answer["content"]] == ["get_weather"]


@said(TWO)
def test_no_call_where_the_choice_is_none(house):
    answer = ask(house, tools=[WEATHER], tool_choice={"type": "none"}).json()
    assert answer["content"] == [{"type": "text", "text": TWO}]
    assert answer["stop_reason"] == "end_turn"


@said(CALL)
def test_a_call_that_is_cut_off_has_what_was_written(house):
    answer = ask(house, tools=[WEATHER], max_tokens=53).json()
    assert answer["stop_reason"] == "max_tokens"
    (call,) = answer["content"]
    assert call["input"] in ({}, {"city": ""})


@said("I need it.\n</think>\n\nIt is warm.", step_seconds=0.002)
def test_thinking_is_a_block_with_a_signature(house):
    asked = {"thinking": THINK, "max_tokens": 1100}
    answer = ask(house, **asked).json()
    thinking, text = answer["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "I need it.")
    assert thinking["signature"]
    assert text == {"type": "text", "text": "It is warm."}
    assert answer["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    assert without_ids(joined(events(ask(house, stream=True, **asked)))) == without_ids(answer)
    hidden = ask(house, thinking=THINK | {"display": "omitted"}, max_tokens=1100).json()
    assert hidden["content"] == [text]


@said(ANSWER)
def test_thinking_sets_the_switch_of_the_template(house):
    assert prompt_of(house, thinking=THINK, max_tokens=1100).endswith("[assistant] <think>")
    assert prompt_of(house, thinking={"type": "adaptive"}).endswith("[assistant] <think>")
    assert prompt_of(house, thinking={"type": "disabled"}).endswith("[assistant] <think></think>")
    assert prompt_of(house).endswith("[assistant] <think></think>")
    assert prompt_of(house, chat_template_kwargs={"enable_thinking": True}).endswith("[assistant] <think>")


def test_a_model_without_reasoning_refuses_it(house):
    error = ask(house, 400, thinking=THINK, max_tokens=1100).json()["error"]
    assert error["message"].startswith("thinking: ")
    assert ask(house, thinking={"type": "disabled"}).json()["content"]


PIECES = ["<think>", "</think>", "\n", " ", "say", CALL, "<tool_call>", "</tool_call>", "{", "日本", "END"]


@pytest.mark.parametrize("seed", range(12))
def test_streaming_equals_not_streaming(seed, options):
    chance = random.Random(seed)
    text = "".join(chance.choices(PIECES, k=chance.randint(1, 9)))
    interval = chance.choice((1, 3, 50))
    house, app = build_house(TOOLED | {"answer": text, "step_seconds": 0.0005, "stream_interval": interval})
    with TestClient(app) as client:
        house.client = client
        asked = {"tools": [WEATHER, TIME], "thinking": {"type": chance.choice(("adaptive", "disabled"))}}
        whole = ask(house, **asked).json()
        assert without_ids(joined(events(ask(house, stream=True, **asked)))) == without_ids(whole), text


MARK = {"type": "ephemeral"}


@said(ANSWER)
def test_marks_keep_the_prompt_and_are_counted(house):
    system = [
        {"type": "text", "text": "Be brief. " * 12, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    ]
    first, second = [
        ask(house, system=system, tools=[TIME | {"cache_control": MARK}]).json()["usage"] for _ in "12"
    ]
    requests = house.recall.requests
    (kept,) = requests[0].retention
    assert kept.seconds == 3600.0
    assert first["cache_creation_input_tokens"] == kept.end
    assert first["cache_read_input_tokens"] == 0
    total = len(requests[0].tokens)
    for usage in (first, second):
        names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        assert sum(usage[name] for name in names) == total
    assert second["cache_read_input_tokens"] >= kept.end - 4
    assert second["cache_creation_input_tokens"] == max(0, kept.end - second["cache_read_input_tokens"])


def test_a_mark_of_the_request_keeps_all_of_it(house):
    ask(house, cache_control=MARK)
    (request,) = house.recall.requests
    (kept,) = request.retention
    assert (kept.end, kept.seconds) == (len(request.tokens), 300.0)


def test_the_user_is_the_tenant_and_classes_have_anthropics_name(house):
    answer = ask(house, metadata={"user_id": "u-1"}, service_tier="standard_only", request_id="mine").json()
    assert answer["id"] == "msg-mine"
    assert answer["usage"]["service_tier"] == "standard"
    told = house.client.get("/v1/requests/msg-mine").json()
    assert told["tenant"] == "u-1"


BLOCK = {"role": "user", "content": [{"type": "text", "text": "x"}]}
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
            user({"type": "tool_result", "tool_use_id": "x", "content": [IMAGE]}),
            "messages[0].content[0].content[0]",
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
    for _ in range(600):
        body = mutated(chance)
        answer = house.client.post(PATH, json=body)
        counts[answer.status_code] = counts.get(answer.status_code, 0) + 1
        assert answer.status_code < 500, (body, answer.text)
        if answer.status_code != 200:
            assert answer.json()["error"]["message"]
        body.pop("max_tokens", None)
        assert house.client.post(COUNT, json=body).status_code < 500, body
    assert counts[200] > 50
    assert counts[400] > 200


GRANTS = {"good": Grant("acme"), "metrics": Grant(None, Role.METRICS), "admin": Grant(None, Role.ADMIN)}


@pytest.mark.parametrize("options", [{"grants": GRANTS}], indirect=True)
def test_keys_and_the_types_of_errors(house):
    def kind(status, path=PATH, headers=(), **more):
        body = {"model": "fox", "messages": HI, "max_tokens": 5} | more
        answer = house.client.post(path, json=body, headers=dict(headers))
        assert answer.status_code == status, answer.text
        assert answer.json()["type"] == "error"
        return answer.json()["error"]["type"]

    good = {"x-api-key": "good"}
    assert kind(401) == "authentication_error"
    assert kind(401, headers={"x-api-key": "bad"}) == "authentication_error"
    assert kind(403, headers={"x-api-key": "metrics"}) == "permission_error"
    assert kind(404, headers=good, model="other") == "not_found_error"
    assert kind(404, "/v1/messages/batches", headers=good) == "not_found_error"
    assert house.client.post("/pause", headers={"x-api-key": "admin"}).status_code == 200
    assert kind(529, headers=good) == "overloaded_error"
    assert kind(413, headers=good, system="x" * 200_000) == "request_too_large"
    assert house.client.get(PATH, headers=good).json()["error"]["type"] == "invalid_request_error"
    assert house.client.get(PATH, headers={"Authorization": "Bearer good"}).status_code == 405


@pytest.mark.parametrize("options", [{"grants": GRANTS}], indirect=True)
def test_a_key_in_either_header_is_the_tenants(house):
    for number, headers in enumerate(({"x-api-key": "good"}, {"Authorization": "Bearer good"})):
        body = {"model": "fox", "messages": HI, "max_tokens": 5, "request_id": f"r{number}"}
        assert house.client.post(PATH, json=body, headers=headers).status_code == 200
        told = house.client.get(f"/v1/requests/msg-r{number}", headers=headers).json()
        assert told["tenant"] == "acme"


def test_models_in_the_format_of_the_client(house):
    headers = {"anthropic-version": "2023-06-01"}
    listed = house.client.get("/v1/models", headers=headers).json()
    (card,) = listed["data"]
    assert (card["type"], card["id"], card["display_name"]) == ("model", "fox", "fox")
    assert card["created_at"].endswith("Z")
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "fox", "fox")
    assert house.client.get("/v1/models/fox", headers=headers).json() == card
    missing = house.client.get("/v1/models/bear", headers=headers).json()
    assert missing["error"]["type"] == "not_found_error"
    assert house.client.get("/v1/models").json()["object"] == "list"


@said("one two three four five six seven eight nine ten", step_seconds=0.02)
def test_an_error_inside_of_a_stream_is_an_event(house):
    house.runner.gate.clear()
    body = {"messages": HI, "max_tokens": 25, "stream": True, "request_id": "r"}
    answers = []
    thread = threading.Thread(target=lambda: answers.append(house.client.post(PATH, json=body)))
    thread.start()
    house.runner.gate.set()
    while not any(type(event).__name__ == "Emitted" for event in house.seen):
        time.sleep(0.001)
    house.runner.poison.add("msg-r")
    thread.join(20)
    told = events(answers[0])
    assert told[0]["type"] == "message_start"
    assert told[-1]["type"] == "error"
    assert told[-1]["error"] == {
        "type": "api_error",
        "message": "The server had an error while processing your request.",
    }


@pytest.mark.parametrize("options", [{"recall": with_memory}], indirect=True)
def test_the_response_cache_serves_messages(house):
    first, second = ask(house, temperature=0), ask(house, temperature=0)
    assert second.headers["X-Headrace-Cache"].startswith("hit")
    assert first.json()["content"] == second.json()["content"]
    chat = {"messages": HI, "temperature": 0, "max_tokens": 200}
    answer = house.client.post("/v1/chat/completions", json=chat)
    assert answer.headers["X-Headrace-Cache"].startswith("hit")
