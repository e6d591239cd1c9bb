"""A response as content blocks: thinking, text and tool calls, in the order in which the model wrote them.

The same code makes the events of a stream and the content of a whole response, so both always agree.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from typing import Any

from pydantic_core import from_json

from headrace.text.parsing.message import MessagePiece, new_id

Event = dict[str, Any]


class Content:
    """The content blocks of one message, while it grows. `add` and `finish` return the events of a stream."""

    def __init__(self) -> None:
        self._blocks: list[dict[str, Any]] = []  # each with its text or JSON so far under "parts"
        self._open = False
        self._blank = ""  # text that may turn out to be all white space, as between two calls

    def add(self, piece: MessagePiece) -> list[Event]:
        """The events for a piece of one kind."""
        events: list[Event] = []
        if piece.reasoning:
            self._begin(events, "thinking", {"thinking": "", "signature": ""})
            self._extend(events, "thinking_delta", "thinking", piece.reasoning)
        for call in piece.calls:
            if call.name is not None:
                self._close(events)
                self._start(events, {"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            if call.arguments:
                self._extend(events, "input_json_delta", "partial_json", call.arguments)
        if piece.content:
            self._text(events, piece.content)
        return events

    def finish(self) -> list[Event]:
        """The events that end the last block."""
        events: list[Event] = []
        if self._blank and not self._blocks:
            text, self._blank = self._blank, ""
            self._begin(events, "text", {"text": ""})
            self._extend(events, "text_delta", "text", text)
        self._close(events)
        return events

    def whole(self) -> list[dict[str, Any]]:
        """The content of the message."""
        return [_whole(dict(block)) for block in self._blocks]

    def _text(self, events: list[Event], text: str) -> None:
        if not (self._open and self._blocks[-1]["type"] == "text"):
            text, self._blank = self._blank + text, ""
            if not text.strip():
                self._blank = text
                return
            self._begin(events, "text", {"text": ""})
        self._extend(events, "text_delta", "text", text)

    def _begin(self, events: list[Event], kind: str, empty: dict[str, Any]) -> None:
        """Start a block unless one of the kind is open."""
        if not (self._open and self._blocks[-1]["type"] == kind):
            self._close(events)
            self._start(events, {"type": kind} | empty)

    def _start(self, events: list[Event], block: dict[str, Any]) -> None:
        events.append({"type": "content_block_start", "index": len(self._blocks), "content_block": block})
        self._blocks.append(block | {"parts": []})
        self._open, self._blank = True, ""

    def _extend(self, events: list[Event], delta: str, field: str, text: str) -> None:
        self._blocks[-1]["parts"].append(text)
        events.append(self._event("content_block_delta") | {"delta": {"type": delta, field: text}})

    def _close(self, events: list[Event]) -> None:
        if not self._open:
            return
        block = self._blocks[-1]
        if block["type"] == "thinking":
            block["signature"] = signature("".join(block["parts"]))
            signed = {"type": "signature_delta", "signature": block["signature"]}
            events.append(self._event("content_block_delta") | {"delta": signed})
        events.append(self._event("content_block_stop"))
        self._open = False

    def _event(self, kind: str) -> Event:
        return {"type": kind, "index": len(self._blocks) - 1}


def _whole(block: dict[str, Any]) -> dict[str, Any]:
    text = "".join(block.pop("parts"))
    if block["type"] == "tool_use":
        return block | {"input": tool_input(text)}
    return block | {block["type"]: text}


def tool_input(text: str) -> dict[str, Any]:
    """The arguments of a call as an object.

    Truncated arguments lose their incomplete end, as in Anthropic's clients. Text that is no JSON object is returned
    under ``INVALID_JSON``, the key that Anthropic uses for it.
    """
    if not text.strip():
        return {}
    try:
        found = from_json(text, allow_inf_nan=False, allow_partial=True)
    except ValueError:
        return {"INVALID_JSON": text}
    return found if isinstance(found, dict) else {"INVALID_JSON": text}


def signature(thinking: str) -> str:
    """A digest of a thinking block. Clients send a block back only with a signature; the server does not check it."""
    return base64.b64encode(hashlib.sha256(thinking.encode()).digest()).decode()


def call_id(short: bool) -> str:
    """A new id for a call in Anthropic's format; some templates require short ones."""
    return new_id(short) if short else f"toolu_{secrets.token_hex(12)}"
