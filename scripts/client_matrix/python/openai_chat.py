"""OpenAI's Python client: chat completions."""

from __future__ import annotations

import json
from typing import Literal

import openai
from cases import ANSWER, BUILTIN, DEGREES, QUESTION, SCRIPTED, STORY, WEATHER_SCHEMA, check_animal, run
from pydantic import BaseModel

builtin = openai.OpenAI(base_url=BUILTIN.url, api_key="none", max_retries=0)
scripted = openai.OpenAI(base_url=SCRIPTED.url, api_key="none", max_retries=0)
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER_SCHEMA, "strict": True}}


class Animal(BaseModel):
    """An animal."""

    kind: Literal["fox", "hen"]
    age: int


def chat() -> None:
    answer = builtin.chat.completions.create(
        model=BUILTIN.model, messages=[{"role": "user", "content": STORY}], max_completion_tokens=20
    )
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens <= 20


def stream() -> None:
    chunks = list(
        builtin.chat.completions.create(
            model=BUILTIN.model,
            messages=[{"role": "user", "content": STORY}],
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].usage.completion_tokens


def structured() -> None:
    asked = {"model": BUILTIN.model, "messages": [{"role": "user", "content": STORY}], "seed": 1}
    check_animal(
        builtin.chat.completions.parse(response_format=Animal, **asked).choices[0].message.parsed.model_dump()
    )
    with builtin.chat.completions.stream(response_format=Animal, **asked) as events:
        check_animal(events.get_final_completion().choices[0].message.parsed.model_dump())


def tool() -> None:
    messages = [{"role": "user", "content": QUESTION}]
    first = scripted.chat.completions.create(model=SCRIPTED.model, messages=messages, tools=[TOOL])
    message = first.choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": DEGREES}]
    second = scripted.chat.completions.create(model=SCRIPTED.model, messages=messages, tools=[TOOL])
    assert second.choices[0].message.content == ANSWER
    forced = builtin.chat.completions.create(
        model=BUILTIN.model, messages=messages[:1], tools=[TOOL], tool_choice="required", max_tokens=300
    )
    assert forced.choices[0].message.tool_calls[0].function.name == "get_weather"


run("openai", {"chat": chat, "stream": stream, "structured": structured, "tool": tool})
