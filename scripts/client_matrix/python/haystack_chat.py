"""Haystack's OpenAI chat generator and agent."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from cases import ANSWER, BUILTIN, DEGREES, QUESTION, SCRIPTED, STORY, Place, check_animal, run
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from pydantic import BaseModel

ASKED = [ChatMessage.from_user(STORY)]


class Animal(BaseModel):
    """An animal."""

    kind: Literal["fox", "hen"]
    age: int


def get_weather(city: Annotated[str, "where"]) -> str:
    """The weather now."""
    return DEGREES


def model(place: Place, **more: Any) -> OpenAIChatGenerator:
    """The generator of a server."""
    key = Secret.from_token("none")
    return OpenAIChatGenerator(api_key=key, model=place.model, api_base_url=place.url, max_retries=0, **more)


def chat() -> None:
    assert model(BUILTIN, generation_kwargs={"max_tokens": 20}).run(ASKED)["replies"][0].text


def stream() -> None:
    said: list[str] = []
    answer = model(BUILTIN, streaming_callback=lambda chunk: said.append(chunk.content)).run(ASKED)
    assert "".join(said) == answer["replies"][0].text


def structured() -> None:
    answer = model(BUILTIN, generation_kwargs={"response_format": Animal}).run(ASKED)
    check_animal(json.loads(answer["replies"][0].text))


def tool() -> None:
    agent = Agent(chat_generator=model(SCRIPTED), tools=[create_tool_from_function(get_weather)])
    assert agent.run(messages=[ChatMessage.from_user(QUESTION)])["messages"][-1].text == ANSWER


run("haystack-ai", {"chat": chat, "stream": stream, "structured": structured, "tool": tool})
