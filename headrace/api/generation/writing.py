"""Writes calls as JSON: what chat and completions have in common, optimized for streams.

A stream writes a chunk per step and request, thousands of times a second. So the constant parts are encoded once per
choice, and a chunk only joins byte strings.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from json.encoder import encode_basestring
from typing import Any, ClassVar, Protocol

from headrace.api.errors import ApiError
from headrace.api.generation.call import Call
from headrace.api.generation.choices import Choice, Delta
from headrace.api.generation.fields import Generation

encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode

_LINE_BREAKS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def encode_text(text: str) -> str:
    """A JSON string without characters that some clients treat as a line break."""
    shown = encode_basestring(text)
    return shown if shown.isascii() else shown.translate(_LINE_BREAKS)


def encode_lines(value: Any) -> str:
    """JSON of any value, without those characters."""
    return encode(value).translate(_LINE_BREAKS)


class WholeWriter(Protocol):
    """What `replies` needs for a response that is one JSON document."""

    def whole(self) -> bytes:
        """The whole answer."""


class AnswerWriter(WholeWriter, Protocol):
    """What `replies` needs of any dialect: the bytes of one call's response."""

    @property
    def writes_tokens(self) -> bool:
        """Whether a step is written even if it adds no text."""

    def opening(self) -> bytes:
        """The beginning of a stream."""

    def chunk(self, choice: Choice, delta: Delta) -> bytes:
        """What a step adds to a choice."""

    def ending(self, choice: Choice) -> bytes:
        """The end of a choice."""

    def closing(self) -> bytes:
        """The end of the stream."""

    def failure(self, error: ApiError) -> bytes:
        """An error after the first byte, and the end of the stream."""


class Writer(ABC):
    """Writes one call in the form of chat and completions, whole or as a stream of server-sent events."""

    object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, call: Call, body: Generation) -> None:
        self._call = call
        self._token_ids = bool(body.return_token_ids)
        self._asked = body.kv_transfer_params
        options = body.stream_options
        self._include_usage = options is not None and options.include_usage
        self._continuous_usage = (
            self._include_usage and options is not None and options.continuous_usage_stats
        )
        self._tail = b"]}\n\n" if not self._include_usage else b'],"usage":null}\n\n'
        self._head: dict[str, Any] = {
            "id": call.id,
            "object": self.object,
            "created": call.created,
            "model": call.model.name,
            "system_fingerprint": call.model.fingerprint,
        }
        if body.service_tier is not None:
            self._head["service_tier"] = call.service_class
        self._stream_head = encode(self._head | {"object": self.chunk_object})[:-1]
        self._choice_heads = [
            f'data: {self._stream_head},"choices":[{{"index":{choice.index},'.encode()
            for choice in call.choices
        ]

    @property
    @abstractmethod
    def writes_tokens(self) -> bool:
        """Whether a step is written even if it adds no text."""

    @abstractmethod
    def opening(self) -> bytes:
        """The beginning of a stream."""

    @abstractmethod
    def chunk(self, choice: Choice, delta: Delta) -> bytes:
        """What a step adds to a choice."""

    @abstractmethod
    def ending(self, choice: Choice) -> bytes:
        """The chunk with a choice's finish reason."""

    @abstractmethod
    def choices(self) -> list[dict[str, Any]]:
        """The ``choices`` of a whole response, once all have ended."""

    def closing(self) -> bytes:
        """The chunk with the usage of the whole call, if it was requested, and the end of the stream."""
        usage = b""
        if self._include_usage:
            usage = (
                f'data: {self._stream_head},"choices":[],"usage":{encode(self._call.usage())}}}\n\n'.encode()
            )
        return usage + DONE

    def failure(self, error: ApiError) -> bytes:
        """An error after the first byte, and the end of the stream."""
        return error_event(error.body())

    def whole(self) -> bytes:
        """The whole answer."""
        return encode(
            self._head | {"choices": self.choices(), "usage": self._call.usage()} | self._extra()
        ).encode()

    def _extra(self) -> dict[str, Any]:
        """Further fields of a whole response."""
        return self._call.model.sharing.answer(self._asked)

    def _event(self, choice: Choice, inner: str) -> bytes:
        """The chunk of one choice, whose object ends with ``inner``."""
        tail = self._tail
        if self._continuous_usage:
            tail = f'],"usage":{encode(self._call.usage())}}}\n\n'.encode()
        return b"".join((self._choice_heads[choice.index], inner.encode(), b"}", tail))


DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


def error_event(body: bytes) -> bytes:
    """An error after the first byte, and the end of the stream."""
    return b"data: " + body + b"\n\n" + DONE
