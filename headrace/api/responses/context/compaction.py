"""Compaction: the served model summarizes a conversation, and the summary replaces the conversation from then on.

The item is opaque to clients but not secret: it encodes the summary and the last items unchanged, which the client
could read anyway. So it needs no key, works on every server and survives a restart. Its contents are validated like
other input, and enter a prompt only as a user's message.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from headrace.api.errors import ApiError, invalid
from headrace.api.generation.call import Call
from headrace.api.generation.choices import NOTHING
from headrace.api.openai.chat_wire import ChatBody
from headrace.api.responses.input_wire import MAX_ITEMS, Id, Input, Item
from headrace.api.wire import Wire, valid

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
