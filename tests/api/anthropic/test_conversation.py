"""A request of the Messages API as a chat request."""

import pytest

from headrace.api.anthropic.conversation import chat_body
from headrace.api.anthropic.wire import MessagesBody
from headrace.api.compile.model import Dialect
from headrace.text.template import ChatTemplate
from tests.api.anthropic.scenes import HI, TIME, WEATHER
from tests.api.tool_scenes import TOOL_TEMPLATE

DIALECT = Dialect(ChatTemplate({"default": TOOL_TEMPLATE}))


def chat(**fields):
    body = {"messages": HI, "max_tokens": 5, "tools": [WEATHER | {"strict": True}, TIME]} | fields
    return chat_body(DIALECT, MessagesBody.model_validate(body))


@pytest.mark.parametrize(
    ("choice", "meant"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "get_time"}, {"type": "function", "function": {"name": "get_time"}}),
    ],
)
def test_tool_choices(choice, meant):
    body = chat(tool_choice=choice)
    found = body.tool_choice if isinstance(body.tool_choice, str) else body.tool_choice.model_dump()
    assert (found, body.parallel_tool_calls) == (meant, None)
    assert chat(tool_choice=choice | {"disable_parallel_tool_use": True}).parallel_tool_calls is False


def test_tools_keep_their_schema_and_strictness():
    weather, time = chat().tools
    assert weather.function.parameters == WEATHER["input_schema"]
    assert (weather.function.strict, time.function.strict) == (True, None)


def test_json_output_is_a_response_format():
    schema = {"type": "object", "properties": {}}
    body = chat(output_config={"format": {"type": "json_schema", "schema": schema}})
    assert body.response_format.json_schema.schema_ == schema


def test_fields_that_are_shared():
    shared = {
        "top_k": 3,
        "seed": 5,
        "cache_salt": "s",
        "priority": -1,
        "response_cache": {"ttl": 5, "tags": ["t"]},
    }
    body = chat(stop_sequences=["x"], retention=[{"start": 0, "priority": 50}], slo={"ttft_ms": 10}, **shared)
    assert (body.stop, body.retention[0].priority, body.slo.ttft_ms) == (["x"], 50, 10)
    assert (body.top_k, body.seed, body.cache_salt, body.priority) == (3, 5, "s", -1)
    assert body.response_cache.tags == ["t"]


def test_only_what_is_asked_for_is_set():
    assert chat(tools=None).model_fields_set == {
        *("messages", "max_tokens", "include_reasoning", "chat_template_kwargs"),
    }
