"""Compaction: the served model sums up a conversation, and the summary stands for the conversation from then on.

The item is opaque to clients and not secret: it is the encoded summary, and the last items as they were, both of which
the client could read. So it needs no key, works on every server and outlives a restart. What it holds is validated like
other input, and enters a prompt with the user's authority only.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from headrace.serve.http.errors import ApiError, invalid
from headrace.serve.http.generation.call import Call
from headrace.serve.http.generation.choices import NOTHING
from headrace.serve.http.openai.chat_wire import ChatBody
from headrace.serve.http.responses.input_wire import MAX_ITEMS, Id, Input, Item
from headrace.serve.http.wire import Wire, valid

PREFIX = "hr1_"
"""Begins every item of this form."""

MAX_HELD_BYTES = 4_000_000
"""Bytes of the JSON text in an item, unpacked."""

RECENT = frozenset({"message", "function_call", "function_call_output", "reasoning"})
SUMMARY_TOKENS = 1024
"""Tokens of a summary at most."""

_ASK = (
    "Sum up the conversation below so that it can go on from your summary alone. Keep what was asked for, what was "
    "decided and done, names, numbers and open points. Write the summary only."
)
_OPENING = "Summary of the conversation so far:"
RULES = frozenset({"system", "developer"})
"""Roles whose messages are never summed up: a summary has a user's authority."""

_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


class CompactBody(Wire):
    """A conversation that shall be summed up."""

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
    """What an item holds: a summary, and the items after the part that was summed up, which are as they were."""

    summary: str
    recent: tuple[Item, ...] = ()


def summary_request(
    messages: Iterable[Mapping[str, Any]], instructions: str | None, more: Mapping[str, Any]
) -> ChatBody:
    """The chat request that makes the summary of ``messages``; ``more`` are fields of it.

    Raises:
        ApiError: there is nothing to sum up.
    """
    said = as_text(messages)
    if not said:
        raise invalid("input must not be empty", "input")
    ask = _ASK if instructions is None else f"{_ASK}\n{instructions}"
    asked = {
        "messages": [{"role": "user", "content": f"{ask}\n\n<conversation>\n{said}\n</conversation>"}],
        "max_completion_tokens": SUMMARY_TOKENS,
        "temperature": 0.0,
    }
    return valid(ChatBody, asked | {name: value for name, value in more.items() if value is not None})


def as_text(messages: Iterable[Mapping[str, Any]]) -> str:
    """What was said, a line for each message and call; rules of the system are left out."""
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
    """The text of an answer that has ended, without its reasoning."""
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
    """What a compaction item holds.

    Raises:
        ApiError: the item was not made by this server's software.
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
        message = "input: a compaction item cannot be read: it holds an item that is none"
        raise ApiError(400, message, param="input", code="invalid_compaction") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, zlib.error) as error:
        message = f"input: a compaction item cannot be read: {error}"
        raise ApiError(400, message, param="input", code="invalid_compaction") from None
    return Compaction(summary, tuple(recent))


def opening_of(summary: str) -> str:
    """The text that begins what the user says next."""
    return f"{_OPENING}\n{summary}"
