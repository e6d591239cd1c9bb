"""Semantic Kernel's OpenAI connector."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

from cases import ANSWER, BUILTIN, DEGREES, QUESTION, SCRIPTED, STORY, Place, check_animal, run
from openai import AsyncOpenAI
from pydantic import BaseModel
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function


class Animal(BaseModel):
    """An animal."""

    kind: Literal["fox", "hen"]
    age: int


class Weather:
    """A plug-in."""

    @kernel_function(name="get_weather", description="The weather now.")
    def get_weather(self, city: str) -> str:
        """The weather of a city."""
        return DEGREES


async def ask(place: Place, text: str, *, stream: bool = False, **more: Any) -> Any:
    """The message that a server answers."""
    kernel = Kernel()
    kernel.add_plugin(Weather(), "weather")
    client = AsyncOpenAI(base_url=place.url, api_key="none", max_retries=0)
    service = OpenAIChatCompletion(ai_model_id=place.model, async_client=client)
    history = ChatHistory()
    history.add_user_message(text)
    settings = OpenAIChatPromptExecutionSettings(**more)
    if stream:
        pieces = service.get_streaming_chat_message_content(history, settings, kernel=kernel)
        return "".join([str(piece) async for piece in pieces if piece is not None])
    return await service.get_chat_message_content(history, settings, kernel=kernel)


def chat() -> None:
    assert str(asyncio.run(ask(BUILTIN, STORY, max_tokens=20)))


def stream() -> None:
    assert asyncio.run(ask(BUILTIN, STORY, max_tokens=20, stream=True))


def structured() -> None:
    check_animal(json.loads(str(asyncio.run(ask(BUILTIN, STORY, response_format=Animal)))))


def tool() -> None:
    choice = FunctionChoiceBehavior.Auto()
    assert str(asyncio.run(ask(SCRIPTED, QUESTION, function_choice_behavior=choice))) == ANSWER


run("semantic-kernel", {"chat": chat, "stream": stream, "structured": structured, "tool": tool})
