"""Tools and reasoning on the wire: what is asked, what is told, and what is refused."""

import json
import random

import pytest

from headrace.api.compile.model import Dialect
from headrace.text.template import ChatTemplate
from tests.api.caching import with_memory
from tests.api.openai.test_chat import HI, PATH, events
from tests.api.tool_scenes import TIME, TOOL_TEMPLATE, WEATHER
from tests.doubles.scripted_model import with_special_tokens

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "日本 {x}"}}\n</tool_call>'
TWO = CALL + '\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
HOUSE = {
    "template": TOOL_TEMPLATE,
    "max_model_len": 1200,
    "num_blocks": 1024,
    "trust_request_chat_template": True,
}


@pytest.fixture
def options(request):
    return HOUSE | getattr(request, "param", {})


def said(text, **more):
    """Decorates a test with what the model says."""
    return pytest.mark.parametrize("options", [{"answer": text, **more}], indirect=True)


def ask(house, status=200, **more):
    answer = house.client.post(PATH, json={"messages": HI, "tools": [WEATHER, TIME]} | more)
    assert answer.status_code == status, answer.text
    return answer


def allowing(names, mode="auto"):
    """A request whose ``tool_choice`` allows these functions."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}}


def message_of(answer):
    (choice,) = answer.json()["choices"]
    return choice["message"], choice["finish_reason"]


def joined(answer):
    """The message that a stream spells, and why it ended."""
    message = {"content": "", "reasoning_content": "", "tool_calls": []}
    reason = None
    for event in events(answer):
        for choice in event["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content", "")
            message["reasoning_content"] += delta.get("reasoning_content", "")
            assert delta.get("reasoning_content") == delta.get("reasoning")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(message["tool_calls"])
                    message["tool_calls"].append(
                        {"id": call["id"], "type": call["type"], "function": call["function"]}
                    )
                else:
                    assert set(call) == {"index", "function"}
                    assert set(call["function"]) == {"arguments"}
                    function = message["tool_calls"][call["index"]]["function"]
                    function["arguments"] += call["function"]["arguments"]
            reason = choice["finish_reason"] or reason
    return message, reason


@said("Let me look.\n" + TWO)
def test_tool_calls_are_separate_from_content(house):
    message, reason = message_of(ask(house))
    assert (message["content"], reason) == ("Let me look.", "tool_calls")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "get_weather", "arguments": '{"city": "日本 {x}"}'},
        {"name": "get_time", "arguments": "{}"},
    ]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert all(call["type"] == "function" for call in message["tool_calls"])


@said("Let me look.\n" + TWO, step_seconds=0.002)
def test_a_stream_spells_the_same_calls(house):
    whole, reason = message_of(ask(house))
    answer = ask(house, stream=True)
    message, streamed_reason = joined(answer)
    assert streamed_reason == reason == "tool_calls"
    assert message["content"] == whole["content"]
    assert [call["function"] for call in message["tool_calls"]] == [
        call["function"] for call in whole["tool_calls"]
    ]


@said(CALL)
def test_a_call_without_text_has_no_content(house):
    message, _ = message_of(ask(house))
    assert message["content"] is None


@said("<tool_call>oops</tool_call> {")
def test_a_broken_call_is_content(house):
    assert message_of(ask(house))[0]["content"] == "<tool_call>oops</tool_call> {"
    assert "tool_calls" not in message_of(ask(house))[0]
    message, reason = joined(ask(house, stream=True))
    assert (message["content"], message["tool_calls"], reason) == (
        "<tool_call>oops</tool_call> {",
        [],
        "stop",
    )


@said(CALL)
def test_a_call_that_is_cut_off_says_length(house):
    whole = ask(house, max_tokens=55)
    (choice,) = whole.json()["choices"]
    assert choice["finish_reason"] == "length"
    assert '{"city": "日本 {x}"}'.startswith(choice["message"]["tool_calls"][0]["function"]["arguments"])
    assert joined(ask(house, max_tokens=55, stream=True))[1] == "length"


@said(TWO)
@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_calls_there_is_one(house, stream):
    answer = ask(house, parallel_tool_calls=False, stream=stream)
    message, reason = joined(answer) if stream else message_of(answer)
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather"]
    assert reason == "tool_calls"


@said("Look:" + TWO + " And so on." * 9, lookup=with_memory)
def test_without_parallel_calls_the_answer_ends_with_its_first_call(house):
    asked = {"temperature": 0}
    one = ask(house, parallel_tool_calls=False, **asked)
    used = one.json()["usage"]["completion_tokens"]
    assert used == len(house.model.tokenizer.encode("Look:" + CALL[: CALL.index("}}") + 1], False))
    choice = one.json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", None)
    again = ask(house, parallel_tool_calls=False, **asked)
    assert again.json()["usage"]["completion_tokens"] == used
    assert again.headers["X-Headrace-Cache"] != one.headers["X-Headrace-Cache"]
    many, _ = message_of(ask(house, **asked))
    assert len(many["tool_calls"]) == 2


@said(CALL)
def test_no_tools_and_no_choice_leave_the_text_as_it_is(house):
    for more in (
        {"tool_choice": "none"},
        {"tools": []},
        {"tools": None},
        {"tools": None, "tool_choice": "auto"},
    ):
        message, reason = message_of(ask(house, **more))
        assert (message["content"], reason) == (CALL, "stop")
        assert "tool_calls" not in message


@said("ok")
def test_the_template_gets_tools_and_history(house):
    called = {
        "id": "c1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
    }
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [called], "reasoning_content": "Look."},
        {"role": "tool", "tool_call_id": "c1", "content": "21"},
    ]
    answer = ask(house, messages=messages, return_token_ids=True).json()
    prompt = house.model.tokenizer.decode(answer["prompt_token_ids"])
    offered = {
        "type": "function",
        "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}},
    }
    assert json.dumps(offered) in prompt
    assert json.dumps(WEATHER) in prompt
    assert prompt.endswith(
        '[user] Weather?\n[assistant] <think>Look.</think><tool_call>{"name": "get_weather", "arguments": '
        '{"city": "Paris"}}</tool_call>\n[tool get_weather] 21 (c1)\n[assistant] '
    )
    counted = house.client.post("/tokenize", json={"messages": messages, "tools": [WEATHER, TIME]}).json()
    assert counted["tokens"] == answer["prompt_token_ids"]


@said("<think>\nHm, so.\n</think>\n\nIt is warm.")
def test_reasoning_is_returned_and_counted(house):
    for tools in ([WEATHER], None):
        answer = ask(house, tools=tools)
        message, reason = message_of(answer)
        assert (message["content"], message["reasoning_content"], reason) == (
            "It is warm.",
            "Hm, so.",
            "stop",
        )
        assert message["reasoning"] == message["reasoning_content"]
        usage = answer.json()["usage"]
        thought = house.model.tokenizer.encode("<think>\nHm, so.\n</think>", add_special_tokens=False)
        assert usage["completion_tokens_details"]["reasoning_tokens"] == len(thought)
        streamed = ask(house, tools=tools, stream=True, stream_options={"include_usage": True})
        assert joined(streamed)[0] == {
            "content": "It is warm.",
            "reasoning_content": "Hm, so.",
            "tool_calls": [],
        }
        details = events(streamed)[-1]["usage"]["completion_tokens_details"]
        assert details["reasoning_tokens"] == len(thought)


@said("Hm.</think>Warm." + CALL)
def test_the_prompt_may_have_opened_the_reasoning(house):
    message, _ = message_of(ask(house, reasoning_effort="high"))
    assert (message["content"], message["reasoning_content"]) == ("Warm.", "Hm.")
    assert len(message["tool_calls"]) == 1
    message, _ = message_of(ask(house, chat_template_kwargs={"enable_thinking": True}))
    assert message["reasoning_content"] == "Hm."
    message, _ = message_of(ask(house, reasoning_effort="none"))
    assert message["content"] == "Hm.</think>Warm."
    assert "reasoning_content" not in message


@said("<think>Hm.</think>Warm.")
@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_may_be_left_out(house, stream):
    answer = ask(house, include_reasoning=False, stream=stream)
    message, _ = joined(answer) if stream else message_of(answer)
    assert (message["content"], message.get("reasoning_content") or "") == ("Warm.", "")


@said("I think: <think>Go")
def test_a_continued_message_may_be_inside_its_reasoning(house):
    messages = [*HI, {"role": "assistant", "content": "<think>So"}]
    answer = ask(house, messages=messages, continue_final_message=True)
    assert message_of(answer)[0]["reasoning_content"] == "I think: <think>Go"


MISTRAL = "{% for t in tools or () %}{{ t.function.name }}{% endfor %}[TOOL_CALLS]{{ messages[-1].content }}"


@pytest.mark.parametrize(
    "options",
    [
        {
            "answer": 'So.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}',
            "template": MISTRAL,
            "tokenizer": with_special_tokens(["[TOOL_CALLS]", "[ARGS]", "[OTHER]"]),
        }
    ],
    indirect=True,
)
def test_markers_may_be_special_tokens(house):
    message, reason = message_of(ask(house))
    assert (message["content"], reason) == ("So.", "tool_calls")
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert len(call["id"]) == 9
    plain, _ = message_of(ask(house, tools=None))
    assert plain["content"] == 'So.get_weather{"city": "Paris"}'  # special tokens are left out as ever


@said("Let me look.\n" + TWO)
def test_logprobs_and_token_ids_are_returned_for_every_token(house):
    whole = ask(house, logprobs=True, return_token_ids=True).json()["choices"][0]
    streamed = [
        e["choices"][0] for e in events(ask(house, logprobs=True, return_token_ids=True, stream=True))
    ]
    tokens = [token for choice in streamed for token in choice.get("token_ids", ())]
    assert tokens == whole["token_ids"]
    scores = [entry for choice in streamed if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert scores == whole["logprobs"]["content"]


@said("Let me look.\n" + CALL, lookup=with_memory)
def test_a_cached_answer_has_the_same_calls_with_ids_of_their_own(house):
    asked = {"temperature": 0, "seed": 1}
    first, again = ask(house, **asked), ask(house, **asked)
    assert again.headers["X-Headrace-Cache"] != first.headers["X-Headrace-Cache"]
    one, two = message_of(first)[0], message_of(again)[0]
    assert one["tool_calls"][0].pop("id") != two["tool_calls"][0].pop("id")
    assert one == two
    message, reason = joined(ask(house, **asked, stream=True))
    assert message["tool_calls"][0]["function"] == one["tool_calls"][0]["function"]
    assert reason == "tool_calls"
    untold, _ = message_of(ask(house, **asked, tool_choice="none"))
    assert untold["content"] == "Let me look.\n" + CALL


@said(CALL)
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": "x"}, "tools"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "x" * 129}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": 5}}]},
            "tools[0].function.parameters",
        ),
        (
            {
                "tools": [
                    TIME,
                    {"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}},
                ]
            },
            "tools[1].function.parameters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"properties": []}}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [{"type": "function", "function": {"name": "a", "x": 1}}]}, "tools[0].function.x"),
        ({"tools": [TIME, TIME]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]}, "tools"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        (allowing([]), "tool_choice.allowed_tools.tools"),
        (allowing(["get_time"], mode="none"), "tool_choice.allowed_tools.mode"),
        (allowing(["get_time", "other"]), "tool_choice.allowed_tools.tools[1].function.name"),
        (allowing(["get_time"], mode="required") | {"tools": []}, "tool_choice"),
        (allowing(["get_time"], mode="required") | {"guided_regex": "a"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": "required", "guided_json": {"type": "object"}}, "tool_choice"),
        (
            {
                "tool_choice": {"type": "function", "function": {"name": "get_time"}},
                "structured_outputs": {"regex": "a"},
            },
            "tool_choice",
        ),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"reasoning_effort": "most"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "y"}]}, "messages[0].tool_call_id"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]},
            "messages[0].tool_calls[0].function",
        ),
        ({"chat_template": "{{ messages[0].content }}"}, "tools"),
        ({"chat_template": "{{ tools }}"}, "tools"),
    ],
)
def test_what_is_wrong_is_refused_by_its_path(house, body, param):
    error = ask(house, status=400, **body).json()["error"]
    assert error["param"] == param, error
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("options", [{"template": "{{ messages[0].content }}"}], indirect=True)
def test_a_template_without_a_switch_refuses_an_effort(house):
    assert "does not know tools" in ask(house, status=400).json()["error"]["message"]
    error = ask(house, status=400, tools=None, reasoning_effort="low").json()["error"]
    assert error["param"] == "reasoning_effort"
    ask(house, tools=None, reasoning_effort="none")


@said("ok")
@pytest.mark.parametrize("arguments", ["", "{", "[1]", "[" * 50_000])
def test_broken_arguments_in_the_history_are_no_error_of_the_server(house, arguments):
    called = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}, "index": 0}
    messages = [
        *HI,
        {"role": "assistant", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c", "content": ""},
    ]
    answer = house.client.post(PATH, json={"messages": messages, "tools": [TIME]})
    assert answer.status_code in (200, 400)


def test_templates_are_asked_in_which_form_they_want_arguments():
    text = "{% for c in messages[-1].tool_calls or () %}{{ 'A' + c.function.arguments }}{% endfor %}"
    assert Dialect(ChatTemplate({"default": text})).arguments_are_text(None)
    assert not Dialect(ChatTemplate({"default": TOOL_TEMPLATE})).arguments_are_text(None)
    assert not Dialect(ChatTemplate({})).knows_tools(None)
    assert Dialect(ChatTemplate({})).knows_tools("{{ tools[0].function.name }}")


ONE_CALL = (
    "{% for t in tools or () %}{{ t.function.name }}{% endfor %}<tool_call>{% for m in messages %}"
    "{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call only') }}{% endif %}"
    "({{ m.content }} {{ m.tool_calls[0].function.arguments | tojson }})"
    "{% else %}[{{ m.role }} {{ m.content }}]{% endif %}{% endfor %}"
)


@said("ok", template=ONE_CALL)
def test_several_calls_are_parted_for_templates_that_take_one(house):
    calls = [
        {"id": name, "type": "function", "function": {"name": "get_time", "arguments": f'{{"at": "{name}"}}'}}
        for name in "ab"
    ]
    messages = [
        *HI,
        {"role": "assistant", "content": "Look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "b", "content": "B"},
        {"role": "tool", "tool_call_id": "a", "content": "A"},
        {"role": "assistant", "content": "So.", "tool_calls": []},
    ]
    answer = ask(house, messages=messages, return_token_ids=True).json()
    prompt = house.model.tokenizer.decode(answer["prompt_token_ids"])
    assert prompt.endswith('[user hi](Look. {"at": "a"})[tool A]( {"at": "b"})[tool B][assistant So.]')
    assert not Dialect(ChatTemplate({"default": ONE_CALL})).takes_several_calls(None)
    assert Dialect(ChatTemplate({"default": TOOL_TEMPLATE})).takes_several_calls(None)


THINKING = (
    "{% for t in tools or () %}{{ t.function.name }}{% endfor %}{# <|start|> <|channel|> <|message|> #}"
    "{% for m in messages %}[{{ m.thinking }}]{% endfor %}"
)


@said("ok", template=THINKING)
def test_harmony_templates_get_the_reasoning_before_a_call(house):
    call = {"id": "c", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    messages = [*HI, {"role": "assistant", "tool_calls": [call], "reasoning": "Ask."}]
    answer = ask(house, messages=messages, return_token_ids=True).json()
    assert house.model.tokenizer.decode(answer["prompt_token_ids"]).endswith("[][Ask.]")


def random_value(chance, depth=0):
    names = [
        "type",
        "function",
        "name",
        "parameters",
        "arguments",
        "id",
        "properties",
        "strict",
        "content",
        "role",
    ]
    words = ["function", "get_time", "auto", "none", "assistant", "tool", "user", "object", "", "{}", "x"]
    kind = chance.randrange(9 if depth < 4 else 6)
    if kind < 6:
        return [None, True, chance.randrange(-2, 200), 0.5, chance.choice(words), chance.choice(words)][kind]
    if kind == 6:
        return [random_value(chance, depth + 1) for _ in range(chance.randrange(3))]
    return {chance.choice(names): random_value(chance, depth + 1) for _ in range(chance.randrange(5))}


def mutated(chance, value):
    """``value`` with one place replaced, left out or added to."""
    if chance.random() < 0.2 or not isinstance(value, dict | list) or not value:
        return random_value(chance)
    copy = dict(value) if isinstance(value, dict) else list(value)
    key = chance.choice(list(copy)) if isinstance(copy, dict) else chance.randrange(len(copy))
    copy[key] = mutated(chance, copy[key])
    return copy


@said("<think>a</think>b" + CALL)
def test_no_body_makes_the_server_fail(house):
    """Valid bodies with random changes: each is answered, or refused with a message and a code."""
    chance = random.Random(27)
    call = {"id": "c", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    valid = {
        "messages": [
            *HI,
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "r"},
            {"role": "tool", "tool_call_id": "c", "content": "x"},
        ],
        "tools": [WEATHER, TIME],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning_effort": "low",
        "include_reasoning": True,
        "max_tokens": 5,
    }
    statuses = set()
    for _ in range(500):
        body = mutated(chance, valid)
        answer = house.client.post(PATH, json=body)
        statuses.add(answer.status_code)
        assert answer.status_code in (200, 400), (body, answer.text)
        if answer.status_code == 400:
            error = answer.json()["error"]
            assert error["message"]
            assert error["code"]
    assert statuses == {200, 400}
