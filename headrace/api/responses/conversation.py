"""Converts a body of the Responses API to a chat body; errors name the fields as the client sent them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from pydantic import ValidationError

from headrace.api.errors import invalid
from headrace.api.generation.names import named
from headrace.api.openai.chat_wire import ChatBody
from headrace.api.responses.items import chat_messages
from headrace.api.responses.tools.wire import (
    AllowedFunctions,
    FunctionChoice,
    ResponseTool,
    offered,
    path_of,
)
from headrace.api.responses.wire import ResponsesBody, SchemaFormat
from headrace.api.wire import reason_of

_OWN = {"tools", "tool_choice", "stream_options"}
_SAME = tuple(sorted((ResponsesBody.model_fields.keys() & ChatBody.model_fields.keys()) - _OWN))
"""Fields that both bodies have."""


def chat_body(body: ResponsesBody, items: Iterable[Mapping[str, Any]]) -> ChatBody:
    """The conversation of a request with ``items``, those of earlier responses first.

    Raises:
        ApiError: there is no message to answer.
    """
    messages = chat_messages(items)
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
    if not messages:
        raise invalid("input must not be empty", "input")
    asked = body.model_dump(include=set(_SAME), exclude_unset=True, by_alias=True)
    asked["messages"] = messages
    asked["max_completion_tokens"] = body.max_output_tokens
    if body.logprobs:
        asked |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    else:
        asked.pop("top_logprobs", None)
    asked |= _tools(body) | _formats(body)
    try:
        return ChatBody.model_validate(asked)
    except ValidationError as error:
        raise invalid(f"input: {reason_of(error)}", "input") from None


def _tools(body: ResponsesBody) -> dict[str, Any]:
    asked: dict[str, Any] = {}
    functions = [
        tool.model_dump(exclude={"type"}, exclude_none=True) | {"name": spelling.flat}
        for spelling, tool in offered(body.tools or ())
    ]
    if functions:
        asked["tools"] = [{"type": "function", "function": function} for function in functions]
    choice = body.tool_choice
    if isinstance(choice, FunctionChoice):
        asked["tool_choice"] = _named(choice)
    elif isinstance(choice, AllowedFunctions):
        allowed = {"mode": choice.mode, "tools": [_named(each) for each in choice.tools]}
        asked["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
    elif choice is not None:
        asked["tool_choice"] = choice
    return asked


def _named(choice: FunctionChoice) -> dict[str, Any]:
    return {"type": "function", "function": {"name": choice.name}}


def _formats(body: ResponsesBody) -> dict[str, Any]:
    asked: dict[str, Any] = {}
    if body.reasoning is not None and body.reasoning.effort is not None:
        asked["reasoning_effort"] = body.reasoning.effort
    if body.reasoning is not None and body.reasoning.max_tokens is not None:
        asked["thinking_token_budget"] = body.reasoning.max_tokens
    form = body.text.format if body.text is not None else None
    if isinstance(form, SchemaFormat):
        schema = form.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
        asked["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif form is not None:
        asked["response_format"] = {"type": form.type}
    return asked


_NAMES: Mapping[str, str] = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "thinking_token_budget": "reasoning.max_tokens",
    "messages": "input",
}


_TOOL = re.compile(r"\btools\[(\d+)\]\.function\b")
_ALLOWED = re.compile(r"\btool_choice\.allowed_tools\.tools\[(\d+)\]\.function\b")


def own_names(tools: Sequence[ResponseTool] = ()) -> AbstractContextManager[None]:
    """Rename fields in errors from those of the chat body to those of the client's request, which has ``tools``."""

    def places(text: str) -> str:
        text = _ALLOWED.sub(r"tool_choice.tools[\1]", text)
        return _TOOL.sub(lambda found: path_of(tools, int(found[1])), text)

    return named(_NAMES, places)
