"""Agno; the fifth argument picks the API."""

from __future__ import annotations

import sys
from typing import Any, Literal

from agno.agent import Agent
from agno.models.anthropic import Claude
from agno.models.openai import OpenAIResponses
from agno.models.openai.like import OpenAILike
from cases import ANSWER, BUILTIN, DEGREES, QUESTION, SCRIPTED, STORY, Place, check_animal, run
from pydantic import BaseModel

DIALECT = sys.argv[5]


class Animal(BaseModel):
    """An animal."""

    kind: Literal["fox", "hen"]
    age: int


def get_weather(city: str) -> str:
    """The weather now."""
    return DEGREES


def agent(place: Place, **more: Any) -> Agent:
    """An agent on a server."""
    if DIALECT == "anthropic":
        model: Any = Claude(
            id=place.model, api_key="none", client_params={"base_url": place.root}, max_tokens=300
        )
    else:
        form = OpenAIResponses if DIALECT == "responses" else OpenAILike
        model = form(id=place.model, base_url=place.url, api_key="none", temperature=0)
    return Agent(model=model, telemetry=False, **more)


def chat() -> None:
    answer = agent(BUILTIN).run(STORY)
    assert "error" not in str(answer.status).lower(), answer.content
    assert answer.content


def stream() -> None:
    assert "".join(str(event.content) for event in agent(BUILTIN).run(STORY, stream=True) if event.content)


def structured() -> None:
    answer = agent(BUILTIN, output_schema=Animal).run(STORY).content
    assert isinstance(answer, Animal), answer
    check_animal(answer.model_dump())


def tool() -> None:
    assert agent(SCRIPTED, tools=[get_weather]).run(QUESTION).content == ANSWER
    events = agent(SCRIPTED, tools=[get_weather]).run(QUESTION, stream=True)
    assert "".join(str(event.content or "") for event in events).endswith(ANSWER)


run("agno", {"chat": chat, "stream": stream, "structured": structured, "tool": tool})
