"""Real models in GGUF: facts, structured output, tool calls, streaming and drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx

from headrace.core.request import SamplingParams
from headrace.llm.offline import LLM
from tests.server.conftest import Server

QUESTION = {"role": "user", "content": "What is the capital of France?"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=48)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city now.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def asked(server: Server, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    body = {"model": "smollm2", "messages": messages, "temperature": 0, "max_tokens": 64, **fields}
    reply = server.post("/v1/chat/completions", body)
    assert reply.status_code == 200, reply.text
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


def test_the_model_knows_a_capital_and_stops(server: Server) -> None:
    choice = asked(server, QUESTION)
    assert choice["message"]["content"] == "The capital of France is Paris."
    assert choice["finish_reason"] == "stop"


def test_a_stream_has_the_same_text(server: Server) -> None:
    body = {"model": "smollm2", "messages": [QUESTION], "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    deltas = [
        choice["delta"].get("content") or "" for line in lines for choice in json.loads(line)["choices"]
    ]
    assert "".join(deltas) == "The capital of France is Paris."
    assert len(deltas) > 4


def test_a_schema_is_filled(server: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "country": {"type": "string"}},
        "required": ["city", "country"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema, "strict": True}}
    said = asked(
        server,
        {"role": "user", "content": "The Eiffel Tower stands in Paris, France. Give city and country."},
        response_format=form,
    )
    filled = {name: value.lower() for name, value in json.loads(said["message"]["content"]).items()}
    assert filled == {"city": "paris", "country": "france"}


def test_a_tool_is_called_though_the_template_has_none(server: Server) -> None:
    question = {"role": "user", "content": "What is the weather in Paris?"}
    choice = asked(server, question, tools=[WEATHER], tool_choice="required")
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert "Paris" in json.loads(call["function"]["arguments"])["city"]
    history = [
        question,
        choice["message"],
        {"role": "tool", "tool_call_id": call["id"], "content": "18 degrees, sun"},
    ]
    answer = asked(server, *history, tools=[WEATHER])
    assert answer["message"]["content"] or answer["message"]["tool_calls"]


def test_drafts_do_not_change_the_texts(smollm2: Path) -> None:
    prompts = [
        "The capital of France is",
        "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n",
        "1 2 3 4 1 2 3 4 1 2 3",
    ]
    found = []
    for drafting in ({}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}):
        with LLM(
            str(smollm2), max_model_len=512, kv_cache_memory_bytes=64 << 20, dtype="float32", **drafting
        ) as llm:
            found.append([answer.outputs[0].text for answer in llm.generate(prompts, GREEDY)])
    assert found[0] == found[1]
    assert all(found[0])


def test_a_base_model_continues_a_text(gemma3: Path) -> None:
    with LLM(str(gemma3), max_model_len=512, kv_cache_memory_bytes=64 << 20) as llm:
        (answer,) = llm.generate(["1, 2, 3, 4, 5,"], SamplingParams(temperature=0.0, max_tokens=8))
        assert answer.prompt_token_ids[0] == llm.tokenizer.bos_token_id
    assert answer.outputs[0].text.startswith(" 6, 7")
