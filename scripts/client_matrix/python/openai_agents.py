"""OpenAI's Agents SDK; the fifth argument picks the API."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Literal

import agents
import openai
from cases import ANSWER, BUILTIN, DEGREES, QUESTION, SCRIPTED, STORY, Place, check_animal, run
from pydantic import BaseModel

DIALECT = sys.argv[5]
agents.set_tracing_disabled(True)


class Animal(BaseModel):
    """An animal."""

    kind: Literal["fox", "hen"]
    age: int


@agents.function_tool
def get_weather(city: str) -> str:
    """The weather now."""
    assert city == "Paris"
    return DEGREES


def agent(place: Place, **more: Any) -> agents.Agent:
    """An agent on a server."""
    client = openai.AsyncOpenAI(base_url=place.url, api_key="none", max_retries=0)
    form = agents.OpenAIResponsesModel if DIALECT == "responses" else agents.OpenAIChatCompletionsModel
    model = form(model=place.model, openai_client=client)
    settings = agents.ModelSettings(max_tokens=200, temperature=0.0)
    return agents.Agent(name="a", instructions="Be brief.", model=model, model_settings=settings, **more)


def ask(asked: agents.Agent, text: Any) -> Any:
    """What a run ends with."""
    return asyncio.run(agents.Runner.run(asked, text))


def chat() -> None:
    first = ask(agent(BUILTIN), STORY)
    assert first.final_output
    again = [*first.to_input_list(), {"role": "user", "content": "Go on."}]
    assert ask(agent(BUILTIN), again).final_output


def stream() -> None:
    async def read(asked: agents.Agent, text: str) -> tuple[str, Any]:
        result, said = agents.Runner.run_streamed(asked, text), ""
        async for event in result.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                said += event.data.delta
        return said, result.final_output

    said, final = asyncio.run(read(agent(BUILTIN), STORY))
    assert said
    assert said == final
    assert asyncio.run(read(agent(SCRIPTED, tools=[get_weather]), QUESTION))[1] == ANSWER


def structured() -> None:
    check_animal(ask(agent(BUILTIN, output_type=Animal), STORY).final_output.model_dump())


def tool() -> None:
    assert ask(agent(SCRIPTED, tools=[get_weather]), QUESTION).final_output == ANSWER


run("openai-agents", {"chat": chat, "stream": stream, "structured": structured, "tool": tool})
