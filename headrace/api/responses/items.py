"""Converts input items to their stored form, and stored items to chat messages."""

from __future__ import annotations

import base64
import json
import secrets
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from headrace.api.body import valid
from headrace.api.compile.bodies import ChatBody, ImagePart
from headrace.api.compile.call import NOTHING, Call
from headrace.api.errors import ApiError, invalid
from headrace.api.responses.wire import (
    MAX_ITEMS,
    CompactionItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    Id,
    ImageContent,
    Input,
    Item,
    ItemReference,
    MessageItem,
    ReasoningItem,
    Spelling,
    TextContent,
)
from headrace.api.wire import Wire

PREFIX = "hr1_"
"""Prefix of the contents of every item in this format."""


MAX_HELD_BYTES = 4_000_000
"""Maximum bytes of the JSON text in an item, decompressed."""


RECENT = frozenset({"message", "function_call", "function_call_output", "reasoning"})
SUMMARY_TOKENS = 1024
"""Maximum tokens of a summary."""


_ASK = (
    "Sum up the conversation below so that it can go on from your summary alone. Keep what was asked for, what was "
    "decided and done, names, numbers and open points. Write the summary only."
)


_OPENING = "Summary of the conversation so far:"
RULES = frozenset({"system", "developer"})
"""Roles whose messages are never summarized, because a summary becomes a user's message."""


_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


class CompactBody(Wire):
    """A conversation to summarize."""

    model: str = Field(description="The served model.")
    input: Input | None = Field(None, description="A text, or items.")
    previous_response_id: Id | None = Field(
        None, description="The stored response at the conversation's end."
    )
    instructions: str | None = Field(None, description="Further instructions for the summary.")
    prompt_cache_key: str | None = Field(None, max_length=512)
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    service_tier: str | None = None
    request_id: str | None = Field(None, pattern=r"^[A-Za-z0-9._:-]{1,128}$")


class Compaction(NamedTuple):
    """The contents of an item: a summary, and the unchanged items after the part that it summarizes."""

    summary: str
    recent: tuple[Item, ...] = ()


def summary_request(
    messages: Iterable[Mapping[str, Any]], instructions: str | None, more: Mapping[str, Any]
) -> ChatBody:
    """The chat request that makes the summary of ``messages``; ``more`` are further fields of it.

    Raises:
        ApiError: there is nothing to summarize.
    """
    messages = [*messages]
    if any(isinstance(part, ImagePart) for message in messages for part in message.get("content") or ()):
        raise invalid(
            "input: a conversation with images cannot be compacted", "input", "unsupported_parameter"
        )
    conversation = as_text(messages)
    if not conversation:
        raise invalid("input must not be empty", "input")
    ask = _ASK if instructions is None else f"{_ASK}\n{instructions}"
    asked = {
        "messages": [
            {"role": "user", "content": f"{ask}\n\n<conversation>\n{conversation}\n</conversation>"}
        ],
        "max_completion_tokens": SUMMARY_TOKENS,
        "temperature": 0.0,
    }
    return valid(ChatBody, asked | {name: value for name, value in more.items() if value is not None})


def as_text(messages: Iterable[Mapping[str, Any]]) -> str:
    """Messages as text, one line for each message and call, without the roles of `RULES`."""
    return "\n".join(line for message in messages for line in _lines(message))


def _lines(message: Mapping[str, Any]) -> Iterable[str]:
    if message["role"] in RULES:
        return
    content = message.get("content") or ""
    text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
    if text:
        yield f"{message['role']}: {text}"
    for call in message.get("tool_calls", ()):
        yield f"{message['role']} calls {call['function']['name']} with {call['function']['arguments']}"


def summary_of(call: Call) -> str:
    """The text of a complete call, without its reasoning."""
    (choice,) = call.choices
    delta, reading = choice.gained() or NOTHING, call.prompts[0].reading
    if reading is None:
        return delta.text
    reader = reading.open()
    pieces = [reader.push(delta.text, delta.texts), reader.finish()]
    choice.reasoning_tokens = reader.reasoning_tokens
    return "".join([piece.content for piece in pieces])


def compaction_item(summary: str, id: str, recent: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """The item that holds ``summary`` and the ``recent`` items."""
    held = {"summary": summary} | ({"recent": recent} if recent else {})
    packed = zlib.compress(json.dumps(held).encode())
    return {
        "type": "compaction",
        "id": id,
        "encrypted_content": PREFIX + base64.urlsafe_b64encode(packed).decode(),
    }


def read_compaction(content: str) -> Compaction:
    """The contents of a compaction item.

    Raises:
        ApiError: another kind of server made the item, or its contents are invalid.
    """
    try:
        if not content.startswith(PREFIX):
            raise ValueError("another server made it")
        packed = base64.b64decode(content.removeprefix(PREFIX), altchars=b"-_", validate=True)
        reader = zlib.decompressobj()
        text = reader.decompress(packed, MAX_HELD_BYTES)
        if not reader.eof:
            raise ValueError("it is cut off or too long")
        held = json.loads(text)
        summary, recent = held["summary"], _ITEMS.validate_python(held.get("recent", []))
        if not isinstance(summary, str) or len(recent) > MAX_ITEMS:
            raise ValueError("it holds no text, or too many items")
        if any(item.type not in RECENT or getattr(item, "role", "") in RULES for item in recent):
            raise ValueError("it holds an item that does not belong there")
    except ValidationError:
        message = "input: a compaction item cannot be read: it holds an invalid item"
        raise ApiError(400, message, param="input", code="invalid_compaction") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, zlib.error) as error:
        message = f"input: a compaction item cannot be read: {error}"
        raise ApiError(400, message, param="input", code="invalid_compaction") from None
    return Compaction(summary, tuple(recent))


def opening_of(summary: str) -> str:
    """The text that is put before the user's next message."""
    return f"{_OPENING}\n{summary}"


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
    parts: Sequence[TextContent | ImageContent]
    parts = [TextContent(type="text", text=content)] if isinstance(content, str) else content
    return {
        "type": "message",
        "id": item.id or new_id("msg"),
        "status": item.status or "completed",
        "role": item.role,
        "content": [_part(part, kind) for part in parts],
    } | ({"phase": item.phase} if item.phase is not None else {})


def _part(part: TextContent | ImageContent, kind: str) -> Stored:
    if isinstance(part, ImageContent):
        return {"type": part.type, "image_url": part.image_url, "detail": part.detail or "auto"}
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
            begun = {"type": "input_text", "text": f"{opening}\n"}
            if has_images([item]):
                content = _content([begun, *item["content"]], item["id"], first=-1)
            else:
                content = "\n".join(part["text"] for part in (begun, *item["content"]))
            messages.append({"role": "user", "content": content})
            opening = ""
        elif kind == "message":
            messages.append({"role": item["role"], "content": _content(item["content"], item["id"])})
        else:
            content = _content(item["output"], item["id"], "output")
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
            answer["content"] = _content(item["content"], item["id"])
        case _:
            name = Spelling(item["name"], item.get("namespace")).flat
            function = {"name": name, "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            answer.setdefault("tool_calls", []).append(call)


def _content(
    parts: str | Sequence[Mapping[str, Any]], item: str, field: str = "content", first: int = 0
) -> str | list[dict[str, Any] | ImagePart]:
    """Parts in chat's format; a single text becomes a string, which every template accepts.

    Errors name an image by the id of its ``item``, for which `conversation.own_names` puts the item's place.
    """
    if isinstance(parts, str):
        return parts
    if len(parts) == 1 and "text" in parts[0]:
        return str(parts[0]["text"])
    return [
        {"type": "text", "text": part["text"]}
        if "text" in part
        else ImagePart.at(f"{item}.{field}[{at}]", "image_url", part["image_url"], part["detail"])
        for at, part in enumerate(parts, start=first)
    ]


def has_images(items: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a message or an output of a function among ``items`` has an image."""
    parts = [item.get("output") if "output" in item else item.get("content") for item in items]
    return any(part["type"] == "input_image" for each in parts if isinstance(each, list) for part in each)
