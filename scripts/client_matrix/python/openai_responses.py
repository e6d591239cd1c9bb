"""OpenAI's Python client: the Responses API."""

from __future__ import annotations

import json
from typing import Literal

import openai
from cases import ANSWER, BUILTIN, DEGREES, QUESTION, SCRIPTED, STORY, WEATHER_SCHEMA, check_animal, run
from pydantic import BaseModel

builtin = openai.OpenAI(base_url=BUILTIN.url, api_key="none", max_retries=0)
scripted = openai.OpenAI(base_url=SCRIPTED.url, api_key="none", max_retries=0)
TOOL = {"type": "function", "name": "get_weather", "parameters": WEATHER_SCHEMA, "strict": True}


class Animal(BaseModel):
    """An animal."""

    kind: Literal["fox", "hen"]
    age: int


def chat() -> None:
    first = builtin.responses.create(
        model=BUILTIN.model, input=STORY, instructions="Be brief.", max_output_tokens=20
    )
    assert first.output_text
    second = builtin.responses.create(
        model=BUILTIN.model, input="Go on.", previous_response_id=first.id, max_output_tokens=20
    )
    assert second.usage.input_tokens > first.usage.input_tokens


def stream() -> None:
    with builtin.responses.stream(model=BUILTIN.model, input=STORY) as events:
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert text == events.get_final_response().output_text


def structured() -> None:
    answer = builtin.responses.parse(model=BUILTIN.model, input=STORY, text_format=Animal)
    check_animal(answer.output_parsed.model_dump())
    with builtin.responses.stream(model=BUILTIN.model, input=STORY, text_format=Animal) as events:
        list(events)
        check_animal(events.get_final_response().output_parsed.model_dump())


def tool() -> None:
    first = scripted.responses.create(model=SCRIPTED.model, input=QUESTION, tools=[TOOL])
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert json.loads(call.arguments) == {"city": "Paris"}
    history = [
        {"role": "user", "content": QUESTION},
        *first.output,
        {"type": "function_call_output", "call_id": call.call_id, "output": DEGREES},
    ]
    assert scripted.responses.create(model=SCRIPTED.model, input=history, tools=[TOOL]).output_text == ANSWER
    second = scripted.responses.create(
        model=SCRIPTED.model, input=history[-1:], tools=[TOOL], previous_response_id=first.id
    )
    assert second.output_text == ANSWER


run("openai", {"chat": chat, "stream": stream, "structured": structured, "tool": tool})
