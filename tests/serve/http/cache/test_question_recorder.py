import json

import pytest

from headrace.serve.http.cache.question_recorder import QuestionRecorder
from headrace.serve.http.generation.call import Caller
from headrace.serve.http.openai.chat_wire import ChatBody
from headrace.serve.http.openai.completions_wire import CompletionBody

NOBODY = Caller(None, None)


class Noted:
    """A history of questions."""

    def __init__(self):
        self.questions = []

    def asked(self, key, tenant, at, recorded):
        self.questions.append((key, recorded))


def note(history, caller=NOBODY, raw=b"{}", **more):
    body = CompletionBody(prompt="secret", **more)
    return QuestionRecorder(history, words=True).note("/v1/completions", raw, body, caller)


def test_a_question_is_noted_under_the_name_that_its_caller_carries_on():
    history = Noted()
    caller = note(history, raw=b'{"prompt":"secret"}')
    ((key, recorded),) = history.questions
    assert caller.origin == key != b""
    assert recorded.body == b'{"prompt":"secret"}'


@pytest.mark.parametrize(
    ("header", "wishes"),
    [("no-store", None), ("max-age=5, No-Store", {"ttl": 5}), (None, {"no_store": True})],
)
def test_who_wants_nothing_kept_is_not_noted(header, wishes):
    history = Noted()
    caller = NOBODY._replace(cache_control=header)
    assert note(history, caller, response_cache=wishes) == caller
    assert history.questions == []


def test_a_request_of_another_dialect_is_noted_as_the_chat_request_that_it_means():
    history = Noted()
    fields = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
    recorder = QuestionRecorder(history, words=True)
    for more in ({}, {"stream": True, "request_id": "r", "session_id": "s"}):
        caller = recorder.note_chat(ChatBody.model_validate(fields | more), NOBODY)
    (first, recorded), (second, _) = history.questions
    assert caller.origin == first == second
    assert recorded.url == "/v1/chat/completions"
    assert json.loads(recorded.body) == fields
