"""Compaction: the served model sums up a conversation, and the summary stands for the conversation from then on.

The item is opaque to clients and not secret: it is the encoded summary, which the client could read. So it needs no
key, works on every server and outlives a restart.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import Field

from headrace.serve.http.errors import ApiError, invalid
from headrace.serve.http.openai.chat_wire import ChatBody
from headrace.serve.http.responses.input_wire import Id, Input
from headrace.serve.http.wire import Wire, valid

PREFIX = "hr1_"
"""Begins every item of this form."""

MAX_SUMMARY_CHARACTERS = 200_000
SUMMARY_TOKENS = 1024
"""Tokens of a summary at most."""

_ASK = (
    "Sum up the conversation below so that it can go on from your summary alone. Keep what was asked for, what was "
    "decided and done, names, numbers and open points. Write the summary only."
)
_OPENING = "Summary of the conversation so far:"


class CompactBody(Wire):
    """A conversation that shall be summed up."""

    model: str = Field(description="The served model.")
    input: Input | None = Field(None, description="A text, or items.")
    previous_response_id: Id | None = Field(
        None, description="The stored response at the conversation's end."
    )
    instructions: str | None = Field(None, description="Further instructions for the summary.")
    prompt_cache_key: str | None = Field(None, max_length=512)
    request_id: str | None = Field(None, pattern=r"^[A-Za-z0-9._:-]{1,128}$")


def summary_request(body: CompactBody, messages: Iterable[Mapping[str, Any]]) -> ChatBody:
    """The chat request that makes the summary of ``messages``.

    Raises:
        ApiError: there is nothing to sum up.
    """
    said = [line for message in messages for line in _lines(message)]
    if not said:
        raise invalid("input must not be empty", "input")
    ask = _ASK if body.instructions is None else f"{_ASK}\n{body.instructions}"
    asked = {
        "messages": [
            {"role": "user", "content": f"{ask}\n\n<conversation>\n" + "\n".join(said) + "\n</conversation>"}
        ],
        "max_completion_tokens": SUMMARY_TOKENS,
        "temperature": 0.0,
    }
    for name in ("prompt_cache_key", "request_id"):
        if getattr(body, name) is not None:
            asked[name] = getattr(body, name)
    return valid(ChatBody, asked)


def _lines(message: Mapping[str, Any]) -> Iterable[str]:
    content = message.get("content") or ""
    text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
    if text:
        yield f"{message['role']}: {text}"
    for call in message.get("tool_calls", ()):
        yield f"{message['role']} calls {call['function']['name']} with {call['function']['arguments']}"


def compaction_item(summary: str, id: str) -> dict[str, Any]:
    """The item that holds ``summary``."""
    packed = zlib.compress(json.dumps({"summary": summary}).encode())
    return {
        "type": "compaction",
        "id": id,
        "encrypted_content": PREFIX + base64.urlsafe_b64encode(packed).decode(),
    }


def summary_message(content: str) -> str:
    """The text that stands for what a compaction item has summed up.

    Raises:
        ApiError: the item was not made by this server's software.
    """
    try:
        if not content.startswith(PREFIX):
            raise ValueError("another server made it")
        packed = base64.b64decode(content.removeprefix(PREFIX), altchars=b"-_", validate=True)
        reader = zlib.decompressobj()
        text = reader.decompress(packed, MAX_SUMMARY_CHARACTERS * 6)
        if not reader.eof:
            raise ValueError("it is cut off or too long")
        summary = json.loads(text)["summary"]
        if not isinstance(summary, str):
            raise ValueError("it holds no text")
    except (ValueError, KeyError, TypeError, binascii.Error, zlib.error) as error:
        message = f"input: a compaction item cannot be read: {error}"
        raise ApiError(400, message, param="input", code="invalid_compaction") from None
    return f"{_OPENING}\n{summary}"
