import json
from dataclasses import replace

import pytest

from headrace.api.cache.recorder import RequestRecorder
from headrace.api.compile.bodies import ChatBody, CompletionBody
from headrace.api.exchange import Caller
from tests.api.tool_scenes import TOOL_TEMPLATE, WEATHER

NOBODY = Caller(None, None)


class Noted:
    """A history of questions."""

    def __init__(self):
        self.questions = []

    def asked(self, key, tenant, at, recorded):
        self.questions.append((key, recorded))


def note(history, caller=NOBODY, raw=b"{}", **more):
    body = CompletionBody(prompt="secret", **more)
    return RequestRecorder(history, bodies=True).note("/v1/completions", raw, body, caller)


def test_a_question_is_noted_under_the_name_that_its_caller_carries_on():
    history = Noted()
    caller = note(history, raw=b'{"prompt":"secret"}')
    ((key, recorded),) = history.questions
    assert caller.origin == key != b""
    assert recorded.body == b'{"prompt":"secret"}'


@pytest.mark.parametrize(
    ("header", "directives"),
    [("no-store", None), ("max-age=5, No-Store", {"ttl": 5}), (None, {"no_store": True})],
)
def test_a_request_with_no_store_is_not_recorded(header, directives):
    history = Noted()
    caller = NOBODY._replace(cache_control=header)
    assert note(history, caller, response_cache=directives) == caller
    assert history.questions == []


def test_a_request_of_another_dialect_is_noted_as_the_chat_request_that_it_means():
    history = Noted()
    fields = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
    recorder = RequestRecorder(history, bodies=True)
    for more in ({}, {"stream": True, "request_id": "r", "session_id": "s"}):
        caller = recorder.note_chat(ChatBody.model_validate(fields | more), NOBODY)
    (first, recorded), (second, _) = history.questions
    assert caller.origin == first == second
    assert recorded.url == "/v1/chat/completions"
    assert json.loads(recorded.body) == fields


@pytest.mark.parametrize("options", [{"template": TOOL_TEMPLATE, "max_model_len": 1024, "num_blocks": 1024}])
def test_messages_and_responses_are_recorded_and_can_be_computed_again(house):
    history = Noted()
    for route in house.routes:
        if route.path in ("/v1/messages", "/v1/responses"):
            api = route.endpoint.__self__
            api._serving = replace(api._serving, recorder=RequestRecorder(history, bodies=True))
    tool = WEATHER["function"]
    message = {
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"name": tool["name"], "input_schema": tool["parameters"]}],
        "max_tokens": 5,
    }
    response = {"instructions": "Be brief.", "input": "Hi", "max_output_tokens": 5, "store": False}
    sent = [("/v1/messages", message), ("/v1/responses", response)]
    prompts = []
    for path, body in sent:
        answer = house.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        prompts.append(house.client.get(f"/v1/requests/{answer.json()['id']}").json()["prompt_tokens"])
    assert [recorded.url for _, recorded in history.questions] == 2 * ["/v1/chat/completions"]
    for (_, recorded), tokens in zip(history.questions, prompts, strict=True):
        again = house.client.post(recorded.url, content=recorded.body)
        assert again.status_code == 200, again.text
        assert again.json()["usage"]["prompt_tokens"] == tokens
