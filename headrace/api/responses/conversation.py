"""Converts a body of the Responses API to a chat body; errors name the fields as the client sent them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from pydantic import ValidationError

from headrace.api.body import reason_of
from headrace.api.compile.bodies import ChatBody
from headrace.api.compile.call import Call
from headrace.api.compile.submit import count_chat, open_chat
from headrace.api.errors import invalid
from headrace.api.exchange import Caller
from headrace.api.responses.items import (
    Stored,
    as_text,
    chat_messages,
    compaction_item,
    current,
    has_images,
    is_rule,
    new_id,
    spoken,
    summary_of,
    summary_request,
)
from headrace.api.responses.output import Compacted, usage_of
from headrace.api.responses.wire import (
    AllowedFunctions,
    FunctionChoice,
    ResponsesBody,
    ResponseTool,
    SchemaFormat,
    offered,
    path_of,
)
from headrace.api.serving import Serving
from headrace.api.wire import named

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


def own_names(
    tools: Sequence[ResponseTool] = (), items: Sequence[Mapping[str, Any]] = ()
) -> AbstractContextManager[None]:
    """Rename fields in errors from those of the chat body to those of the client's request.

    Its input has the ``items``, and it offers the ``tools``.
    """

    def places(text: str) -> str:
        for number, item in enumerate(items):
            for field in ("content", "output"):
                text = text.replace(f"{item['id']}.{field}[", f"input[{number}].{field}[")
        text = _ALLOWED.sub(r"tool_choice.tools[\1]", text)
        return _TOOL.sub(lambda found: path_of(tools, int(found[1])), text)

    return named(_NAMES, places)


SAME = ("model", "prompt_cache_key", "user", "cache_salt", "service_tier", "priority")
"""Fields of a request that are copied to the request for its summary."""


ANSWER_SHARE = 16
"""``truncation: auto`` leaves 1/16 of the context for the output, unless ``max_output_tokens`` is set."""


class Fitted(NamedTuple):
    """The conversation to answer, and the compaction that was made for it."""

    chat: ChatBody
    compacted: Compacted | None = None


async def fitted(serving: Serving, body: ResponsesBody, caller: Caller, items: Sequence[Stored]) -> Fitted:
    """The conversation of a request with ``items``, those of earlier responses first.

    Raises:
        ApiError: there is no message to answer, or the summary cannot be made.
    """
    chat, compacted = chat_body(body, items), None
    if has_images(items):
        _check_with_images(body)
    if body.context_management:
        limit = body.context_management[0].compact_threshold or serving.model.max_model_len * 3 // 4
        if await count_chat(serving.model, chat, caller) > limit:
            compacted = await _compacted(serving, body, caller, items, limit)
        if compacted is not None:
            items = [*filter(is_rule, items), compacted.item]
            chat = chat_body(body, items)
    if body.truncation == "auto":
        chat = await _shortened(serving, body, caller, items, chat)
    return Fitted(chat, compacted)


def _check_with_images(body: ResponsesBody) -> None:
    """Raise `ApiError` 400 for fields that shorten a conversation: images have no summary."""
    for field in ("context_management", "truncation"):
        if getattr(body, field) not in (None, [], "disabled"):
            why = "is not supported for a conversation with images"
            raise invalid(f"{field} {why}", field, "unsupported_parameter")


async def _compacted(
    serving: Serving, body: ResponsesBody, caller: Caller, items: Sequence[Stored], limit: int
) -> Compacted | None:
    """Let the model summarize the conversation; the last turn stays unchanged if it has at most ``limit`` / 2 tokens.

    None if there is nothing before that turn: tools and system messages cannot be summarized.
    """
    summary, given = current(items)
    given = [item for item in given if not is_rule(item)]
    asked = [at for at, item in enumerate(given) if item["type"] == "message" and item["role"] == "user"]
    recent = given[asked[-1] :] if asked else []
    if len(await serving.model.encode(as_text(spoken("", recent)), False)) > limit // 2:
        recent = []
    earlier = given[: len(given) - len(recent)]
    if not earlier:
        return None
    same = {name: getattr(body, name) for name in SAME}
    call = await open_chat(
        serving.lookup,
        serving.model,
        summary_request(spoken(summary, earlier), None, same),
        caller._replace(stored=None, exchange=None),
        serving.request_timeout,
        id_prefix="cmp_",
        shorten=True,
    )
    try:
        await caller.while_connected(_complete(call))
        item = compaction_item(summary_of(call), new_id("cmp"), recent)
        return Compacted(item, usage_of(call))
    finally:
        call.close()


async def _complete(call: Call) -> None:
    while not call.done:
        await call.advance()


async def _shortened(
    serving: Serving, body: ResponsesBody, caller: Caller, items: Sequence[Stored], chat: ChatBody
) -> ChatBody:
    """The conversation without as many of its oldest items as needed to leave room for the output.

    System messages stay.
    """
    limit = serving.model.max_model_len
    room = limit - (body.max_output_tokens or limit // ANSWER_SHARE)
    if await count_chat(serving.model, chat, caller) <= room:
        return chat
    summary, given = current(items)
    rules, rest = [*filter(is_rule, given)], [item for item in given if not is_rule(item)]
    if summary:
        rules.append(compaction_item(summary, new_id("cmp")))
    cuts = _cuts(rest)
    low, high = 0, len(cuts)
    while low < high:  # the first cut that leaves room
        middle = (low + high) // 2
        tried = chat_body(body, [*rules, *rest[cuts[middle] :]])
        if await count_chat(serving.model, tried, caller) <= room:
            high = middle
        else:
            low = middle + 1
    if not cuts:
        return chat
    return chat_body(body, [*rules, *rest[cuts[min(low, len(cuts) - 1)] :]])


def _cuts(items: Sequence[Mapping[str, Any]]) -> list[int]:
    """Indices where a conversation may begin without losing the call of a later output; ascending, without 0."""
    cuts, missing = [], set[str]()
    for at in range(len(items) - 1, 0, -1):
        item = items[at]
        if item["type"] == "function_call_output":
            missing.add(item["call_id"])
        elif item["type"] == "function_call":
            missing.discard(item["call_id"])
        if not missing:
            cuts.append(at)
    return cuts[::-1]
