"""Writes a call as Anthropic's ``message``, whole or as events."""

from __future__ import annotations

from typing import Any

from headrace.api.anthropic.content import Content, Event, call_id
from headrace.api.anthropic.errors import error_body
from headrace.api.anthropic.wire import MessagesBody
from headrace.api.errors import ApiError
from headrace.api.generation.call import Call
from headrace.api.generation.choices import NOTHING, Choice, Delta
from headrace.api.generation.usage import cost_of
from headrace.api.generation.writing import PING, encode, encode_lines
from headrace.text.parsing.message import MessagePiece, MessageReader


class MessageWriter:
    """Writes the only choice of a call."""

    def __init__(self, call: Call, body: MessagesBody) -> None:
        self._call = call
        self._max_tokens = body.max_tokens
        reading = call.prompts[0].reading
        self._reader = None if reading is None else MessageReader(reading, call_id)
        self._content = Content()
        self._opened = False

    @property
    def writes_tokens(self) -> bool:
        """Whether a step is written even if it adds no text."""
        return self._reader is not None

    def opening(self) -> bytes:
        """The event ``message_start``; the prompt's usage is known by now."""
        self._opened = True
        message = self._message([], None, None)
        return _event({"type": "message_start", "message": message})

    def chunk(self, choice: Choice, delta: Delta) -> bytes:
        """What a step adds."""
        return b"".join([_event(event) for event in self._add(choice, delta)])

    def ending(self, choice: Choice) -> bytes:
        """The end of the last block, and ``message_delta``."""
        events = self._finish()
        reason, sequence = self._stop(choice)
        ended = {"stop_reason": reason, "stop_sequence": sequence}
        events.append({"type": "message_delta", "delta": ended, "usage": self._usage()})
        return b"".join([_event(event) for event in events])

    def closing(self) -> bytes:
        """The end of the stream."""
        return _event({"type": "message_stop"})

    def whole(self) -> bytes:
        """The whole message."""
        (choice,) = self._call.choices
        self._add(choice, choice.gained() or NOTHING)
        self._finish()
        return encode(self._message(self._content.whole(), *self._stop(choice))).encode()

    def ping(self) -> bytes:
        """What is sent during silence. The first event must be ``message_start``, so before it, it is a comment."""
        return _event({"type": "ping"}) if self._opened else PING

    def failure(self, error: ApiError) -> bytes:
        """An error after the first byte, and the end of the stream."""
        return b"event: error\ndata: " + error_body(error)[1] + b"\n\n"

    def _add(self, choice: Choice, delta: Delta) -> list[Event]:
        if self._reader is None:
            pieces = [MessagePiece(delta.text)]
        else:
            pieces = self._reader.push_in_order(delta.text, delta.texts)
            choice.reasoning_tokens = self._reader.reasoning_tokens
        return [event for piece in pieces for event in self._content.add(piece)]

    def _finish(self) -> list[Event]:
        pieces = [] if self._reader is None else self._reader.finish_in_order()
        events = [event for piece in pieces for event in self._content.add(piece)]
        return events + self._content.finish()

    def _stop(self, choice: Choice) -> tuple[str, str | None]:
        """``stop_reason`` and ``stop_sequence``."""
        if isinstance(choice.stop_reason, str):
            return "stop_sequence", choice.stop_reason
        if choice.finish_reason == "length":
            room = choice.output_tokens >= self._max_tokens
            return "max_tokens" if room else "model_context_window_exceeded", None
        called = self._reader is not None and self._reader.calls > 0
        return "tool_use" if called else "end_turn", None

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, sequence: str | None
    ) -> dict[str, Any]:
        return {
            "id": self._call.id,
            "type": "message",
            "role": "assistant",
            "model": self._call.model.name,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": self._usage() | {"service_tier": _tier(self._call.service_class)},
        }

    def _usage(self) -> dict[str, Any]:
        """The usage of the call so far.

        Anthropic's ``input_tokens`` counts those after the last ``cache_control``; with the tokens read from and
        written to the cache it adds up to the prompt.
        """
        used = self._call.usage()
        prompt = self._call.prompts[0]
        read = used["prompt_tokens_details"]["cached_tokens"]
        marked = max([each.end or 0 for each in prompt.retention], default=0)
        created = max(0, marked - read)
        return {
            "input_tokens": used["prompt_tokens"] - read - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": read,
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {
                "thinking_tokens": used["completion_tokens_details"]["reasoning_tokens"]
            },
        } | cost_of(used)


def _tier(service_class: str) -> str:
    """The service class as one of Anthropic's two tiers."""
    return "priority" if service_class == "priority" else "standard"


def _event(event: Event) -> bytes:
    return f"event: {event['type']}\ndata: {encode_lines(event)}\n\n".encode()
