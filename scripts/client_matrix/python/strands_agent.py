"""Strands Agents; the fifth argument picks the API."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Literal

import strands
from cases import ANSWER, BUILTIN, DEGREES, QUESTION, SCRIPTED, STORY, Place, check_animal, run
from pydantic import BaseModel
from strands.models.anthropic import AnthropicModel
from strands.models.openai import OpenAIModel

DIALECT = sys.argv[5]


class Animal(BaseModel):
    """An animal."""

    kind: Literal["fox", "hen"]
    age: int


@strands.tool
def get_weather(city: str) -> str:
    """The weather now.

    Args:
        city: where.
    """
    return DEGREES


def agent(place: Place, **more: Any) -> strands.Agent:
    """An agent on a server."""
    if DIALECT == "anthropic":
        model: Any = AnthropicModel(
            client_args={"base_url": place.root, "api_key": "none"},
            model_id=place.model,
            max_tokens=200,
            params={"temperature": 0},
        )
    else:
        model = OpenAIModel(
            client_args={"base_url": place.url, "api_key": "none"},
            model_id=place.model,
            params={"max_tokens": 200, "temperature": 0},
        )
    return strands.Agent(model=model, callback_handler=None, **more)


def chat() -> None:
    assert str(agent(BUILTIN)(STORY)).strip()


def stream() -> None:
    async def read() -> str:
        return "".join(
            [event["data"] async for event in agent(BUILTIN).stream_async(STORY) if "data" in event]
        )

    assert asyncio.run(read())


def structured() -> None:
    check_animal(agent(BUILTIN).structured_output(Animal, STORY).model_dump())


def tool() -> None:
    assert str(agent(SCRIPTED, tools=[get_weather])(QUESTION)).strip() == ANSWER


run("strands-agents", {"chat": chat, "stream": stream, "structured": structured, "tool": tool})
