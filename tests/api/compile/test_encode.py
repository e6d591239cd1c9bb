"""Wishes to keep the computed prompt, in Anthropic's words and in OpenAI's."""

from __future__ import annotations

import pytest

from headrace.api.compile.policies import MARKED_RETENTION
from headrace.core.request import Retention
from tests.api.caching import RequestsNoted

SYSTEM = {"role": "system", "content": "Be brief."}


USER = {"role": "user", "content": "hi"}


MARK = {"cache_control": {"type": "ephemeral"}}


HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


@pytest.fixture
def options():
    return {"lookup": RequestsNoted}


def ask(house, messages, status=200, **more):
    answer = house.client.post(
        "/v1/chat/completions", json={"messages": messages, "temperature": 0, "max_tokens": 2} | more
    )
    assert answer.status_code == status, answer.text
    return house.lookup.requests[-1] if status == 200 else answer.json()["error"]


def length(house, text):
    return len(house.model.tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize(
    ("mark", "seconds"),
    [(MARK, 300.0), (HOUR, 3600.0)],
)
@pytest.mark.parametrize("on_part", [False, True])
def test_a_mark_keeps_the_prompt_up_to_the_end_of_its_message(house, mark, seconds, on_part):
    system = SYSTEM | mark
    if on_part:
        system = SYSTEM | {"content": [{"type": "text", "text": "Be brief."} | mark]}
    request = ask(house, [system, USER])
    end = length(house, "[system] Be brief.\n")
    assert request.retention == (Retention(0, end, MARKED_RETENTION, seconds),)


def test_a_mark_changes_no_token(house):
    parts = [{"type": "text", "text": "Be brief."} | MARK]
    assert ask(house, [SYSTEM | MARK, USER]).tokens == ask(house, [SYSTEM, USER]).tokens
    assert ask(house, [SYSTEM | {"content": parts}, USER]).tokens == (
        ask(house, [SYSTEM | {"content": [{"type": "text", "text": "Be brief."}]}, USER]).tokens
    )


def test_the_last_message_stands_for_the_whole_prompt(house):
    request = ask(house, [SYSTEM, USER | MARK])
    assert request.retention[0].end == len(request.tokens)


def test_a_mark_beyond_what_truncation_leaves_ends_with_the_prompt(house):
    cut = {"truncate_prompt_tokens": 3, "truncation_side": "right"}
    request = ask(house, [SYSTEM | MARK, USER], **cut)
    assert len(request.tokens) == 3
    assert request.retention[0].end == 3


def test_more_marks_than_anthropic_allows_are_refused(house, monkeypatch):
    rendered = []
    render = house.model.template.render
    monkeypatch.setattr(house.model.template, "render", lambda *a, **k: rendered.append(a) or render(*a, **k))
    assert ask(house, [USER | MARK] * 5, status=400)["param"] == "messages"
    assert len(rendered) == 1  # the prompt, and none of its parts: each would cost as much


@pytest.mark.parametrize("mark", [{"type": "permanent"}, {"type": "ephemeral", "ttl": "2h"}, {}])
def test_another_mark_is_refused(house, mark):
    error = ask(house, [USER | {"cache_control": mark}], status=400)
    assert error["param"].startswith("messages[0].cache_control")


def test_openais_words(house):
    assert ask(house, [USER]).retention == ()
    assert ask(house, [USER], prompt_cache_retention="in_memory").retention == ()
    kept = ask(house, [USER], prompt_cache_retention="24h")
    assert kept.retention == (Retention(0, None, MARKED_RETENTION, 86_400.0),)
    assert ask(house, [USER], prompt_cache_retention="7d", status=400)["param"] == "prompt_cache_retention"


def test_a_cache_key_names_a_group_within_its_tenant(house):
    one, other = ask(house, [USER], prompt_cache_key="k", user="a"), ask(house, [USER], prompt_cache_key="k")
    assert one.affinity != other.affinity != ""
    assert ask(house, [USER]).affinity == ""
