"""LlamaIndex' OpenAILike model."""

from __future__ import annotations

from typing import Any, Literal

from cases import ANSWER, BUILTIN, DEGREES, QUESTION, SCRIPTED, STORY, Place, check_animal, run
from llama_index.core.llms import ChatMessage, MessageRole
from llama_index.core.program import LLMTextCompletionProgram
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Animal(BaseModel):
    """An animal."""

    kind: Literal["fox", "hen"]
    age: int


def model(place: Place, **more: Any) -> OpenAILike:
    """The model of a server."""
    more = {
        "is_function_calling_model": True,
        "is_chat_model": True,
        "context_window": 1024,
        "max_retries": 0,
    } | more
    return OpenAILike(model=place.model, api_base=place.url, api_key="none", **more)


def get_weather(city: str) -> str:
    """The weather now."""
    return DEGREES


def chat() -> None:
    llm = model(BUILTIN, max_tokens=20)
    assert llm.chat([ChatMessage(role="user", content=STORY)]).message.content
    assert model(BUILTIN, max_tokens=20, is_chat_model=False).complete("Once upon a time").text


def stream() -> None:
    chunks = list(model(BUILTIN, max_tokens=20).stream_chat([ChatMessage(role="user", content=STORY)]))
    assert chunks[-1].message.content == "".join(chunk.delta or "" for chunk in chunks)


def structured() -> None:
    check_animal(model(BUILTIN).as_structured_llm(Animal).complete(STORY).raw.model_dump())
    json_schema = model(BUILTIN, should_use_structured_outputs=True)
    check_animal(json_schema.as_structured_llm(Animal).complete(STORY).raw.model_dump())
    program = LLMTextCompletionProgram.from_defaults(
        output_cls=Animal,
        prompt_template_str=STORY,
        llm=model(
            BUILTIN,
            is_function_calling_model=False,
            additional_kwargs={
                "extra_body": {"structured_outputs": {"json": Animal.model_json_schema()}},
            },
        ),
    )
    check_animal(program().model_dump())


def tool() -> None:
    llm = model(SCRIPTED)
    tools = [FunctionTool.from_defaults(get_weather)]
    history = [ChatMessage(role="user", content=QUESTION)]
    first = llm.chat_with_tools(tools, chat_history=history)
    (call,) = llm.get_tool_calls_from_response(first)
    assert (call.tool_name, call.tool_kwargs) == ("get_weather", {"city": "Paris"})
    result = ChatMessage(
        role=MessageRole.TOOL, content=DEGREES, additional_kwargs={"tool_call_id": call.tool_id}
    )
    second = llm.chat_with_tools(tools, chat_history=[*history, first.message, result])
    assert second.message.content == ANSWER
    *_, last = llm.stream_chat_with_tools(tools, chat_history=history)
    assert llm.get_tool_calls_from_response(last)[0].tool_kwargs == {"city": "Paris"}


run("llama-index-llms-openai-like", {"chat": chat, "stream": stream, "structured": structured, "tool": tool})
