"""LiteLLM's SDK: its providers hosted_vllm, openai and anthropic."""

from __future__ import annotations

import json
from typing import Any, Literal

import litellm
from cases import (
    ANSWER,
    BUILTIN,
    DEGREES,
    QUESTION,
    SCRIPTED,
    STORY,
    WEATHER_SCHEMA,
    Place,
    check_animal,
    run,
)
from pydantic import BaseModel, ConfigDict

TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER_SCHEMA}}
ASKED = [{"role": "user", "content": STORY}]
PROVIDERS = ("openai", "hosted_vllm", "anthropic")


class Animal(BaseModel):
    """An animal. Without the configuration its schema allows more fields."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["fox", "hen"]
    age: int


def ask(place: Place, provider: str, **more: Any) -> Any:
    """A completion of a provider."""
    base = place.root if provider == "anthropic" else place.url
    more = {"max_tokens": 200, "num_retries": 0} | more
    return litellm.completion(model=f"{provider}/{place.model}", api_base=base, api_key="none", **more)


def chat() -> None:
    for provider in PROVIDERS:
        assert ask(BUILTIN, provider, messages=ASKED).choices[0].message.content
    answer = litellm.text_completion(
        model=f"text-completion-openai/{BUILTIN.model}",
        prompt="Once upon a time",
        api_base=BUILTIN.url,
        api_key="none",
        max_tokens=20,
    )
    assert answer.choices[0].text


def stream() -> None:
    for provider in PROVIDERS:
        chunks = list(
            ask(BUILTIN, provider, messages=ASKED, stream=True, stream_options={"include_usage": True})
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), provider


def structured() -> None:
    for provider in PROVIDERS:
        answer = ask(BUILTIN, provider, messages=ASKED, response_format=Animal)
        check_animal(json.loads(answer.choices[0].message.content))


def tool() -> None:
    for provider in PROVIDERS:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        message = ask(SCRIPTED, provider, messages=messages, tools=[TOOL]).choices[0].message
        (call,) = message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Paris"}
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": DEGREES}]
        answer = ask(SCRIPTED, provider, messages=messages, tools=[TOOL])
        assert answer.choices[0].message.content == ANSWER, provider


run("litellm", {"chat": chat, "stream": stream, "structured": structured, "tool": tool})
