"""Pydantic AI; the fifth argument picks the API."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Literal

from cases import ANSWER, BUILTIN, DEGREES, QUESTION, SCRIPTED, STORY, Place, check_animal, run
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

DIALECT = sys.argv[5]


class Animal(BaseModel):
    """An animal."""

    kind: Literal["fox", "hen"]
    age: int


def model(place: Place) -> Any:
    """The model of a server."""
    if DIALECT == "anthropic":
        return AnthropicModel(
            place.model,
            provider=AnthropicProvider(base_url=place.root, api_key="none"),
            profile={"supports_json_schema_output": True},
        )
    form = OpenAIResponsesModel if DIALECT == "responses" else OpenAIChatModel
    return form(place.model, provider=OpenAIProvider(base_url=place.url, api_key="none"))


def chat() -> None:
    agent = Agent(
        model(BUILTIN), system_prompt="Be brief.", model_settings={"max_tokens": 20, "temperature": 0.0}
    )
    first = agent.run_sync(STORY)
    assert first.output
    assert agent.run_sync("Go on.", message_history=first.all_messages()).output


def stream() -> None:
    agent = Agent(model(BUILTIN), model_settings={"max_tokens": 20, "temperature": 0.0})

    async def read() -> str:
        async with agent.run_stream(STORY) as result:
            return "".join([piece async for piece in result.stream_text(delta=True)])

    assert asyncio.run(read())


def structured() -> None:
    for output in (ToolOutput(Animal), NativeOutput(Animal)):
        agent = Agent(model(BUILTIN), output_type=output, model_settings={"max_tokens": 300}, retries=0)
        check_animal(agent.run_sync(STORY).output.model_dump())


def tool() -> None:
    agent = Agent(model(SCRIPTED))

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """The weather now."""
        assert city == "Paris"
        return DEGREES

    assert agent.run_sync(QUESTION).output == ANSWER

    async def read() -> str:
        async with agent.run_stream(QUESTION) as result:
            return await result.get_output()

    assert asyncio.run(read()) == ANSWER


run("pydantic-ai-slim", {"chat": chat, "stream": stream, "structured": structured, "tool": tool})
