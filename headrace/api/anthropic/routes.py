"""The routes of Anthropic's Messages API, and what writes a call as its ``message``, whole or as events."""

from __future__ import annotations

import base64
import hashlib
import secrets
from typing import Any

from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.api.anthropic.conversation import chat_body, counted, tool_places
from headrace.api.anthropic.wire import CountBody, MessagesBody, error_body, refuse
from headrace.api.auth.access import Access
from headrace.api.body import beside, json_object, read_body, valid
from headrace.api.compile.call import NOTHING, Call, Choice, Delta, cost_of
from headrace.api.compile.encode import conversation_tokens
from headrace.api.compile.submit import open_chat
from headrace.api.errors import ApiError
from headrace.api.exchange import CALLER, Caller
from headrace.api.replies import PING, StreamedAnswer, WholeAnswer, encode_lines, writer_of, written
from headrace.api.routing import Endpoints, route
from headrace.api.serving import Serving
from headrace.api.wire import named
from headrace.text.parsing.machine import MessagePiece, MessageReader, new_id

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

    def around_text(self, choice: Choice) -> None:
        """An event of a text depends on those before it."""

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
        return written(self._message(self._content.whole(), *self._stop(choice)))

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
            "model": self._call.model_name,
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


NAMES = {
    "response_format": "output_config.format",
    "thinking_token_budget": "thinking.budget_tokens",
    "stop": "stop_sequences",
    "user": "metadata.user_id",
}
"""The fields of a chat request that have other names in this API."""


class Messages(Endpoints):
    """The endpoints."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._lookup, self._model = serving.lookup, serving.model

    @route(
        "POST /v1/messages",
        Access.INFERENCE,
        "Create a message, in Anthropic's format.",
        body=MessagesBody,
        example={
            "messages": [{"role": "user", "content": "Tell me a short story."}],
            "max_tokens": 200,
            "stream": True,
        },
    )
    async def create(self, request: Request) -> Response:
        self._lookup.expect()
        raw = await read_body(request, self._serving.max_body_bytes)
        call, writer, body = await self.open(raw, request.scope[CALLER])
        headers = self._serving.headers(call.tenant, call.model_name)
        return (
            StreamedAnswer(call, writer, headers, writer.ping)
            if body.stream
            else WholeAnswer(call, writer, headers)
        )

    async def open(self, raw: bytes, caller: Caller) -> tuple[Call, MessageWriter, MessagesBody]:
        """Submit a request for a message.

        Raises:
            ApiError: the request is invalid, or the server rejects it.
        """
        body = await beside(raw, lambda: valid(MessagesBody, refuse(json_object(raw))))
        self._model.check_name(body.model)
        chat = chat_body(self._model.dialect, body)
        if self._serving.recorder is not None:
            caller = self._serving.recorder.note_chat(chat, caller)
        with named(NAMES, tool_places):
            call = await open_chat(
                self._lookup,
                self._model,
                chat,
                caller,
                self._serving.request_timeout,
                id_prefix="msg_",
                shorten=True,
            )
        writer = writer_of(call, lambda: MessageWriter(call, body))
        self._serving.notes.put(call, None)
        return call, writer, body

    @route(
        "POST /v1/messages/count_tokens",
        Access.INFERENCE,
        "Count the tokens of a message request's prompt.",
        body=CountBody,
        example={"messages": [{"role": "user", "content": "Hello"}]},
    )
    async def count_tokens(self, request: Request) -> Response:
        """The tokens of a request's prompt."""
        raw = await read_body(request, self._serving.max_body_bytes)
        body = await beside(raw, lambda: valid(CountBody, refuse(json_object(raw))))
        self._model.check_name(body.model)
        caller: Caller = request.scope[CALLER]
        conversation = counted(self._model.dialect, body)
        tokens = await conversation_tokens(self._model, conversation, caller.tenant())
        return JSONResponse({"input_tokens": len(tokens)})
