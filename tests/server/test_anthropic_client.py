"""Anthropic's official client against real servers: the built-in model, and a model that says what a script says."""

import asyncio

import anthropic
import jsonschema
import pytest

from tests.api.tool_scenes import TOOL_TEMPLATE
from tests.doubles.scripted_model import scripted_server
from tests.server.conftest import serving

QUESTION = [{"role": "user", "content": "Is it warm in Paris, and what time is it?"}]
TOOLS = [
    {
        "name": "get_weather",
        "description": "The weather now.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
    {"name": "get_time", "input_schema": {"type": "object", "properties": {}}},
]
CALLS = (
    "I need both.\n</think>\n\nI look it up.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris {\\"x\\"} </tool_call> 😀"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)
ANSWER = "Good.</think>It is 21 degrees at noon."
THINK = {"type": "enabled", "budget_tokens": 1024}
ASKED = {"model": "fox", "max_tokens": 1100, "tools": TOOLS, "thinking": THINK}
STORY = [{"role": "user", "content": "Tell me a story about a fox."}]


@pytest.fixture
def scripted():
    with scripted_server([CALLS, ANSWER], template=TOOL_TEMPLATE, step_seconds=0.001) as running:
        yield running


@pytest.fixture
def client(scripted):
    with anthropic.Anthropic(
        base_url=scripted.url.removesuffix("/v1"), api_key="none", max_retries=0
    ) as client:
        yield client


@pytest.fixture
def builtin(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def results(message):
    said = {"get_weather": [{"type": "text", "text": '{"degrees": 21}'}], "get_time": "12:00"}
    return {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": block.id, "content": said[block.name]}
            for block in message.content
            if block.type == "tool_use"
        ],
    }


def check_calls(message):
    thinking, text, weather, time = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "I need both.")
    assert thinking.signature
    assert (text.type, text.text) == ("text", "I look it up.")
    assert (weather.type, weather.name) == ("tool_use", "get_weather")
    assert weather.input == {"city": 'Paris {"x"} </tool_call> 😀'}
    assert (time.name, time.input) == ("get_time", {})
    assert message.stop_reason == "tool_use"


def test_a_tool_loop(client, scripted):
    first = client.messages.create(messages=QUESTION, **ASKED)
    check_calls(first)
    history = [*QUESTION, {"role": "assistant", "content": first.content}, results(first)]
    second = client.messages.create(messages=history, **ASKED)
    assert [(block.type, getattr(block, "text", "")) for block in second.content] == [
        ("thinking", ""),
        ("text", "It is 21 degrees at noon."),
    ]
    assert second.stop_reason == "end_turn"
    prompt = scripted.script.prompts[1]
    assert "<think>I need both.</think>I look it up." in prompt
    assert '[tool get_weather] {"degrees": 21}' in prompt
    assert second.usage.cache_read_input_tokens > 0
    counted = client.messages.count_tokens(
        model="fox", messages=history, tools=TOOLS, thinking=THINK
    ).input_tokens
    assert counted == second.usage.input_tokens + second.usage.cache_read_input_tokens


def test_a_streamed_tool_loop(client):
    with client.messages.stream(messages=QUESTION, **ASKED) as stream:
        kinds = [event.type for event in stream]
        first = stream.get_final_message()
    check_calls(first)
    assert {"thinking", "signature", "text", "input_json", "content_block_stop", "message_stop"} <= set(kinds)
    history = [*QUESTION, {"role": "assistant", "content": first.content}, results(first)]
    with client.messages.stream(messages=history, **ASKED) as stream:
        assert "".join(stream.text_stream) == "It is 21 degrees at noon."
        assert stream.get_final_message().usage.output_tokens > 5


def test_the_tool_runner_goes_on_without_a_thread(client, scripted):
    """The runner asks for a conversation that the server holds, and must learn that there is none."""

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather now."""
        return '{"degrees": 21}'

    @anthropic.beta_tool
    def get_time() -> str:
        """The time now."""
        return "12:00"

    runner = client.beta.messages.tool_runner(
        model="fox", max_tokens=1100, tools=[get_weather, get_time], messages=QUESTION, thinking=THINK
    )
    assert runner.until_done().content[-1].text == "It is 21 degrees at noon."
    assert '[tool get_weather] {"degrees": 21}' in scripted.script.prompts[1]


def test_the_async_client(scripted):
    async def loop():
        async with (
            anthropic.AsyncAnthropic(
                base_url=scripted.url.removesuffix("/v1"), auth_token="none", api_key=None, max_retries=0
            ) as client,
            client.messages.stream(messages=QUESTION, **ASKED) as stream,
        ):
            check_calls(await stream.get_final_message())

    asyncio.run(loop())


def test_raw_events_come_in_order(client):
    reported = [event.type for event in client.messages.create(messages=QUESTION, stream=True, **ASKED)]
    assert (reported[0], reported[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert reported.count("content_block_start") == reported.count("content_block_stop") == 4


def test_the_built_in_model_answers_and_streams(builtin):
    asked = {"model": "builtin", "max_tokens": 30, "messages": STORY, "extra_body": {"temperature": 0}}
    whole = builtin.messages.create(system="You tell stories.", **asked)
    with builtin.messages.stream(system="You tell stories.", **asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    usage = whole.usage
    prompt = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    counted = builtin.messages.count_tokens(model="builtin", messages=STORY, system="You tell stories.")
    assert counted.input_tokens == prompt
    assert whole._request_id.startswith("req_")


def test_a_stop_sequence_is_named(builtin):
    asked = {"model": "builtin", "max_tokens": 60, "messages": STORY, "extra_body": {"temperature": 0}}
    text = builtin.messages.create(**asked).content[0].text
    stop = text[12:15]
    message = builtin.messages.create(stop_sequences=["never in a story", stop], **asked)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert message.content[0].text == text[: text.index(stop)]


def test_json_output(builtin):
    schema = {
        "type": "object",
        "properties": {
            "animal": {"enum": ["fox", "hen"]},
            "age": {"type": "integer", "minimum": 0, "maximum": 20},
        },
        "required": ["animal", "age"],
        "additionalProperties": False,
    }
    message = builtin.messages.create(
        model="builtin",
        max_tokens=60,
        messages=STORY,
        output_config={"format": {"type": "json_schema", "schema": schema}},
        extra_body={"temperature": 0},
    )
    assert message.stop_reason == "end_turn"
    assert '"animal"' in message.content[0].text


def test_models(builtin):
    (model,) = builtin.models.list()
    assert (model.id, model.type) == ("builtin", "model")
    assert builtin.models.retrieve("builtin").display_name == "builtin"


def test_errors_have_the_clients_types(builtin, strict_server):
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\]"):
        builtin.messages.create(
            model="builtin",
            max_tokens=5,
            messages=[
                {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}
            ],
        )
    with pytest.raises(anthropic.NotFoundError) as missing:
        builtin.messages.create(model="other", max_tokens=5, messages=STORY)
    assert missing.value.body["error"]["type"] == "not_found_error"
    assert missing.value.request_id == missing.value.body["request_id"]
    with pytest.raises(anthropic.BadRequestError, match="tool_choice needs tools"):
        builtin.messages.create(model="builtin", max_tokens=5, messages=STORY, tool_choice={"type": "any"})
    for key, error in (("wrong", anthropic.AuthenticationError), ("alpha", None)):
        with anthropic.Anthropic(base_url=strict_server.url, api_key=key, max_retries=0) as client:
            if error is None:
                assert client.messages.count_tokens(model="builtin", messages=STORY).input_tokens
            else:
                with pytest.raises(error):
                    client.messages.create(model="builtin", max_tokens=3, messages=STORY)


CHOICES = {
    "any": {"type": "any", "disable_parallel_tool_use": True},
    "tool": {"type": "tool", "name": "choose"},
}
FORCED = [
    {
        "name": name,
        "input_schema": {
            "type": "object",
            "properties": {"yes": {"type": "boolean"}, "kind": {"enum": ["fox", "hen"]}},
            "required": ["yes", "kind"],
            "additionalProperties": False,
        },
    }
    for name in ("choose", "other")
]


@pytest.fixture(scope="module")
def forced(tmp_path_factory):
    """A client of the built-in model with another template; only a grammar makes this model call tools."""
    path = tmp_path_factory.mktemp("template") / "tools.jinja"
    path.write_text(TOOL_TEMPLATE, encoding="utf-8")
    with (
        serving("--chat-template", str(path)) as running,
        anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_demanded_call_follows_its_schema(forced, choice, stream):
    asked = {"model": "builtin", "max_tokens": 200, "messages": STORY, "tools": FORCED}
    asked["tool_choice"] = CHOICES[choice]
    if stream:
        with forced.messages.stream(**asked) as events:
            message = events.get_final_message()
    else:
        message = forced.messages.create(**asked)
    (call,) = message.content
    assert (call.type, message.stop_reason) == ("tool_use", "tool_use")
    assert call.name in (("choose",) if choice == "tool" else ("choose", "other"))
    jsonschema.validate(call.input, FORCED[0]["input_schema"])
