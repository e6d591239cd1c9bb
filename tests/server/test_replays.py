"""What official clients return is accepted back as history, and means the same as the plain conversation."""

import json
from typing import Literal

import anthropic
import httpx
import openai
import pytest
from openai.types.chat.parsed_chat_completion import ParsedChatCompletionMessage
from openai.types.responses import ResponseFunctionToolCallItem, ResponseReasoningItem
from openai.types.responses.parsed_response import ParsedResponseFunctionToolCall, ParsedResponseOutputText
from pydantic import BaseModel

from tests.api.tool_scenes import TOOL_TEMPLATE
from tests.doubles.scripted_model import scripted_server

CALL = '<think>\nHm.\n</think>\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
REPORT = '{"city": "Paris", "degrees": 21}'
QUESTION = {"role": "user", "content": "Is it warm in Paris?"}
MORE = {"role": "user", "content": "And now?"}


class GetWeather(BaseModel):
    """The weather now."""

    city: str


class Report(BaseModel):
    city: Literal["Paris"]
    degrees: int


TOOLS = [openai.pydantic_function_tool(GetWeather, name="get_weather")]
RESPONSES_TOOLS = [
    {
        "type": "function",
        "name": "get_weather",
        "parameters": GetWeather.model_json_schema() | {"additionalProperties": False},
        "strict": True,
    }
]
ANTHROPIC_TOOLS = [{"name": "get_weather", "input_schema": GetWeather.model_json_schema()}]


def say(prompt):
    opened = prompt.endswith("<think>")
    if "warm!" in prompt:
        return f"Warm.</think>{REPORT}" if opened else REPORT
    return CALL.removeprefix("<think>") if opened else CALL


@pytest.fixture(scope="module")
def server():
    with scripted_server(say, template=TOOL_TEMPLATE, step_seconds=0.001) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(server):
    url = server.url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def parsed(client, messages):
    return client.chat.completions.parse(model="fox", messages=messages, tools=TOOLS, response_format=Report)


def streamed(client, messages):
    asked = {"model": "fox", "messages": messages, "tools": TOOLS, "response_format": Report}
    with client.chat.completions.stream(**asked) as stream:
        return stream.get_final_completion()


def created(client, messages):
    return client.chat.completions.create(model="fox", messages=messages, tools=TOOLS)


AS_HISTORY = {
    "object": lambda message: message,
    "dump": lambda message: message.model_dump(),
    "json": lambda message: json.loads(message.model_dump_json()),
    "to_dict": lambda message: message.to_dict(),
}


@pytest.mark.parametrize("ask", [parsed, streamed, created])
@pytest.mark.parametrize("form", AS_HISTORY)
def test_messages_of_chat_go_back(client, server, ask, form):
    called = ask(client, [QUESTION]).choices[0].message
    (call,) = called.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "warm!"}
    history = [QUESTION, AS_HISTORY[form](called), result]
    answer = ask(client, history).choices[0].message
    assert json.loads(answer.content) == json.loads(REPORT)
    assert ask(client, [*history, AS_HISTORY[form](answer), MORE]).choices[0].message.content == REPORT
    plain_call = {
        "id": call.id,
        "type": "function",
        "function": {"name": "get_weather", "arguments": call.function.arguments},
    }
    plain = [
        QUESTION,
        {"role": "assistant", "reasoning_content": "Hm.", "tool_calls": [plain_call]},
        result,
        {"role": "assistant", "content": answer.content},
        MORE,
    ]
    seen = len(server.script.prompts)
    ask(client, plain)
    assert len(server.script.prompts) == seen  # the same prompt


def response(client, items):
    return client.responses.create(model="fox", input=items, tools=RESPONSES_TOOLS, store=False)


def parsed_response(client, items):
    return client.responses.parse(
        model="fox", input=items, tools=RESPONSES_TOOLS, store=False, text_format=Report
    )


def streamed_response(client, items):
    with client.responses.stream(model="fox", input=items, tools=RESPONSES_TOOLS, store=False) as stream:
        return stream.get_final_response()


@pytest.mark.parametrize("ask", [response, parsed_response, streamed_response])
@pytest.mark.parametrize("form", AS_HISTORY)
def test_items_of_responses_go_back(client, server, ask, form):
    first = ask(client, [QUESTION]).output
    call = next(item for item in first if item.type == "function_call")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "warm!"}
    history = [QUESTION, *map(AS_HISTORY[form], first), result]
    second = ask(client, history)
    assert second.output_text == REPORT
    assert ask(client, [*history, *map(AS_HISTORY[form], second.output), MORE]).output_text == REPORT
    plain = [
        QUESTION,
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {
            "type": "function_call",
            "call_id": call.call_id,
            "name": "get_weather",
            "arguments": call.arguments,
        },
        result,
        {"role": "assistant", "content": REPORT},
        MORE,
    ]
    seen = len(server.script.prompts)
    ask(client, plain)
    assert len(server.script.prompts) == seen


def message(claude, messages):
    return claude.messages.create(
        model="fox", max_tokens=200, messages=messages, tools=ANTHROPIC_TOOLS, thinking=THINK
    )


def streamed_message(claude, messages):
    asked = {"max_tokens": 200, "messages": messages, "tools": ANTHROPIC_TOOLS, "thinking": THINK}
    with claude.messages.stream(model="fox", **asked) as stream:
        return stream.get_final_message()


def parsed_message(claude, messages):
    asked = {"max_tokens": 200, "messages": messages, "tools": ANTHROPIC_TOOLS, "thinking": THINK}
    return claude.messages.parse(model="fox", output_format=Report, **asked)


THINK = {"type": "adaptive"}


@pytest.mark.parametrize("ask", [message, streamed_message, parsed_message])
@pytest.mark.parametrize("form", AS_HISTORY)
def test_blocks_of_messages_go_back(claude, server, ask, form):
    first = ask(claude, [QUESTION]).content
    call = next(block for block in first if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "warm!"}
    history = [
        QUESTION,
        {"role": "assistant", "content": [*map(AS_HISTORY[form], first)]},
        {"role": "user", "content": [result]},
    ]
    second = ask(claude, history).content
    texts = [block.text for block in second if block.type == "text"]
    assert texts == [REPORT]
    seen = len(server.script.prompts)
    again = [*history, {"role": "assistant", "content": [*map(AS_HISTORY[form], second)]}, MORE]
    assert ask(claude, again).content[-1].text == REPORT
    redacted = {"type": "redacted_thinking", "data": "abc"}
    again[1] = {"role": "assistant", "content": [redacted, *again[1]["content"]]}
    ask(claude, again)
    assert len(server.script.prompts) <= seen + 1  # the redacted block adds nothing


REFUSAL = {"role": "assistant", "refusal": "I cannot."}
ANNOTATION = {"type": "url_citation", "url_citation": {"start_index": 0, "new_field": [1]}}
SAME = [
    {"role": "assistant", "content": "I cannot."},
    {
        "role": "assistant",
        "content": None,
        "refusal": "I cannot.",
        "annotations": [ANNOTATION],
        "parsed": {"a": 1},
    },
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}], "audio": None},
    {"role": "assistant", "content": [{"type": "text", "text": "I cannot.", "annotations": [ANNOTATION]}]},
    {
        "role": "assistant",
        "content": "I cannot.",
        "function_call": None,
        "thinking_blocks": [],
        "future": None,
    },
    {"role": "assistant", "content": "I cannot.", "tool_calls": None, "provider_specific_fields": {"a": 1}},
]


@pytest.mark.parametrize("turn", SAME)
def test_a_refusal_and_output_fields_in_a_message(server, turn):
    answer = httpx.post(
        f"{server.url}/chat/completions", json={"model": "fox", "messages": [QUESTION, turn, MORE]}
    )
    assert answer.status_code == 200, answer.text
    assert sum("I cannot." in prompt for prompt in server.script.prompts) == 1


ITEM = {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "phase": "final_answer"}
SAME_ITEMS = [
    {"role": "assistant", "content": "No way."},
    ITEM | {"content": [{"type": "refusal", "refusal": "No way.", "future": None}], "future": None},
    ITEM
    | {
        "content": [
            {"type": "output_text", "text": "No way.", "annotations": [ANNOTATION], "parsed": {"a": 1}}
        ]
    },
    ITEM | {"content": [{"type": "output_text", "text": "No way.", "logprobs": None}], "phase": None},
]


@pytest.mark.parametrize("item", SAME_ITEMS)
def test_a_refusal_and_output_fields_in_an_item(server, item):
    answer = httpx.post(f"{server.url}/responses", json={"model": "fox", "input": [QUESTION, item, MORE]})
    assert answer.status_code == 200, answer.text
    assert sum("No way." in prompt for prompt in server.script.prompts) == 1


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", {"messages": [QUESTION | {"mood": 1}]}, "messages[0].mood"),
        ("chat/completions", {"messages": [QUESTION | {"parsed": {}}]}, "messages[0].parsed"),
        ("chat/completions", {"messages": [QUESTION, REFUSAL | {"mood": 1}]}, "messages[1].mood"),
        ("chat/completions", {"messages": [QUESTION, REFUSAL | {"audio": {"id": "a"}}]}, "messages[1].audio"),
        ("chat/completions", {"messages": [QUESTION], "mood": None}, "mood"),
        ("responses", {"input": [QUESTION | {"mood": 1}]}, "input[0].mood"),
        ("responses", {"input": [QUESTION | {"parsed": 1}]}, "input[0].parsed"),
        ("responses", {"input": "x", "mood": None}, "mood"),
    ],
)
def test_an_unknown_field_elsewhere_is_refused(server, path, body, param):
    answer = httpx.post(f"{server.url}/{path}", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    "form",
    [
        ParsedChatCompletionMessage,
        ParsedResponseOutputText,
        ResponseReasoningItem,
        ParsedResponseFunctionToolCall,
        ResponseFunctionToolCallItem,
    ],
)
def test_every_field_of_the_clients_own_types_may_be_null(server, form):
    """The newest fields of the installed client, too."""
    nulls = dict.fromkeys(form.model_fields)
    chat = form is ParsedChatCompletionMessage
    fill = {
        ParsedChatCompletionMessage: {"role": "assistant", "content": "x"},
        ParsedResponseOutputText: {"type": "output_text", "text": "x"},
        ResponseReasoningItem: {"type": "reasoning", "id": "rs_1", "summary": []},
        ParsedResponseFunctionToolCall: {
            "type": "function_call",
            "call_id": "c",
            "name": "f",
            "arguments": "{}",
        },
        ResponseFunctionToolCallItem: {
            "type": "function_call",
            "call_id": "c",
            "name": "f",
            "arguments": "{}",
        },
    }[form]
    turn = nulls | fill
    if form is ParsedResponseOutputText:
        turn = {"role": "assistant", "content": [turn]}
    path, field = ("chat/completions", "messages") if chat else ("responses", "input")
    answer = httpx.post(f"{server.url}/{path}", json={field: [QUESTION, turn, MORE]})
    assert answer.status_code == 200, answer.text
