"""Anthropic's Python client."""

from __future__ import annotations

import json
from typing import Literal

import anthropic
from cases import (
    ANIMAL_SCHEMA,
    ANSWER,
    BUILTIN,
    DEGREES,
    QUESTION,
    SCRIPTED,
    STORY,
    WEATHER_SCHEMA,
    check_animal,
    run,
)
from pydantic import BaseModel

builtin = anthropic.Anthropic(base_url=BUILTIN.root, api_key="none", max_retries=0)
scripted = anthropic.Anthropic(base_url=SCRIPTED.root, api_key="none", max_retries=0)
ASKED = {"model": BUILTIN.model, "messages": [{"role": "user", "content": STORY}], "max_tokens": 60}


class Animal(BaseModel):
    """An animal."""

    kind: Literal["fox", "hen"]
    age: int


def chat() -> None:
    message = builtin.messages.create(system="You tell stories.", **ASKED)
    assert message.content[0].text
    assert message.usage.output_tokens <= 60


def stream() -> None:
    with builtin.messages.stream(**ASKED) as events:
        text = "".join(events.text_stream)
        assert text == events.get_final_message().content[0].text


def structured() -> None:
    answer = builtin.messages.create(
        output_config={"format": {"type": "json_schema", "schema": ANIMAL_SCHEMA}}, **ASKED
    )
    check_animal(json.loads(answer.content[0].text))
    check_animal(builtin.messages.parse(output_format=Animal, **ASKED).parsed_output.model_dump())


def tool() -> None:
    tools = [{"name": "get_weather", "input_schema": WEATHER_SCHEMA}]
    asked = {"model": SCRIPTED.model, "max_tokens": 300, "tools": tools}
    messages = [{"role": "user", "content": QUESTION}]
    first = scripted.messages.create(messages=messages, **asked)
    (call,) = [block for block in first.content if block.type == "tool_use"]
    assert call.input == {"city": "Paris"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": DEGREES}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    with scripted.messages.stream(messages=messages, **asked) as events:
        assert events.get_final_text() == ANSWER

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather now.

        Args:
            city: where.
        """
        return DEGREES

    runner = scripted.beta.messages.tool_runner(
        model=SCRIPTED.model, max_tokens=300, tools=[get_weather], messages=messages[:1]
    )
    assert runner.until_done().content[0].text == ANSWER


run("anthropic", {"chat": chat, "stream": stream, "structured": structured, "tool": tool})
