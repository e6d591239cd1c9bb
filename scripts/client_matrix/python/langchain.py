"""LangChain's chat models of OpenAI's and Anthropic's API; the fifth argument picks one."""

from __future__ import annotations

import sys
from typing import Any, Literal

from cases import ANSWER, BUILTIN, DEGREES, QUESTION, SCRIPTED, STORY, Place, check_animal, run
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool as as_tool
from pydantic import BaseModel

DIALECT = sys.argv[5]


class Animal(BaseModel):
    """An animal."""

    kind: Literal["fox", "hen"]
    age: int


@as_tool
def get_weather(city: str) -> str:
    """The weather now."""
    return DEGREES


def model(place: Place, **more: Any) -> Any:
    """A chat model of the dialect."""
    if DIALECT == "anthropic":
        from langchain_anthropic import ChatAnthropic

        return ChatAnthropic(
            model=place.model, base_url=place.root, api_key="none", max_tokens=200, max_retries=0
        )
    from langchain_openai import ChatOpenAI

    more |= {"use_responses_api": DIALECT == "responses", "max_retries": 0}
    return ChatOpenAI(model=place.model, base_url=place.url, api_key="none", **more)


def chat() -> None:
    message = model(BUILTIN, max_tokens=20).invoke([("system", "Be brief."), ("human", STORY)])
    assert message.text
    assert message.usage_metadata["output_tokens"]


def stream() -> None:
    whole = None
    for chunk in model(BUILTIN, max_tokens=20, stream_usage=True).stream(STORY):
        whole = chunk if whole is None else whole + chunk
    assert whole.text
    assert whole.usage_metadata["output_tokens"]


def structured() -> None:
    for method in ("json_schema", "function_calling"):
        bound = model(BUILTIN).with_structured_output(Animal, method=method)
        check_animal(bound.invoke(STORY).model_dump())
    if DIALECT == "chat":
        bound = model(BUILTIN, max_tokens=100).with_structured_output(
            Animal, method="json_mode", include_raw=True
        )
        assert bound.invoke(f"Answer in JSON. {STORY}")["raw"].content


def tool() -> None:
    bound = model(SCRIPTED).bind_tools([get_weather])
    messages = [HumanMessage(QUESTION)]
    first = bound.invoke(messages)
    (call,) = first.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    messages += [first, get_weather.invoke(call)]
    assert isinstance(messages[-1], ToolMessage)
    assert bound.invoke(messages).text == ANSWER
    whole = None
    for chunk in bound.stream([HumanMessage(QUESTION)]):
        whole = chunk if whole is None else whole + chunk
    assert whole.tool_calls[0]["args"] == {"city": "Paris"}
    assert (
        bound.invoke([HumanMessage(QUESTION), whole, get_weather.invoke(whole.tool_calls[0])]).text == ANSWER
    )
    from langgraph.prebuilt import create_react_agent

    agent = create_react_agent(model(SCRIPTED), [get_weather])
    assert agent.invoke({"messages": [("human", QUESTION)]})["messages"][-1].text == ANSWER


package = "langchain-anthropic" if DIALECT == "anthropic" else "langchain-openai"
run(package, {"chat": chat, "stream": stream, "structured": structured, "tool": tool})
