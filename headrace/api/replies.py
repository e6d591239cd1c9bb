"""Responses to an API call: one JSON document, or server-sent events while it is generated.

Both cancel the call if the client disconnects, and both end the call in any case.

One call of Python's encoder holds the interpreter's lock until it returns, on any thread: a thousand tokens with 20
log-probabilities each take 100 ms. `pieces` writes a limited number of values in each call, so that other threads run
in between.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from json.encoder import encode_basestring
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from headrace.api.compile.call import Call, Choice, Delta
from headrace.api.errors import ApiError, failed, respond
from headrace.api.exchange import (
    COST_HEADER,
    DISCONNECTED,
    EXCHANGE,
    PARTS,
    SEND,
    ResponseParts,
    record_error,
)
from headrace.core.events import Emitted
from headrace.service.answer import IndexedEvent

encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode

_LINE_BREAKS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})

PIECE_VALUES = 4096
"""Maximum values, keys included, that one call of the encoder writes: about a millisecond."""

VALUE_CHARACTERS = 64
"""Characters of a text that count as one value."""


def encode_text(text: str) -> str:
    """A JSON string without characters that some clients treat as a line break."""
    shown = encode_basestring(text)
    return shown if shown.isascii() else shown.translate(_LINE_BREAKS)


def encode_lines(value: Any) -> str:
    """JSON of any value, without those characters."""
    return "".join([piece.translate(_LINE_BREAKS) for piece in pieces(value)])


def written(value: Any) -> bytes:
    """JSON of any value."""
    return b"".join([piece.encode() for piece in pieces(value)])


def pieces(value: Any) -> Iterator[str]:
    """The parts of a value's JSON. The encoder writes at most `PIECE_VALUES` values in each call."""
    if not is_long(value):
        yield encode(value)
    elif isinstance(value, dict):
        before = "{"
        for name, each in value.items():
            yield f"{before}{encode(name)}:"
            yield from pieces(each)
            before = ","
        yield "}"
    elif isinstance(value, (list, tuple)):
        yield "["
        yield from _entries(value)
        yield "]"
    else:
        yield '"'
        for at in range(0, len(value), PIECE_VALUES * VALUE_CHARACTERS // 2):
            yield encode(value[at : at + PIECE_VALUES * VALUE_CHARACTERS // 2])[1:-1]
        yield '"'


def _entries(values: Sequence[Any]) -> Iterator[str]:
    """The entries of a list that is not empty, without its brackets; long lists are halved."""
    if len(values) == 1:
        yield from pieces(values[0])
    elif not is_long(values):
        yield encode(values)[1:-1]
    else:
        half = len(values) // 2
        yield from _entries(values[:half])
        yield ","
        yield from _entries(values[half:])


def is_long(value: Any) -> bool:
    """Whether a value has more than `PIECE_VALUES` values."""
    room = PIECE_VALUES
    waiting = [value]
    while waiting:
        item = waiting.pop()
        room -= 1
        if isinstance(item, str):
            room -= len(item) // VALUE_CHARACTERS
        elif isinstance(item, (dict, list, tuple)):
            if len(item) > room:
                return True
            if isinstance(item, dict):
                room -= len(item)
                waiting += item.values()
            else:
                waiting += item
        if room < 0:
            return True
    return False


class WholeWriter(Protocol):
    """What `replies` needs for a response that is one JSON document."""

    def whole(self) -> bytes:
        """The whole answer."""


class AnswerWriter(WholeWriter, Protocol):
    """What `replies` needs of any dialect: the bytes of one call's response."""

    @property
    def writes_tokens(self) -> bool:
        """Whether a step is written even if it adds no text."""

    def around_text(self, choice: Choice) -> tuple[bytes, bytes] | None:
        """What is before and behind the JSON string of a text in each `chunk`; None if a chunk has more than a text."""

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


DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


def error_event(body: bytes) -> bytes:
    """An error after the first byte, and the end of the stream."""
    return b"data: " + body + b"\n\n" + DONE


WriterT = TypeVar("WriterT", bound=WholeWriter)

ResultT = TypeVar("ResultT")


logger = logging.getLogger(__name__)

PING_SECONDS = 5.0
"""Longest silence of a stream; shorter than the idle timeouts of common proxies."""


SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
"""Headers of every stream: proxies must pass each event on at once."""


CACHE_HEADER = "X-Headrace-Cache"


def _call_headers(call: Call) -> dict[str, str]:
    noted = {CACHE_HEADER: call.cache_note} if call.cache_note else {}
    return noted | dict(call.prompt_headers)


def _cost_header(call: Call) -> dict[str, str]:
    return cost_header(call.cost() if call.shows_cost else {})


def cost_header(cost: Mapping[str, Any]) -> dict[str, str]:
    """The header of a response with this ``cost`` and ``cost_details``; no header if it is empty."""
    return {COST_HEADER: f"{cost['cost']:.12f} {cost['cost_details']['currency']}"} if cost else {}


async def hung_up(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


def watched(scope: Scope, receive: Receive, gone: Callable[[], None]) -> Callable[[], object]:
    """Call ``gone`` when the client disconnects; returns what ends the watch.

    A connection of this server says so by itself. Elsewhere a task waits for the message.
    """
    parts: ResponseParts | None = scope.get(PARTS)
    if parts is not None:
        parts.watch(gone)
        return parts.unwatch

    async def watch() -> None:
        await hung_up(receive)
        gone()

    return asyncio.create_task(watch()).cancel


def writer_of(call: Call, make: Callable[[], WriterT]) -> WriterT:
    """The writer that ``make`` makes for a call; if it raises, the call is closed."""
    try:
        return make()
    except BaseException:
        call.close()
        raise


LARGE_TOKENS = 256
"""From so many tokens on, an answer is written on a thread: each may have 20 log-probabilities."""

FEW_TOKENS = 32
"""A step of a stream with fewer tokens is written on the event loop."""

PROMPT_TOKENS = 32
"""So many tokens of a prompt, which an answer may repeat, count as one."""


async def write_beside(call: Call, write: Callable[[], ResultT]) -> ResultT:
    """What ``write`` returns, which writes an answer of ``call``: on a thread if that would hold up the event loop."""
    tokens = sum(choice.output_tokens for choice in call.choices)
    tokens += sum(len(scores) for scores in call.prompt_scores)
    tokens += sum(len(prompt.tokens) for prompt in call.prompts) // PROMPT_TOKENS
    return write() if tokens < LARGE_TOKENS else await asyncio.to_thread(write)


class WholeAnswer(Response):
    """The response as one JSON document, sent when the call is complete."""

    def __init__(self, call: Call, writer: WholeWriter, headers: Mapping[str, str]) -> None:
        self._more_headers = headers
        self._call = call
        self._writer = writer
        self._gone = False
        self._error = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A call that is already complete does not wait, so there is no disconnect to watch for.
        unwatch = None if self._call.settled else watched(scope, receive, self._leave)
        try:
            response = await self._answer(scope)
        finally:
            if unwatch is not None:
                unwatch()
            self._call.close()
        if self._gone:
            record_error(scope, DISCONNECTED)
        else:
            if self._error:
                record_error(scope, self._error)
            sending, parts = response(scope, receive, send), scope.get(PARTS)
            await (sending if parts is None else parts.join(sending))

    async def _answer(self, scope: Scope) -> Response:
        try:
            while not self._call.done:
                await self._call.advance()
            headers = {**self._more_headers, **_call_headers(self._call), **_cost_header(self._call)}
            body = await write_beside(self._call, self._writer.whole)
            return Response(body, headers=headers, media_type="application/json")
        except ApiError as error:
            self._error = error.code or ""
            return respond(error, scope)
        except Exception:
            logger.exception("call failed", extra={"fields": {"id": self._call.id}})
            self._error = "server_error"
            return respond(failed(), scope)

    def _leave(self) -> None:
        self._gone = True
        self._call.close()


Grown = Sequence[tuple[Choice, Delta | None]]
"""Choices that have changed, each with what was added to it."""


def _is_short(grown: Grown) -> bool:
    """Whether a step of a stream is written on the event loop."""
    tokens = 0
    for _, delta in grown:
        if delta is not None:
            tokens += len(delta.tokens)
    return tokens < FEW_TOKENS


class StreamTurn:
    """Writes the events of a stream that has begun, step by step, until one of them needs its task.

    It runs for each token. With hundreds of streams the processor's caches hold none of a stream's objects when its
    next token comes, so the time is that of loading them: a token that only adds text touches few.
    """

    __slots__ = ("_answer", "_call", "_choice", "_events", "_head", "_parts", "_rest", "_tail")

    def __init__(
        self, call: Call, parts: ResponseParts, writer: AnswerWriter, events: Callable[[Grown], bytes]
    ) -> None:
        self._call = call
        self._answer = call.answer
        self._parts = parts
        self._events = events
        self._rest: asyncio.Future[Grown] | None = None
        self._choice: Choice | None = None
        self._head = self._tail = b""
        if len(call.choices) == 1 and call.choices[0].plain:
            around = writer.around_text(call.choices[0])
            if around is not None:
                self._choice, (self._head, self._tail) = call.choices[0], around

    async def until_long(self) -> Grown:
        """Write until a step is long, or the last, or the client reads late; return what it adds."""
        self._rest = rest = asyncio.get_running_loop().create_future()
        self._parts.update()
        self._answer.wakes(self)
        try:
            grown: Grown = await rest
            return grown
        finally:
            self._rest = None
            self._answer.wakes(None)

    def wake(self) -> None:
        """Events are due: write them when all of their step have arrived."""
        self._parts.soon(self)

    def turn(self) -> None:
        """Write what has arrived."""
        rest = self._rest
        if rest is None:
            return
        try:
            received, choice, parts = self._answer.take(), self._choice, self._parts
            if choice is not None and parts.ready and (tokens := plain_tokens(received)):
                if text := choice.plain_text(tokens):
                    parts.write(b"".join((self._head, encode_text(text).encode(), self._tail)))
                return
            call = self._call
            grown = [(each, each.gained()) for each in call.apply(received)]
            if call.done or not parts.ready or not _is_short(grown):
                self._rest = None
                rest.set_result(grown)
            elif events := self._events(grown):
                parts.write(events)
        except Exception as error:
            self._rest = None
            rest.set_exception(error)


def plain_tokens(received: Sequence[IndexedEvent]) -> tuple[int, ...]:
    """The tokens of events that are nothing but a few tokens; empty if they are more."""
    tokens: tuple[int, ...] = ()
    for _, event in received:
        if type(event) is not Emitted or event.logprobs:
            return ()
        tokens += event.tokens
    return tokens if len(tokens) < FEW_TOKENS else ()


class StreamedAnswer(Response):
    """The response as server-sent events, one write per step.

    The status is sent with the first token, so that an early error has its own status. Later errors are sent as events.
    ``ping`` returns what is sent during silence: a comment, which clients ignore, or an event of the API.
    """

    def __init__(
        self,
        call: Call,
        writer: AnswerWriter,
        headers: Mapping[str, str],
        ping: Callable[[], bytes] = lambda: PING,
    ) -> None:
        self._ping = ping
        self._more_headers = headers
        self._call = call
        self._writer = writer
        self._opened = False
        self._turns: StreamTurn | None = None
        self._ended_choices: set[int] = set()
        self._started = False
        self._quiet = True
        self._ended = False
        self._gone = False
        self._sent_before = 0
        self._pinging: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        self._send_part = scope.get(SEND, send)
        self._parts: ResponseParts | None = scope.get(PARTS)
        unwatch = watched(scope, receive, self._leave)
        self._timer = asyncio.get_running_loop().call_later(PING_SECONDS, self._look)
        try:
            await self._stream()
        except ApiError as error:
            await self._fail(error, scope, receive)
        except Exception:
            logger.exception("call failed", extra={"fields": {"id": self._call.id}})
            await self._fail(failed(), scope, receive)
        finally:
            unwatch()
            self._timer.cancel()
            if self._pinging is not None:
                self._pinging.cancel()
            self._call.close()
            if self._parts is not None and (exchange := scope.get(EXCHANGE)) is not None:
                exchange.sent_bytes += self._parts.sent
            if self._gone:
                record_error(scope, DISCONNECTED)

    async def _stream(self) -> None:
        call = self._call
        while not call.done:
            grown = await self._grown()
            last = call.done
            # One token takes microseconds. The beginning may repeat the prompt, and the end the whole answer.
            if self._opened and not last and _is_short(grown):
                events = self._events(grown, last)
            else:
                events = await write_beside(call, partial(self._events, grown, last))
            if events or last:
                await self._write(events, more=not last)

    async def _grown(self) -> Grown:
        """What the next events add. Those of a few tokens are written before, without a turn of this task."""
        if not self._opened or self._parts is None:
            return [(choice, choice.gained()) for choice in await self._call.advance()]
        if self._turns is None:
            self._turns = StreamTurn(self._call, self._parts, self._writer, self._events)
        return await self._turns.until_long()

    def _events(self, grown: Grown, last: bool = False) -> bytes:
        """The events of a step; ``last``: of the last one."""
        writer, events = self._writer, []
        for choice, delta in grown:
            if delta is not None and not (delta.text or (writer.writes_tokens and delta.tokens)):
                delta = None
            ends = choice.finish_reason is not None and choice.index not in self._ended_choices
            if not self._opened and (ends or delta is not None):
                events.append(writer.opening())
                self._opened = True
            if delta is not None:
                events.append(writer.chunk(choice, delta))
            if ends:
                self._ended_choices.add(choice.index)
                events.append(writer.ending(choice))
        if last:
            events.append(writer.closing())
        return b"".join(events)

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive) -> None:
        if self._gone:
            return
        record_error(scope, error.code)
        if self._started:
            await self._write(self._writer.failure(error), more=False)
        else:
            await respond(error, scope)(scope, receive, self._send)

    async def _write(self, data: bytes, more: bool = True) -> None:
        self._quiet = False
        self._ended = not more
        sent = {"type": "http.response.body", "body": data, "more_body": more}
        if self._started:
            await self._send_part(sent)
            return
        self._started = True
        sending = self._begin(sent)
        await (sending if self._parts is None else self._parts.join(sending))

    async def _begin(self, first: Message) -> None:
        given = {**SSE_HEADERS, **self._more_headers, **_call_headers(self._call)}
        headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in given.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send_part(first)

    def _look(self) -> None:
        """Write a ping if the stream has been silent since the last look."""
        before, self._sent_before = self._sent_before, 0 if self._parts is None else self._parts.sent
        if self._quiet and self._sent_before == before and not self._ended:
            self._pinging = asyncio.create_task(self._write(self._ping()))
        self._quiet = True
        self._timer = asyncio.get_running_loop().call_later(PING_SECONDS, self._look)

    def _leave(self) -> None:
        self._gone = True
        self._call.close()
