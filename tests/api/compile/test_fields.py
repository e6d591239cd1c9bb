"""Every field of the wire has a kind that says how it reaches the key, and the kind is true."""

from __future__ import annotations

import pytest

from headrace.api.compile.bodies import ChatBody, CompletionBody
from headrace.api.compile.fields import Way, control, ways
from headrace.api.compile.submit import unknown_field
from headrace.observe.cost.prices import Pricing
from headrace.response_cache.exact import ExactCache
from headrace.response_cache.lookup import CacheLookup, NotCached
from headrace.response_cache.rules.cacheability import CacheDirectives
from headrace.response_cache.rules.tags import TagVersions
from tests.api.caching import FINGERPRINT, with_memory
from tests.api.tool_scenes import TOOL_TEMPLATE, WEATHER
from tests.doubles.grammars import Compiled
from tests.doubles.sampling_fields import OTHER_SAMPLING
from tests.doubles.scripted_model import with_special_tokens

CHAT = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0.5, "seed": 1, "max_tokens": 9}


MANY = 999_999


COMPLETION = {"prompt": "hi you", "temperature": 0.5, "seed": 1, "max_tokens": 9}


OTHER = OTHER_SAMPLING | {
    "messages": [{"role": "user", "content": "ho"}],
    "prompt": "ho you",
    "suffix": " and me",
    "model": "fox",
    "add_generation_prompt": False,
    "continue_final_message": True,
    "chat_template": "x{{ messages[0].content }}",
    "chat_template_kwargs": {"unused": 1},
    "add_special_tokens": True,
    "truncate_prompt_tokens": 3,
    "truncation_side": "right",
    "tools": [WEATHER],
    "reasoning_effort": "none",
    "max_tokens": 8,
    "max_completion_tokens": 9,
    "stop": "x",
    "stop_token_ids": [70],
    "logit_bias": {"70": 1},
    "allowed_token_ids": [70, 71],
    "bad_words": ["fox"],
    "logprobs": True,
    "top_logprobs": 2,
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a+"},
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "guided_choice": ["a", "b"],
    "guided_grammar": 'start: "a"',
    "best_of": 2,
    "user": "ann",
    "cache_salt": "salt",
    "n": 2,
    "echo": True,
    "stream": True,
    "stream_options": {"include_usage": True},
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "thinking_token_budget": 5,
    "include_reasoning": False,
    "include_cost": True,
    "response_cache": {"ttl": 5, "tags": ["t"]},
    "priority": 1,
    "service_tier": "flex",
    "slo": {"ttft_ms": 5},
    "deadline_ms": 9000,
    "retention": [{"priority": 90}],
    "session_id": "s",
    "agent_hint": {"ttl_seconds": 5.0},
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "prediction": {"type": "content", "content": "x"},
    "request_id": "mine",
    "metadata": {"a": "b"},
    "kv_transfer_params": {"do_remote_decode": False},
}


WITH = {
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "truncation_side": {"truncate_prompt_tokens": 3},
    "max_completion_tokens": {},
    "agent_hint": {"session_id": "s"},
    "continue_final_message": {},
    "tool_choice": {"tools": [WEATHER]},
    "parallel_tool_calls": {"tools": [WEATHER], "tool_choice": "required"},
}
"""What must stand beside a field for it to be allowed."""


INERT_HERE = {"chat_template_kwargs", "add_special_tokens", "max_completion_tokens", "model"}
"""Fields whose other value changes nothing in this test's model: an unread variable, no bos token, an alias."""


KINDS = {**ways(ChatBody), **ways(CompletionBody)}


class Spy(CacheLookup):
    """Names what it is asked and answers nothing."""

    def __init__(self, service):
        super().__init__(service, ExactCache([], TagVersions()), FINGERPRINT)
        self.queries = []

    async def open(self, lookups, interval=1, paced=False):
        self.queries += [self.query(each) for each in lookups]
        raise NotCached


@pytest.fixture
def options():
    return {
        "lookup": Spy,
        "grammars": Compiled(),
        "template": TOOL_TEMPLATE,
        "trust_request_chat_template": True,
        "max_model_len": 800,
        "pricing": Pricing(1.0),
        "tokenizer": with_special_tokens(["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]),
    }


@pytest.fixture
def spy(house):
    return house.lookup


def asks(house, spy, form, body):
    path = "/v1/chat/completions" if form is ChatBody else "/v1/completions"
    answer = house.client.post(path, json=body)
    assert answer.status_code == 504, answer.text
    found, spy.queries = spy.queries, []
    return found


def test_every_field_has_a_kind():
    fields = ChatBody.model_fields.keys() | CompletionBody.model_fields.keys()
    assert fields == KINDS.keys() == OTHER.keys()


FORMS = [(ChatBody, CHAT), (CompletionBody, COMPLETION)]


@pytest.mark.parametrize(("form", "base"), FORMS)
def test_a_field_changes_the_key_as_its_kind_says(house, spy, form, base):
    for name in form.model_fields:
        value = 2 if name == "logprobs" and form is CompletionBody else OTHER[name]
        beside = WITH.get(name, {})
        (plain, *_) = asks(house, spy, form, base | beside)
        (changed, *_) = asks(house, spy, form, base | beside | {name: value})
        assert changed.allowed.exact == (name != "prompt_logprobs"), name
        if changed.allowed.exact:
            same = KINDS[name] in (Way.SHOWN, Way.CONTROL, Way.INERT) or name in INERT_HERE
            assert (plain.key == changed.key) == same, name


def test_the_answers_of_a_call_have_keys_of_their_own(house, spy):
    one, two = asks(house, spy, ChatBody, CHAT | {"n": 2})
    assert one.key != two.key
    assert asks(house, spy, ChatBody, CHAT)[0].key == one.key
    assert (
        asks(house, spy, ChatBody, CHAT | {"seed": 2})[0].key != two.key
    )  # no choice repeats another call's


def test_chat_and_completion_of_the_same_tokens_end_at_different_stops(house, spy):
    tokens = house.model.tokenizer.encode("[user] hi\n[assistant] ", add_special_tokens=False)
    assert (
        asks(house, spy, ChatBody, CHAT)[0].key
        != asks(house, spy, CompletionBody, COMPLETION | {"prompt": tokens})[0].key
    )


def test_a_field_without_a_kind_forbids_caching_where_it_is_set(house, spy, monkeypatch):
    monkeypatch.setattr("headrace.api.compile.submit._without_kind", lambda form: ("min_p",))
    assert asks(house, spy, ChatBody, CHAT)[0].allowed.exact
    (ask,) = asks(house, spy, ChatBody, CHAT | {"min_p": 0.1})
    assert (ask.allowed.exact, ask.allowed.why) == (False, "min_p")
    assert unknown_field(ChatBody.model_validate(CHAT)) == ""


class NewBody(ChatBody):
    novelty: float | None = None


def test_a_new_field_has_no_kind_until_it_is_given_one():
    assert unknown_field(NewBody.model_validate(CHAT)) == ""
    assert unknown_field(NewBody.model_validate(CHAT | {"novelty": 1.0})) == "novelty"


@pytest.mark.parametrize(
    ("directives", "header", "control"),
    [
        (None, "no-store", CacheDirectives(no_store=True)),
        (None, "No-Cache , only-x", CacheDirectives(no_cache=True)),
        (None, "max-age=0", CacheDirectives(no_cache=True, max_age=0.0)),
        (None, 'max-age="60", max-stale=5', CacheDirectives(max_age=60.0, stale_while_revalidate=5.0)),
        (None, 'x="a, no-store", max-age=60', CacheDirectives(max_age=60.0)),
        ({"max_age": 3}, "max-age=60", CacheDirectives(max_age=3.0)),
        ({"tags": ["a", "b", "a"], "ttl": 9}, None, CacheDirectives(ttl=9.0, tags=("a", "b"))),
        ({"samples": 8}, "only-if-cached", CacheDirectives(samples=8, only_if_cached=True)),
    ],
)
def test_body_fields_and_header_are_combined(house, spy, directives, header, control):
    headers = {"Cache-Control": header} if header else {}
    body = CHAT | ({"response_cache": directives} if directives else {})
    house.client.post("/v1/chat/completions", json=body, headers=headers)
    assert spy.queries[0].control == control


@pytest.mark.parametrize(
    ("directives", "header", "param"),
    [
        ({"ttl": 0}, None, "response_cache.ttl"),
        ({"ttl": 10**9}, None, "response_cache.ttl"),
        ({"samples": 1}, None, "response_cache.samples"),
        ({"tags": [""]}, None, "response_cache.tags[0]"),
        ({"namespace": "x"}, None, "response_cache.namespace"),
        ({"no_cache": True, "only_if_cached": True}, None, "response_cache"),
        (None, "max-age", "Cache-Control"),
        (None, "max-age=soon", "Cache-Control"),
        (None, "min-fresh=5", "Cache-Control"),
    ],
)
def test_what_cannot_be_obeyed_is_refused_by_name(house, directives, header, param):
    headers = {"Cache-Control": header} if header else {}
    body = CHAT | ({"response_cache": directives} if directives else {})
    answer = house.client.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


HOSTILE = {
    "word": "a" * MANY + " b",
    "spaces": "a" + " " * MANY + "!",
    "commas": "," * MANY,
    "quotes": 'a="' * MANY,
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_header_is_read_to_its_end(text):
    assert control(None, f"{text}, no-store").no_store


@pytest.mark.parametrize("options", [{"lookup": with_memory}, {}])
def test_only_if_cached_without_an_entry_gets_504(house):
    answer = house.client.post("/v1/chat/completions", json=CHAT, headers={"Cache-Control": "only-if-cached"})
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "not_cached"
