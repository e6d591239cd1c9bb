"""The Messages API on the wire: blocks in, blocks and events out."""

import random

import pytest
from starlette.testclient import TestClient

from tests.api.anthropic.scenes import (
    CALL,
    COUNT,
    HI,
    PATH,
    THINK,
    TIME,
    TOOLED,
    TWO,
    WEATHER,
    ask,
    events,
    joined,
    said,
    without_ids,
)
from tests.api.conftest import ANSWER, build_house, in_step


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


def test_a_stream_spells_the_same_message(house, monkeypatch):
    in_step(house, monkeypatch)
    reported = events(ask(house, stream=True))
    assert sum(event["type"] == "content_block_delta" for event in reported) > 5
    assert without_ids(joined(reported)) == without_ids(ask(house).json())


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
    text = house.model.tokenizer.decode(house.lookup.requests[-1].tokens)
    assert text == "[user] hi\n[assistant] The na"


def prompt_of(house, **more):
    """The prompt of a request, as the model gets it, and how many tokens count_tokens says it has."""
    more = {"messages": HI} | more
    ask(house, **more)
    tokens = house.lookup.requests[-1].tokens
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
    requests = house.lookup.requests
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
    (request,) = house.lookup.requests
    (kept,) = request.retention
    assert (kept.end, kept.seconds) == (len(request.tokens), 300.0)


def test_the_user_is_the_tenant_and_classes_have_anthropics_name(house):
    answer = ask(house, metadata={"user_id": "u-1"}, service_tier="standard_only", request_id="mine").json()
    assert answer["id"] == "msg_mine"
    assert answer["usage"]["service_tier"] == "standard"
    reported = house.client.get("/v1/requests/msg_mine").json()
    assert reported["tenant"] == "u-1"


AGENT = {
    "system": [
        {"type": "text", "text": "You are an agent. " * 20},
        {"type": "text", "text": "Rules. " * 20, "cache_control": {"type": "ephemeral"}},
    ],
    "tools": [WEATHER, TIME],
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "metadata": {"user_id": '{"device_id":"d","account_uuid":"","session_id":"s"}'},
    "max_tokens": 32_000,
}
"""What coding agents send with each turn."""

TEXT = {"type": "text", "text": "hi"}
INPUTS = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")


@said("I look.</think>" + CALL)
def test_the_second_turn_of_an_agent_computes_what_is_new(house):
    asked = [
        {"role": "user", "content": [{"type": "text", "text": "<reminder>Be careful.</reminder>"}, TEXT]}
    ]
    first = ask(house, path=PATH + "?beta=true", messages=asked, **AGENT).json()
    assert [block["type"] for block in first["content"]] == ["thinking", "tool_use"]
    result = {
        "type": "tool_result",
        "tool_use_id": first["content"][1]["id"],
        "content": "21",
        "cache_control": MARK,
    }
    history = [
        *asked,
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result]},
    ]
    usage = ask(house, path=PATH + "?beta=true", messages=history, **AGENT).json()["usage"]
    written = usage["cache_creation_input_tokens"] + usage["input_tokens"]
    assert usage["cache_read_input_tokens"] >= sum(first["usage"][name] for name in INPUTS) - 4
    assert written < 0.2 * usage["cache_read_input_tokens"]
