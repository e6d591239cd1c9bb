"""Instructor, over OpenAI's and Anthropic's client."""

from __future__ import annotations

from typing import Any, Literal

import instructor
import openai
from cases import BUILTIN, STORY, Place, check_animal, run
from pydantic import BaseModel, ConfigDict

ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": STORY}],
    "max_retries": 0,
    "max_tokens": 200,
}


class Closed(BaseModel):
    """A value without further keys: a small model may invent them until ``max_tokens``."""

    model_config = ConfigDict(extra="forbid")


class Animal(Closed):
    """An animal."""

    kind: Literal["fox", "hen"]
    age: int


class Weather(Closed):
    """Look the weather up."""

    celsius: bool


def client(place: Place, mode: instructor.Mode) -> Any:
    """Instructor's client of a server."""
    plain = openai.OpenAI(base_url=place.url, api_key="none", max_retries=0)
    return instructor.from_openai(plain, mode=mode)


def anthropic_client(place: Place, mode: instructor.Mode) -> Any:
    """Instructor's client of a server, over Anthropic's."""
    import anthropic

    plain = anthropic.Anthropic(base_url=place.root, api_key="none", max_retries=0)
    return instructor.from_anthropic(plain, mode=mode)


def chat() -> None:
    text = client(BUILTIN, instructor.Mode.TOOLS).create(model=BUILTIN.model, response_model=None, **ASKED)
    assert text.choices[0].message.content


def stream() -> None:
    parts = list(
        client(BUILTIN, instructor.Mode.TOOLS).create_partial(
            model=BUILTIN.model, response_model=Animal, **ASKED
        )
    )
    check_animal(parts[-1].model_dump())


def structured() -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
        animal = client(BUILTIN, mode).create(model=BUILTIN.model, response_model=Animal, **ASKED)
        check_animal(animal.model_dump())
    for mode in (instructor.Mode.ANTHROPIC_TOOLS,):
        animal = anthropic_client(BUILTIN, mode).create(model=BUILTIN.model, response_model=Animal, **ASKED)
        check_animal(animal.model_dump())


def tool() -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT):
        called = client(BUILTIN, mode).create(model=BUILTIN.model, response_model=Weather, **ASKED)
        assert isinstance(called, Weather)


run("instructor", {"chat": chat, "stream": stream, "structured": structured, "tool": tool})
