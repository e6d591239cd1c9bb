"""Large bodies do not hold up the event loop: they are parsed on a thread, and large calls are taken in by pieces."""

from __future__ import annotations

import json
import threading

import pytest

from headrace.api import body, replies
from headrace.api.openai.writers import ChatWriter
from headrace.service.service import Pieces

LONG = "x" * body.INLINE_BYTES

BODIES = {
    "/v1/completions": {"prompt": "x", "max_tokens": 1, "user": LONG},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "user": LONG},
    "/v1/responses": {"input": "x", "user": LONG},
    "/v1/messages": {"model": "fox", "max_tokens": 1, "messages": [{"role": LONG, "content": "x"}]},
    "/v1/messages/count_tokens": {"model": "fox", "messages": [{"role": LONG, "content": "x"}]},
    "/v1/embeddings": {"input": "x", "user": LONG},
    "/v1/rerank": {"query": "x", "documents": ["x"], "user": LONG},
    "/v1/score": {"text_1": "x", "text_2": "x", "user": LONG},
    "/tokenize": {"prompt": 1, "model": LONG},
    "/detokenize": {"tokens": [1], "model": LONG},
    "/v1/cache/warm": {"prefixes": LONG},
}


@pytest.mark.parametrize("path", BODIES)
def test_every_route_parses_a_large_body_beside_the_loop(house, monkeypatch, path):
    threads: list[str] = []
    parse = body.from_json

    def noted(*given, **more):
        threads.append(threading.current_thread().name)
        return parse(*given, **more)

    monkeypatch.setattr(body, "from_json", noted)
    house.client.post(path, content=json.dumps(BODIES[path]))
    assert threads
    assert all(name.startswith("headrace-body") for name in threads)


def test_many_prompts_are_taken_in_piece_by_piece(house, monkeypatch):
    turns = 0
    turn = Pieces.turn

    async def counted(pieces):
        nonlocal turns
        turns += 1
        await turn(pieces)

    monkeypatch.setattr(Pieces, "turn", counted)
    answer = house.client.post("/v1/completions", json={"prompt": ["x"] * 20, "max_tokens": 1})
    assert answer.status_code == 200
    assert turns >= 3 * 20  # making prompts, opening choices, looking up


def test_logit_bias_has_a_limit_that_its_error_names(house):
    biases = {str(token): 1 for token in range(8193)}
    refused = house.client.post("/v1/completions", json={"prompt": "x", "logit_bias": biases})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "logit_bias"
    assert "must have at most 8192 entries, got 8193" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "TEXT"}),
        ("/v1/completions", {"prompt": ["x", "TEXT"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "TEXT"}]}),
        ("/v1/messages", {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "TEXT"}]}),
    ],
)
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(house, monkeypatch, path, body):
    model = house.model
    monkeypatch.setattr(type(model.tokenizer), "fewest", lambda self, text: len(text) // 4)
    monkeypatch.setattr(type(model), "_timed", lambda *given: pytest.fail("it was tokenized"))
    if "model" in body:
        body = body | {"model": model.name}
    raw = json.dumps(body).replace("TEXT", "x" * 8 * model.max_model_len)
    refused = house.client.post(path, content=raw)
    assert refused.status_code == 400
    assert "prompt is too long" in refused.text or "your prompt has at least" in refused.text


def test_tokenize_lists_tokens_in_pieces(house, monkeypatch):
    monkeypatch.setattr("headrace.api.openai.routes.LISTED_AT_ONCE", 3)
    tokenizer = house.model.tokenizer
    for text in ("", 'Hi \u00e9 "quoted" fox jumps'):
        tokens = tokenizer.encode(text)
        answer = house.client.post("/tokenize", json={"prompt": text, "return_token_strs": True})
        assert answer.headers["content-type"] == "application/json"
        assert answer.json() == {
            "count": len(tokens),
            "max_model_len": house.model.max_model_len,
            "tokens": tokens,
            "token_strs": [tokenizer.token(token) for token in tokens],
        }
        assert house.client.post("/tokenize", json={"prompt": text}).json()["token_strs"] is None


@pytest.mark.parametrize("more", [{"logprobs": True, "top_logprobs": 2}, {"n": 2}, {"prompt_logprobs": 1}])
def test_a_large_answer_is_written_beside_the_loop(house, monkeypatch, more):
    threads, whole = [], ChatWriter.whole

    def noted(writer):
        threads.append(threading.current_thread().name)
        return whole(writer)

    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "seed": 0} | more
    small = house.client.post("/v1/chat/completions", json=body)
    monkeypatch.setattr(replies, "LARGE_TOKENS", 1)
    monkeypatch.setattr(ChatWriter, "whole", noted)
    large = house.client.post("/v1/chat/completions", json=body)
    assert large.json()["choices"] == small.json()["choices"]
    assert threads
    assert all(name.startswith("asyncio_") for name in threads)
