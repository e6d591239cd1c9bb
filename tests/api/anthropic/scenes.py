"""What tests of the Messages API ask, and how they read the events of a stream."""

import json

import pytest

from tests.api.tool_scenes import TOOL_TEMPLATE
from tests.doubles.grammars import Compiled

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
TOOLED = {"template": TOOL_TEMPLATE, "max_model_len": 1200, "num_blocks": 1024, "grammars": Compiled()}
THINK = {"type": "enabled", "budget_tokens": 1024}


def said(text, **more):
    """Decorates a test with what the model says, after a template that knows tools and reasoning."""
    return pytest.mark.parametrize("options", [TOOLED | {"answer": text, **more}], indirect=True)


def ask(house, status=200, path=PATH, **more):
    body = {"model": "fox", "messages": HI} | ({} if path == COUNT else {"max_tokens": 200}) | more
    answer = house.client.post(path, json={name: value for name, value in body.items() if value is not ...})
    assert answer.status_code == status, answer.text
    return answer


def events(answer):
    """The events of a stream; each says its type twice."""
    *reported, rest = answer.text.split("\n\n")
    assert rest == ""
    found = []
    for event in reported:
        if event.startswith(":"):
            continue
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def joined(reported):
    """The message that events spell, by Anthropic's rules for their order."""
    start, *middle, delta, stop = [event for event in reported if event["type"] != "ping"]
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
