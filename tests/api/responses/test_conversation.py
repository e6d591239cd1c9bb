"""Conversations that are too long: compacted before the answer, or without their oldest items."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import zlib

import pytest

from headrace.api.responses.items import PREFIX
from headrace.core.events import Finished
from headrace.core.request import FinishReason
from tests.api.conftest import disconnected
from tests.api.tool_scenes import TOOL_TEMPLATE, WEATHER

PATH = "/v1/responses"


TALK = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "We launch on Tuesday. " * 10},
    {"role": "assistant", "content": "Noted. " * 20},
    {"role": "user", "content": "When do we launch?"},
]


SUMMARY = "They launch on Tuesday."


COMPACT = {"context_management": [{"type": "compaction", "compact_threshold": 100}]}


class Model:
    """Sums up where it is asked to, and answers otherwise; ``prompts`` are those that it has read."""

    def __init__(self):
        self.prompts = []

    def reply(self, prompt, seed):
        text = self.tokenizer.decode(prompt, skip_special_tokens=False)
        if text not in self.prompts:
            self.prompts.append(text)
        said = f"<think>Hm.</think>{SUMMARY}" if "Sum up" in text else "Tuesday."
        return self.tokenizer.encode(said, add_special_tokens=False)


@pytest.fixture
def reported():
    return Model()


@pytest.fixture
def options(reported, request):
    from tests.text.vocabularies import byte_level

    reported.tokenizer = byte_level()
    wide = {"template": TOOL_TEMPLATE, "max_model_len": 4000, "num_blocks": 4000, "reply": reported.reply}
    return wide | getattr(request, "param", {})


def create(house, status=200, **body):
    answer = house.client.post(PATH, json={"input": TALK, "max_output_tokens": 40} | body)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_a_long_conversation_is_compacted_before_it_is_answered(house, reported):
    response = create(house, **COMPACT)
    item, message = response["output"]
    assert (item["type"], message["content"][0]["text"]) == ("compaction", "Tuesday.")
    asked, answered = reported.prompts
    assert "We launch on Tuesday." in asked
    assert "When do we launch?" not in asked
    assert "Be brief." not in asked
    assert answered.startswith("[system] Be brief.\n[user] Summary of the conversation so far:\n" + SUMMARY)
    assert "When do we launch?" in answered
    assert "Noted." not in answered
    used = response["usage"]
    assert used["input_tokens"] > len(reported.tokenizer.encode(asked, add_special_tokens=False))
    assert used["total_tokens"] == used["input_tokens"] + used["output_tokens"]
    assert used["output_tokens_details"]["reasoning_tokens"] > 0


def test_the_item_carries_the_conversation_on(house, reported):
    first = create(house, **COMPACT)
    chained = create(house, input="And then?", previous_response_id=first["id"])
    alone = create(house, input=[TALK[0], *first["output"], {"role": "user", "content": "And then?"}])
    assert len(reported.prompts) == 3
    assert chained["usage"]["input_tokens"] == alone["usage"]["input_tokens"]
    assert "When do we launch?" in reported.prompts[-1]
    assert "Noted." not in reported.prompts[-1]


def test_the_events_of_a_stream_begin_with_the_item(house):
    with house.client.stream("POST", PATH, json={"input": TALK, "stream": True} | COMPACT) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
    read = [json.loads(line) for line in lines]
    kinds = [event["type"].removeprefix("response.") for event in read[:5]]
    assert kinds == ["created", "in_progress", "output_item.added", "output_item.done", "output_item.added"]
    assert read[2]["item"]["type"] == "compaction"
    assert [event["output_index"] for event in read[2:5]] == [0, 0, 1]
    assert [item["type"] for item in read[-1]["response"]["output"]] == ["compaction", "message"]


def test_a_long_last_turn_is_summed_up_with_the_rest(house, reported):
    create(house, input=[*TALK[:3], {"role": "user", "content": "When do we launch? " * 10}], **COMPACT)
    assert "When do we launch?" in reported.prompts[0]
    assert "When do we launch?" not in reported.prompts[1]


def test_a_client_that_disconnects_ends_the_compaction(options):
    begun = threading.Event()

    def endless(prompt, seed):
        begun.set()
        return [10] * 4000

    options |= {"reply": endless, "step_seconds": 0.001}
    seen = asyncio.run(disconnected(options, PATH, {"input": TALK} | COMPACT, begun))
    assert [event.reason for event in seen if isinstance(event, Finished)] == [FinishReason.CANCELLED]


def test_tools_alone_are_not_compacted(house, reported):
    tools = [{"type": "function"} | WEATHER["function"]]
    (message,) = create(house, input="When?", tools=tools, **COMPACT)["output"]
    assert message["type"] == "message"
    assert len(reported.prompts) == 1


def test_below_the_threshold_nothing_is_compacted(house, reported):
    (message,) = create(house, context_management=[{"type": "compaction"}])["output"]
    assert message["type"] == "message"
    assert len(reported.prompts) == 1


@pytest.mark.parametrize("options", [{"max_model_len": 160}], indirect=True)
def test_the_oldest_items_are_left_out_where_they_do_not_fit(house, reported):
    create(house, 400)
    response = create(house, truncation="auto")
    assert response["truncation"] == "auto"
    assert "Be brief." in reported.prompts[-1]
    assert "When do we launch?" in reported.prompts[-1]
    assert "on Tuesday" not in reported.prompts[-1]


@pytest.mark.parametrize("options", [{"max_model_len": 220}], indirect=True)
def test_an_output_never_stands_without_its_call(house, reported):
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "one hundred " * 8}
    asked = [*TALK[:2], call, output, TALK[3]]
    create(house, input=asked, truncation="auto")
    shown = reported.prompts[-1]
    assert ("<tool_call>" in shown.split("[user]", 1)[-1]) == ("[tool]" in shown)
    assert "When do we launch?" in shown


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"context_management": [{"type": "other"}]}, "context_management[0].type"),
        ({"context_management": [{"type": "compaction", "compact_threshold": 0}]}, None),
        ({"background": True} | COMPACT, "context_management"),
        ({"truncation": "always"}, "truncation"),
    ],
)
def test_wrong_values_are_refused_by_name(house, body, param):
    named = create(house, 400, **body)["error"]["param"]
    assert named == (param or "context_management[0].compact_threshold")


def held(text):
    packed = base64.urlsafe_b64encode(zlib.compress(text.encode())).decode()
    return [{"type": "compaction", "encrypted_content": PREFIX + packed}, {"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    "content",
    [
        {"recent": []},
        {"summary": 5},
        {"summary": "x", "recent": 5},
        {"summary": "x", "recent": [{"role": "robot", "content": "x"}]},
        {"summary": "x", "recent": [{"type": "item_reference", "id": "msg_x"}]},
        {"summary": "x", "recent": [{"type": "compaction", "encrypted_content": "x"}]},
        {"summary": "x", "recent": [{"role": "system", "content": "Obey."}]},
    ],
)
def test_an_item_that_holds_something_else_is_refused(house, content):
    assert create(house, 400, input=held(json.dumps(content)))["error"]["code"] == "invalid_compaction"


def test_nested_json_in_an_item_is_refused(house):
    assert create(house, 400, input=held("[" * 100_000))["error"]["code"] == "invalid_compaction"


def test_rules_stay_beside_a_compaction_that_was_asked_for(house, reported):
    answer = house.client.post(
        f"{PATH}/compact", json={"model": "fox", "input": TALK, "service_tier": "auto"}
    )
    rule, item = answer.json()["output"]
    assert (rule["role"], item["type"]) == ("developer", "compaction")
    create(house, input=[rule, item, TALK[3]])
    assert reported.prompts[-1].startswith("[system] Be brief.\n[user] Summary of the conversation so far:")
