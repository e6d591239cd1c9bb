"""The official client's Responses API, against real server processes and a model that says what a script says."""

import asyncio
import json

import jsonschema
import openai
import pydantic
import pytest

from tests.api.tool_scenes import TIME, TOOL_TEMPLATE, WEATHER
from tests.doubles.scripted_model import scripted_server
from tests.server.conftest import serving
from tests.server.test_tools import ANSWER, ARGUMENTS, CALLS, SCHEMAS
from tests.server.test_tools import BOOKING as BOOKING_TOOL


def flat(tool):
    return {"type": "function"} | tool["function"]


TOOLS = [flat(WEATHER), flat(TIME)]
BOOKING = flat(BOOKING_TOOL)
QUESTION = "Is it warm in Paris, and what time is it?"
SAID = {"get_weather": '{"degrees": 21}', "get_time": "12:00"}


class Person(pydantic.BaseModel):
    """What a parsed response is."""

    name: str = pydantic.Field(max_length=12)
    age: int = pydantic.Field(ge=0, le=99)


@pytest.fixture
def scripted():
    with scripted_server([CALLS, ANSWER], template=TOOL_TEMPLATE, step_seconds=0.001) as running:
        yield running


@pytest.fixture
def client(scripted):
    with openai.OpenAI(base_url=scripted.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("responses")


@pytest.fixture(scope="module")
def real(store):
    """A client of the built-in model, with a template that offers tools and a store on disk."""
    template = store / "tools.jinja"
    template.write_text(TOOL_TEMPLATE, encoding="utf-8")
    flags = ("--chat-template", str(template), "--response-store", str(store / "responses.db"))
    with (
        serving(*flags) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def outputs(response):
    """What the functions that a response calls return."""
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": SAID[item.name]}
        for item in response.output
        if item.type == "function_call"
    ]


def test_a_tool_loop_over_a_stored_response(client, scripted):
    first = client.responses.create(model="fox", input=QUESTION, tools=TOOLS)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
    reasoning, _, weather, time = first.output
    assert reasoning.content[0].text == "I need both."
    assert first.output_text == "I look it up."
    assert (weather.name, json.loads(weather.arguments)) == ("get_weather", ARGUMENTS)
    assert (time.name, time.arguments) == ("get_time", "{}")
    assert first.usage.output_tokens_details.reasoning_tokens > 0
    second = client.responses.create(
        model="fox", input=outputs(first), previous_response_id=first.id, tools=TOOLS
    )
    assert second.output_text == "It is 21 degrees at noon."
    reported = scripted.script.prompts[-1]
    assert "<think>I need both.</think>I look it up.<tool_call>" in reported
    assert '[tool get_weather] {"degrees": 21}' in reported


def test_the_same_loop_without_a_store(client, scripted):
    given = [{"role": "user", "content": QUESTION}]
    first = client.responses.create(model="fox", input=given, tools=TOOLS, store=False)
    history = [*given, *(item.model_dump(exclude_none=True) for item in first.output), *outputs(first)]
    second = client.responses.create(model="fox", input=history, tools=TOOLS, store=False)
    assert second.output_text == "It is 21 degrees at noon."
    assert "<think>I need both.</think>I look it up.<tool_call>" in scripted.script.prompts[-1]


def test_the_streaming_helper_builds_the_same_items(client):
    with client.responses.stream(model="fox", input=QUESTION, tools=TOOLS) as stream:
        events = list(stream)
        response = stream.get_final_response()
    assert [item.type for item in response.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert json.loads(response.output[2].arguments) == ARGUMENTS
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert "response.reasoning_text.delta" in kinds
    assert kinds.count("response.function_call_arguments.done") == 2
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == response.output_text == "I look it up."


def test_the_async_client_streams(scripted):
    async def ask():
        async with openai.AsyncOpenAI(base_url=scripted.url, api_key="none", max_retries=0) as client:
            stream = await client.responses.create(model="fox", input=QUESTION, tools=TOOLS, stream=True)
            return [event.type async for event in stream]

    assert asyncio.run(ask())[-1] == "response.completed"


def test_stored_responses_are_managed(client):
    first = client.responses.create(model="fox", input=QUESTION, metadata={"topic": "weather"})
    assert client.responses.retrieve(first.id).metadata == {"topic": "weather"}
    (item,) = client.responses.input_items.list(first.id).data
    assert item.content[0].text == QUESTION
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_a_background_response_is_polled(client):
    response = client.responses.create(model="fox", input=QUESTION, tools=TOOLS, background=True)
    while response.status in ("queued", "in_progress"):
        response = client.responses.retrieve(response.id)
    assert (response.status, response.output_text) == ("completed", "I look it up.")
    assert client.responses.cancel(response.id).status == "completed"


def test_a_refusal_names_the_field(client):
    for more, param in (
        ({"tools": [{"type": "file_search"}]}, "tools[0].type"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
    ):
        with pytest.raises(openai.APIStatusError) as error:
            client.responses.create(model="fox", input=QUESTION, **more)
        assert error.value.param == param


def test_the_built_in_model_answers_in_the_shape_of_a_class(real):
    response = real.responses.parse(
        model="builtin", input="Who are you?", text_format=Person, max_output_tokens=200, temperature=0
    )
    assert isinstance(response.output_parsed, Person)
    assert response.status == "completed"


def test_the_built_in_model_calls_the_function_that_it_must(real):
    response = real.responses.create(
        model="builtin",
        input="Book a table.",
        tools=[BOOKING],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    (call,) = response.output
    jsonschema.validate(json.loads(call.arguments), SCHEMAS["book_table"])


def test_a_stream_of_the_built_in_model_is_its_response(real):
    settings = {"model": "builtin", "input": "Once upon a time", "temperature": 0, "max_output_tokens": 30}
    whole = real.responses.create(**settings)
    assert whole.incomplete_details.reason == "max_output_tokens"
    *_, last = real.responses.create(**settings, stream=True)
    assert (last.type, last.response.output_text) == ("response.incomplete", whole.output_text)


def test_a_conversation_continues_after_a_restart(store):
    flags = ("--response-store", str(store / "restarted.db"))
    settings = {"model": "builtin", "max_output_tokens": 10}
    with serving(*flags) as running, openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
        first = client.responses.create(input="Once upon a time", **settings)
    with serving(*flags) as running, openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
        assert client.responses.retrieve(first.id).output_text == first.output_text
        second = client.responses.create(input="And then?", previous_response_id=first.id, **settings)
        assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens


def test_a_stream_in_the_background_is_followed_and_read_again(real):
    stream = real.responses.create(
        model="builtin", input="Once upon a time", background=True, stream=True, max_output_tokens=40
    )
    read = list(stream)
    done = read[-1].response
    assert [event.sequence_number for event in read] == list(range(len(read)))
    assert (read[0].response.status, done.status) in (("queued", "completed"), ("queued", "incomplete"))
    later = list(real.responses.retrieve(done.id, stream=True, starting_after=3))
    assert later == read[4:]
    assert real.responses.retrieve(done.id).output == done.output


def test_a_conversation_is_compacted(real):
    compacted = real.responses.compact(
        model="builtin", input=[{"role": "user", "content": "We launch on Tuesday."}], service_tier="auto"
    )
    assert compacted.object == "response.compaction"
    asked = [*compacted.output, {"role": "user", "content": "When?"}]
    response = real.responses.create(model="builtin", input=asked, max_output_tokens=10, temperature=0)
    assert response.output_text


def test_a_conversation_is_compacted_before_it_is_answered(real):
    context = [{"type": "compaction", "compact_threshold": 20}]
    talk = [{"role": "user", "content": "We launch on Tuesday. " * 5}, {"role": "user", "content": "When?"}]
    stream = real.responses.create(
        model="builtin",
        input=talk,
        max_output_tokens=10,
        temperature=0,
        context_management=context,
        stream=True,
    )
    response = list(stream)[-1].response
    assert [item.type for item in response.output] == ["compaction", "message"]
    after = real.responses.create(
        model="builtin",
        input="So?",
        previous_response_id=response.id,
        max_output_tokens=10,
        temperature=0,
        truncation="auto",
    )
    assert after.output_text
