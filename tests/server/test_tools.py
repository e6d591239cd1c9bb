"""The official client's tool loop and reasoning, against a real server whose model says what a script says."""

import asyncio
import json

import jsonschema
import openai
import pytest

from tests.api.tool_scenes import TIME, TOOL_TEMPLATE, WEATHER
from tests.doubles.scripted_model import scripted_server, with_special_tokens
from tests.server.conftest import serving

TOOLS = [WEATHER, TIME]
QUESTION = [{"role": "user", "content": "Is it warm in Paris, and what time is it?"}]
CALLS = (
    "<think>\nI need both.\n</think>\n\nI look it up.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris {\\"x\\"} </tool_call> 😀"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)
ANSWER = "<think>Good.</think>It is 21 degrees at noon."
ARGUMENTS = {"city": 'Paris {"x"} </tool_call> 😀'}


@pytest.fixture
def server():
    with scripted_server([CALLS, ANSWER], template=TOOL_TEMPLATE, step_seconds=0.001) as running:
        yield running


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def results(message):
    """What the tools answer."""
    said = {"get_weather": '{"degrees": 21}', "get_time": "12:00"}
    return [
        {"role": "tool", "tool_call_id": call.id, "content": said[call.function.name]}
        for call in message.tool_calls
    ]


def test_a_tool_loop(client, server):
    first = client.chat.completions.create(model="fox", messages=QUESTION, tools=TOOLS)
    (choice,) = first.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look it up."
    assert choice.message.reasoning_content == choice.message.reasoning == "I need both."
    weather, time = choice.message.tool_calls
    assert (weather.type, weather.function.name) == ("function", "get_weather")
    assert json.loads(weather.function.arguments) == ARGUMENTS
    assert (time.function.name, time.function.arguments) == ("get_time", "{}")
    assert first.usage.completion_tokens_details.reasoning_tokens > 0

    history = [*QUESTION, choice.message, *results(choice.message)]
    second = client.chat.completions.create(model="fox", messages=history, tools=TOOLS)
    (choice,) = second.choices
    assert (choice.message.content, choice.finish_reason) == ("It is 21 degrees at noon.", "stop")
    assert choice.message.tool_calls is None
    reported = server.script.prompts[-1]
    assert "<think>I need both.</think>I look it up.<tool_call>" in reported
    assert '[tool get_weather] {"degrees": 21}' in reported


def test_a_stream_spells_the_calls_and_the_reasoning(client):
    chunks = list(
        client.chat.completions.create(
            model="fox", messages=QUESTION, tools=TOOLS, stream=True, stream_options={"include_usage": True}
        )
    )
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "I look it up."
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "I need both."
    pieces = [piece for delta in deltas for piece in delta.tool_calls or ()]
    named = [piece for piece in pieces if piece.function.name]
    assert [(piece.index, piece.function.name) for piece in named] == [(0, "get_weather"), (1, "get_time")]
    assert all(piece.id and piece.type == "function" for piece in named)
    arguments = ["".join(piece.function.arguments for piece in pieces if piece.index == i) for i in (0, 1)]
    assert [json.loads(text) for text in arguments] == [ARGUMENTS, {}]
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens > 0


def test_the_streaming_helper_builds_the_same_message(client):
    with client.chat.completions.stream(model="fox", messages=QUESTION, tools=TOOLS) as stream:
        events = list(stream)
        message = stream.get_final_completion().choices[0].message
    assert json.loads(message.tool_calls[0].function.arguments) == ARGUMENTS
    assert message.content == "I look it up."
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [event.name for event in done] == ["get_weather", "get_time"]


def test_the_async_client_runs_the_same_loop(server):
    async def loop():
        async with openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
            first = await client.chat.completions.create(model="fox", messages=QUESTION, tools=TOOLS)
            message = first.choices[0].message
            history = [*QUESTION, message.model_dump(), *results(message)]
            stream = await client.chat.completions.create(
                model="fox", messages=history, tools=TOOLS, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(loop()) == "It is 21 degrees at noon."


def test_refusals_name_the_field(client):
    with pytest.raises(openai.BadRequestError, match="tool_choice and structured_outputs") as error:
        client.chat.completions.create(
            model="fox",
            messages=QUESTION,
            tools=TOOLS,
            tool_choice="required",
            extra_body={"structured_outputs": {"json": {"type": "object"}}},
        )
    assert error.value.param == "tool_choice"
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(
            model="fox", messages=QUESTION, tools=[{"type": "function", "function": {"name": "no name"}}]
        )
    assert error.value.param == "tools[0].function.name"


def test_langchain_binds_tools(server):
    langchain_openai = pytest.importorskip("langchain_openai")
    chat = langchain_openai.ChatOpenAI(model="fox", base_url=server.url, api_key="none", max_retries=0)
    message = chat.bind_tools(TOOLS).invoke("Is it warm in Paris, and what time is it?")
    assert [(call["name"], call["args"]) for call in message.tool_calls] == [
        ("get_weather", ARGUMENTS),
        ("get_time", {}),
    ]
    assert message.response_metadata["finish_reason"] == "tool_calls"


HARMONY = [
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<|call|>",
]
HARMONY_TEMPLATE = (
    "{% for tool in tools or () %}type {{ tool.function.name }} = (_: any) => any;{% endfor %}"
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "<|start|>assistant{# <|channel|> #}"
)


def test_harmony_with_special_tokens():
    text = (
        "<|channel|>analysis<|message|>Ask.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        '<|constrain|>json<|message|>{"city": "Paris"}<|call|>'
    )
    tokenizer = with_special_tokens(HARMONY)
    with (
        scripted_server([text], template=HARMONY_TEMPLATE, tokenizer=tokenizer) as running,
        openai.OpenAI(base_url=running.url, api_key="none", max_retries=0) as client,
    ):
        answer = client.chat.completions.create(model="fox", messages=QUESTION, tools=TOOLS)
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.reasoning_content) == (None, "Ask.")
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Paris"}')
    assert choice.finish_reason == "tool_calls"


BOOKING = {
    "type": "function",
    "function": {
        "name": "book_table",
        "parameters": {
            "type": "object",
            "properties": {
                "guests": {"type": "integer", "minimum": 1, "maximum": 9},
                "place": {"enum": ["inside", "terrace"]},
            },
            "required": ["guests", "place"],
            "additionalProperties": False,
        },
    },
}
CHOICE = {
    "type": "function",
    "function": {
        "name": "choose",
        "parameters": {
            "type": "object",
            "properties": {"yes": {"type": "boolean"}},
            "required": ["yes"],
            "additionalProperties": False,
        },
    },
}
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in (BOOKING, CHOICE)}


@pytest.fixture(scope="module")
def forced(tmp_path_factory):
    """A client of the built-in model with a template that offers tools; only a grammar makes this model call them."""
    path = tmp_path_factory.mktemp("template") / "tools.jinja"
    path.write_text(TOOL_TEMPLATE, encoding="utf-8")
    with (
        serving("--chat-template", str(path)) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.mark.parametrize("temperature", [0, 1.5])
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"book_table", "choose"}),
        ({"type": "function", "function": {"name": "choose"}}, {"choose"}),
    ],
    ids=["required", "named"],
)
def test_a_demanded_call_follows_its_schema(forced, choice, names, parallel, temperature):
    answer = forced.chat.completions.create(
        model="builtin",
        messages=[{"role": "user", "content": "Book a table."}],
        tools=[BOOKING, CHOICE],
        tool_choice=choice,
        parallel_tool_calls=parallel,
        temperature=temperature,
        seed=5,
        max_tokens=400,
    )
    (reported,) = answer.choices
    calls = reported.message.tool_calls
    assert calls
    assert reported.message.content is None
    if not parallel or choice != "required":
        assert (len(calls), reported.finish_reason) == (1, "tool_calls")
    for call in calls[: None if reported.finish_reason == "tool_calls" else -1]:
        assert call.function.name in names
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


FORM = {"type": "json_schema", "json_schema": {"name": "booking", "schema": SCHEMAS["book_table"]}}


def test_with_a_response_format_an_answer_is_its_json_or_a_call(forced):
    """Agents send both: the model may call tools, and an answer without calls follows the schema."""
    asked = {"model": "builtin", "messages": QUESTION, "tools": [CHOICE], "response_format": FORM}
    kinds = set()
    for seed in range(40):
        answer = forced.chat.completions.create(seed=seed, temperature=2, parallel_tool_calls=False, **asked)
        (reported,) = answer.choices
        kinds.add(reported.finish_reason)
        if reported.finish_reason == "tool_calls":
            (call,) = reported.message.tool_calls
            assert reported.message.content is None
            jsonschema.validate(json.loads(call.function.arguments), SCHEMAS["choose"])
        else:
            jsonschema.validate(json.loads(reported.message.content), SCHEMAS["book_table"])
        if len(kinds) == 2:
            break
    assert kinds == {"stop", "tool_calls"}
    answer = forced.chat.completions.create(tool_choice="required", max_tokens=300, **asked)
    assert answer.choices[0].message.tool_calls[0].function.name == "choose"
    none = forced.chat.completions.create(tool_choice="none", seed=1, **asked)
    jsonschema.validate(json.loads(none.choices[0].message.content), SCHEMAS["book_table"])


def test_a_demanded_call_is_streamed(forced):
    with forced.chat.completions.stream(
        model="builtin",
        messages=[{"role": "user", "content": "Book a table."}],
        tools=[BOOKING],
        tool_choice="required",
        parallel_tool_calls=False,
        seed=1,
    ) as stream:
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS["book_table"])


def test_a_schema_that_cannot_be_enforced_is_refused(forced):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}
    with pytest.raises(openai.BadRequestError) as error:
        forced.chat.completions.create(
            model="builtin", messages=QUESTION, tools=[tool], tool_choice="required"
        )
    assert error.value.param == "tools[0].function.parameters"
