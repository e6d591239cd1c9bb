"""Responses to an API call: one JSON document, or server-sent events while it is generated.

Both cancel the call if the client disconnects, and both end the call in any case.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.api.caller import COST_HEADER
from headrace.api.compile.call import Call, Choice, Delta
from headrace.api.errors import ApiError, failed, respond
from headrace.api.exchange import DISCONNECTED, EXCHANGE, PARTS, SEND, Exchange, ResponseParts, record_error


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


SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
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
        watch = None if self._call.settled else asyncio.create_task(self._watch(receive))
        try:
            response = await self._answer(scope)
        finally:
            if watch is not None:
                watch.cancel()
            self._call.close()
        if self._gone:
            record_error(scope, DISCONNECTED)
        else:
            if self._error:
                record_error(scope, self._error)
            await response(scope, receive, send)

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

    async def _watch(self, receive: Receive) -> None:
        await hung_up(receive)
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
        self._scheduled = False
        self._ended_choices: set[int] = set()
        self._started = False
        self._quiet = True
        self._ended = False
        self._gone = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        self._send_part = scope.get(SEND, send)
        self._parts: ResponseParts | None = scope.get(PARTS)
        self._exchange: Exchange | None = scope.get(EXCHANGE)
        watch = asyncio.create_task(self._watch(receive))
        try:
            # In its own task, so that a token wakes only that task and none of the layers around it.
            await asyncio.create_task(self._stream())
        except ApiError as error:
            await self._fail(error, scope, receive)
        except Exception:
            logger.exception("call failed", extra={"fields": {"id": self._call.id}})
            await self._fail(failed(), scope, receive)
        finally:
            watch.cancel()
            self._call.close()
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
        self._rest: asyncio.Future[Grown] = asyncio.get_running_loop().create_future()
        self._call.when_due(partial(self._soon, self._parts))
        try:
            return await self._rest
        finally:
            self._call.when_due(None)

    def _soon(self, parts: ResponseParts) -> None:
        """Events are due: write them when all of their step have arrived."""
        if not self._scheduled:
            self._scheduled = True
            parts.soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        if self._rest.done():
            return
        try:
            grown = [(choice, choice.gained()) for choice in self._call.take()]
            parts = self._parts
            if self._call.done or parts is None or not parts.ready or not _is_short(grown):
                self._rest.set_result(grown)
            elif events := self._events(grown, False):
                self._quiet = False
                if self._exchange is not None:
                    self._exchange.sent_bytes += len(events)
                parts.write(events)
        except Exception as error:
            self._rest.set_exception(error)

    def _events(self, grown: Grown, last: bool) -> bytes:
        """The events of a step; ``last``: of the last one."""
        writer = self._writer
        if self._opened and not last and len(grown) == 1:  # the common case: one token's text
            ((choice, delta),) = grown
            if choice.finish_reason is None and delta is not None and delta.text:
                return writer.chunk(choice, delta)
        events = []
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
        if not self._started:
            self._started = True
            headers = {**SSE_HEADERS, **self._more_headers, **_call_headers(self._call)}
            head = Response(media_type="text/event-stream", headers=headers)
            del head.headers["content-length"]
            await self._send({"type": "http.response.start", "status": 200, "headers": head.raw_headers})
        await self._send_part({"type": "http.response.body", "body": data, "more_body": more})

    async def _watch(self, receive: Receive) -> None:
        gone = asyncio.ensure_future(hung_up(receive))
        try:
            while not (await asyncio.wait([gone], timeout=PING_SECONDS))[0]:
                if self._quiet and not self._ended:
                    await self._write(self._ping())
                self._quiet = True
        finally:
            gone.cancel()
        self._gone = True
        self._call.close()
