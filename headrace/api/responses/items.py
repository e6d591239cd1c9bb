"""Converts input items to their stored form, and stored items to chat messages."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headrace.api.responses.context.compaction import RULES, opening_of, read_compaction
from headrace.api.responses.input_wire import (
    CompactionItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    Item,
    ItemReference,
    MessageItem,
    ReasoningItem,
    TextContent,
)
from headrace.api.responses.tools.names import Spelling

Stored = dict[str, Any]
"""An item as it is stored and returned."""


def new_id(prefix: str) -> str:
    """A new id for an item."""
    return f"{prefix}_{secrets.token_hex(12)}"


NO_ITEMS: Mapping[str, Stored] = {}


def stored_items(given: str | Sequence[Item], referred: Mapping[str, Stored] = NO_ITEMS) -> list[Stored]:
    """The input of a request, each item with an id; ``referred`` are the stored items that it references."""
    if isinstance(given, str):
        return [_message(MessageItem(role="user", content=given, phase=None))]
    return [referred[item.id] if isinstance(item, ItemReference) else _stored(item) for item in given]


def references(given: str | Sequence[Item]) -> dict[str, int]:
    """The ids of the stored items that an input references, with the index of each."""
    items = () if isinstance(given, str) else given
    return {item.id: at for at, item in enumerate(items) if isinstance(item, ItemReference)}


def _stored(item: Item) -> Stored:
    match item:
        case ItemReference():
            raise TypeError("a reference stands for another item")
        case CompactionItem():
            content = item.encrypted_content
            return {"type": "compaction", "id": item.id or new_id("cmp"), "encrypted_content": content}
        case MessageItem():
            return _message(item)
        case FunctionCallItem():
            return {
                "type": "function_call",
                "id": item.id or new_id("fc"),
                "call_id": item.call_id,
                **Spelling(item.name, item.namespace).fields(),
                "arguments": item.arguments,
                "status": item.status or "completed",
            }
        case FunctionCallOutputItem():
            output = item.output
            return {
                "type": "function_call_output",
                "id": item.id or new_id("fco"),
                "call_id": item.call_id,
                "output": output
                if isinstance(output, str)
                else [_part(part, "input_text") for part in output],
                "status": item.status or "completed",
            }
        case ReasoningItem():
            return {
                "type": "reasoning",
                "id": item.id or new_id("rs"),
                "summary": [part.model_dump() for part in item.summary or ()],
                "content": [part.model_dump() for part in item.content or ()],
            }


def _message(item: MessageItem) -> Stored:
    kind = "output_text" if item.role == "assistant" else "input_text"
    content = item.content
    parts = [TextContent(type="text", text=content)] if isinstance(content, str) else content
    return {
        "type": "message",
        "id": item.id or new_id("msg"),
        "status": item.status or "completed",
        "role": item.role,
        "content": [_part(part, kind) for part in parts],
    } | ({"phase": item.phase} if item.phase is not None else {})


def _part(part: TextContent, kind: str) -> Stored:
    plain: Stored = {"type": kind, "text": part.text}
    return plain | {"annotations": [], "logprobs": []} if kind == "output_text" else plain


def current(items: Iterable[Mapping[str, Any]]) -> tuple[str, list[Mapping[str, Any]]]:
    """The summary of the last compaction (empty without one), and the items that it does not replace.

    A compaction replaces all items before it, except system messages.
    """
    summary, kept = "", list[Mapping[str, Any]]()
    for item in items:
        if item["type"] != "compaction":
            kept.append(item)
            continue
        held = read_compaction(item["encrypted_content"])
        summary = held.summary
        kept = [*filter(is_rule, kept), *map(_stored, held.recent)]
    return summary, kept


def is_rule(item: Mapping[str, Any]) -> bool:
    """Whether an item is a system message, which no summary may replace."""
    return item["type"] == "message" and item["role"] in RULES


def chat_messages(items: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Stored items as chat messages, without those that a compaction replaces."""
    return spoken(*current(items))


def spoken(summary: str, items: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Items without compactions as chat messages, after a ``summary`` unless it is empty.

    Consecutive reasoning, text and calls form one message of the assistant.
    """
    messages: list[dict[str, Any]] = []
    opening = opening_of(summary) if summary else ""  # it begins the user's next message
    answer: dict[str, Any] | None = None  # the assistant's message that may still grow
    for item in items:
        kind = item["type"]
        of_assistant = kind == "message" and item["role"] == "assistant"
        of_user = kind == "message" and item["role"] == "user"
        if opening and not of_user and not is_rule(item):
            messages.append({"role": "user", "content": opening})
            opening = ""
        if of_assistant or kind in ("reasoning", "function_call"):
            if answer is None or not _grows(answer, kind):
                answer = {"role": "assistant"}
                messages.append(answer)
            _add(answer, item)
            continue
        answer = None
        if of_user and opening:
            text = "\n".join(part["text"] for part in item["content"])
            messages.append({"role": "user", "content": f"{opening}\n\n{text}"})
            opening = ""
        elif kind == "message":
            messages.append({"role": item["role"], "content": _content(item["content"])})
        else:
            content = _content(item["output"])
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
    if opening:
        messages.append({"role": "user", "content": opening})
    return [message for message in messages if len(message) > 1]


def _grows(answer: Mapping[str, Any], kind: str) -> bool:
    """Whether an item of ``kind`` can be a part of the message ``answer``."""
    if kind == "function_call":
        return True
    return "tool_calls" not in answer and "content" not in answer


def _add(answer: dict[str, Any], item: Mapping[str, Any]) -> None:
    match item["type"]:
        case "reasoning":
            text = "".join(part["text"] for part in item["content"] or item["summary"])
            if text:
                answer["reasoning_content"] = answer.get("reasoning_content", "") + text
        case "message":
            answer["content"] = _content(item["content"])
        case _:
            name = Spelling(item["name"], item.get("namespace")).flat
            function = {"name": name, "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            answer.setdefault("tool_calls", []).append(call)


def _content(parts: str | Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    """Parts in chat's format; a single one becomes a string, which every template accepts."""
    if isinstance(parts, str):
        return parts
    if len(parts) == 1:
        return str(parts[0]["text"])
    return [{"type": "text", "text": part["text"]} for part in parts]
