"""Writes a call as a response: one JSON document, or numbered server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from headrace.api.compile.call import NOTHING, Call, Choice, Delta
from headrace.api.errors import ApiError
from headrace.api.exchange import SEND
from headrace.api.logprobs import chat_logprobs
from headrace.api.replies import DONE, encode_lines, written
from headrace.api.responses.items import Stored, compaction_item, new_id, summary_of
from headrace.api.responses.output import (
    Compacted,
    Event,
    Output,
    ResponseObject,
    Result,
    added,
    joined,
    response_of,
    slices,
    usage_of,
)
from headrace.api.responses.store import EventLog
from headrace.api.responses.wire import ResponsesBody, offered
from headrace.text.parsing.machine import MessagePiece


class ResponseWriter:
    """Writes one call. ``keep`` stores the response object when its status has changed; None: it is not stored.

    ``log`` receives the events of a stream, the last one before ``keep`` is called. ``compacted`` is the compaction
    that was made for this response.
    """

    def __init__(
        self,
        call: Call,
        body: ResponsesBody,
        keep: Callable[[ResponseObject], Future[bool]] | None,
        log: EventLog | None = None,
        compacted: Compacted | None = None,
    ) -> None:
        self._call = call
        self._compacted = compacted
        self._body = body
        self._keep = keep
        self._log = log
        self._output = Output({spelling.flat: spelling for spelling, _ in offered(body.tools or ())})
        self._given = [] if compacted is None else self._output.put(compacted.item)
        reading = call.prompts[0].reading
        self._reader = None if reading is None else reading.open()
        self._number = 0
        self._stored: Future[bool] | None = None
        self._final: tuple[bytes, Callable[[ResponseObject], bytes], ResponseObject] | None = None

    @property
    def writes_tokens(self) -> bool:
        """Whether a step is written even if it adds no text."""
        return self._reader is not None or self._body.logprobs

    def response(self, status: str) -> ResponseObject:
        """The response object of a call that has not ended."""
        return response_of(self._call, self._body, Result(status))

    def queued(self) -> None:
        """Log that a background response is queued."""
        response = self.response("queued")
        self._write(
            [{"type": name, "response": response} for name in ("response.created", "response.queued")]
        )

    def began(self) -> None:
        """Record that a background response has begun."""
        response = self.response("in_progress")
        if self._log is not None:
            self._write([{"type": "response.in_progress", "response": response}])
        self._put(response)

    def around_text(self, choice: Choice) -> None:
        """An event of a text depends on those before it."""

    def opening(self) -> bytes:
        """The first events."""
        response = self.response("in_progress")
        begun = [
            {"type": name, "response": response} for name in ("response.created", "response.in_progress")
        ]
        return self._write(begun + self._given)

    def chunk(self, choice: Choice, delta: Delta) -> bytes:
        """The events of what a step adds."""
        return self._write(self._read(choice, delta))

    def ending(self, choice: Choice) -> bytes:
        """The events that close the last item."""
        return self._write(self._finish(choice))

    def closing(self) -> bytes:
        """The last event, with the whole response."""
        return self._last(self._end()) + DONE

    def failure(self, error: ApiError, status: str = "failed") -> bytes:
        """The events of an error after the first byte."""
        self._output.finish(status)
        return self._last(self._failed(error, status)) + DONE

    def _last(self, response: ResponseObject) -> bytes:
        number, name = self._number, f"response.{response['status']}"
        events = self._write([{"type": name, "response": response}])
        if self._log is not None:
            self._log.end()
        self._put(response)
        self._final = events, lambda other: _event(name, number, {"type": name, "response": other}), response
        return events

    def whole(self) -> bytes:
        """The whole response as JSON."""
        response = self.complete()
        body = written(response)
        self._final = body, written, response
        return body

    async def truly(self, body: bytes) -> bytes:
        """The last part of a written response, corrected to ``"store": false`` if it could not be stored."""
        if self._stored is None or await asyncio.wrap_future(self._stored) or self._final is None:
            return body
        last, write, response = self._final
        other = await asyncio.to_thread(write, response | {"store": False})
        return body.replace(last, other)

    def complete(self) -> ResponseObject:
        """The whole response of a call that has ended."""
        (choice,) = self._call.choices
        self._read(choice, choice.gained() or NOTHING)
        self._finish(choice)
        response = self._end()
        self._put(response)
        return response

    def failed(self, error: ApiError, status: str) -> ResponseObject:
        """The response of a call that an error has ended."""
        response = self._failed(error, status)
        self._put(response)
        return response

    def _put(self, response: ResponseObject) -> None:
        if self._keep is not None:
            self._stored = self._keep(response)

    def _failed(self, error: ApiError, status: str) -> ResponseObject:
        shown = None if status == "cancelled" else error
        return response_of(self._call, self._body, Result(status, self._output.items, None, None, shown))

    def _end(self) -> ResponseObject:
        used = usage_of(self._call)
        if self._compacted is not None:
            used = added(used, self._compacted.usage)
        result = Result(self._status(), self._output.items, used, int(time.time()))
        return response_of(self._call, self._body, result)

    def _status(self) -> str:
        return "incomplete" if self._call.choices[0].finish_reason == "length" else "completed"

    def _read(self, choice: Choice, delta: Delta) -> list[Event]:
        reader = self._reader
        if reader is None:
            events = self._output.add(MessagePiece(content=delta.text))
        else:
            events = []
            texts = delta.texts
            for text in slices(delta.text):
                events += self._output.add(reader.push(text, texts))
                texts = ()
            events = joined(events)
            choice.reasoning_tokens = reader.reasoning_tokens
        if self._body.logprobs and delta.logprobs:
            top = self._body.top_logprobs or 0
            self._output.score(chat_logprobs(self._call.model, delta.logprobs, top)["content"], events)
        return events

    def _finish(self, choice: Choice) -> list[Event]:
        events: list[Event] = []
        if self._reader is not None:
            events = self._output.add(self._reader.finish())
            choice.reasoning_tokens = self._reader.reasoning_tokens
        return events + self._output.finish(self._status())

    def _write(self, events: list[Event]) -> bytes:
        shown = []
        for event in events:
            name = event["type"]
            shown.append(_event(name, self._number, event))
            self._number += 1
            if self._log is not None:
                self._log.append(shown[-1])
        return b"".join(shown)


def _event(name: str, number: int, event: Event) -> bytes:
    numbered = {"type": name, "sequence_number": number} | event
    return f"event: {name}\ndata: {encode_lines(numbered)}\n\n".encode()


class CompactionWriter:
    """Writes a call that summarizes a conversation: its ``rules`` unchanged, and an item with the summary."""

    def __init__(self, call: Call, rules: Sequence[Stored]) -> None:
        self._call = call
        self._rules = rules

    def whole(self) -> bytes:
        """The compacted conversation."""
        item = compaction_item(summary_of(self._call), new_id("cmp"))
        shown = {
            "id": self._call.id,
            "object": "response.compaction",
            "created_at": self._call.created,
            "output": [*self._rules, item],
            "usage": usage_of(self._call),
        }
        return written(shown)


class KeptAnswer(Response):
    """A response whose last part is sent once it is known whether the response of ``writer`` is stored."""

    def __init__(self, answer: Response, writer: ResponseWriter) -> None:
        self._answer = answer
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope = {**scope, SEND: self._waiting(scope.get(SEND, send))}
        await self._answer(scope, receive, self._waiting(send))

    def _waiting(self, send: Send) -> Send:
        held: list[Message] = []  # the head of a whole response, which has the length of its body

        async def forward(message: Message) -> None:
            if message["type"] == "http.response.start" and "content-length" in MutableHeaders(scope=message):
                held.append(message)
                return
            if message["type"] == "http.response.body" and not message.get("more_body"):
                body = await self._writer.truly(message.get("body", b""))
                message = {**message, "body": body}
                for head in held:
                    MutableHeaders(scope=head)["content-length"] = str(len(body))
                    await send(head)
            await send(message)

        return forward
