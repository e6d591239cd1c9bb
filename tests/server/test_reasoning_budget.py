"""Limits of reasoning over HTTP, against a real server process on the built-in model."""

from __future__ import annotations

import json

import pytest

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<think>{% endif %}"
    "{# reasoning ends with </think> #}"
)
CHAT = {
    "messages": [{"role": "user", "content": "Tell me a story."}],
    "chat_template": TEMPLATE,
    "max_tokens": 60,
    "ignore_eos": True,
    "seed": 5,
}


def marker_tokens(server) -> int:
    body = {"prompt": "</think>", "add_special_tokens": False}
    return len(server.post("/tokenize", body).json()["tokens"])


@pytest.mark.parametrize("n", [1, 3])
def test_the_reasoning_has_as_many_tokens_as_allowed_and_its_marker(server, n):
    response = server.post("/v1/chat/completions", CHAT | {"thinking_token_budget": 12, "n": n})
    assert response.status_code == 200, response.text
    for choice in response.json()["choices"]:
        assert choice["message"]["reasoning_content"]
        assert choice["message"]["content"]
        assert choice["finish_reason"] == "length"
    details = response.json()["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == n * (12 + marker_tokens(server))


def test_a_stream_spells_the_same_and_other_limits_give_other_answers(server):
    asked = CHAT | {"thinking_token_budget": 12}
    whole = server.post("/v1/chat/completions", asked).json()["choices"][0]["message"]
    streamed = server.post("/v1/chat/completions", asked | {"stream": True}).text
    deltas = [
        json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
        for line in streamed.splitlines()
        if line.startswith("data: {")
    ]
    for key in ("content", "reasoning_content"):
        assert "".join(delta.get(key, "") for delta in deltas) == whole[key]
    none = server.post("/v1/chat/completions", CHAT | {"thinking_token_budget": 0}).json()
    assert "reasoning_content" not in none["choices"][0]["message"]


def test_the_form_of_the_answer_holds_after_the_reasoning(server):
    asked = CHAT | {"thinking_token_budget": 8, "ignore_eos": False, "guided_regex": "[0-9]{5}"}
    (choice,) = server.post("/v1/chat/completions", asked).json()["choices"]
    assert choice["message"]["content"].isdigit()
    assert (len(choice["message"]["content"]), choice["finish_reason"]) == (5, "stop")
    assert choice["message"]["reasoning_content"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", CHAT | {"thinking_token_budget": -1}, "thinking_token_budget"),
        ("/v1/chat/completions", CHAT | {"thinking_token_budget": "9"}, "thinking_token_budget"),
        (
            "/v1/chat/completions",
            CHAT | {"thinking_token_budget": 9, "chat_template": None},
            "thinking_token_budget",
        ),
        ("/v1/completions", {"prompt": "a", "thinking_token_budget": 9}, "thinking_token_budget"),
        ("/v1/responses", {"input": "a", "reasoning": {"max_tokens": 9}}, "reasoning.max_tokens"),
        ("/v1/responses", {"input": "a", "reasoning": {"max_tokens": -9}}, "reasoning.max_tokens"),
    ],
)
def test_what_cannot_be_limited_is_refused_by_name(server, path, body, param):
    response = server.post(path, body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
