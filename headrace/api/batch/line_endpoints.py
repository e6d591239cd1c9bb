"""The endpoints that run lines of batches: those that generate, and those of embedding models."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from starlette.types import Message

from headrace.api.anthropic.routes import Messages
from headrace.api.batch.line_runner import OpenedLine, Turn
from headrace.api.caller import Caller
from headrace.api.compile.bodies import CHAT, COMPLETIONS, ChatBody, CompletionBody
from headrace.api.compile.call import Answers, Call
from headrace.api.compile.fields import Generation
from headrace.api.compile.model import ServedModel
from headrace.api.compile.stages import open_chat, open_completion
from headrace.api.embedding.calls import PoolingCall, PoolingCalls
from headrace.api.embedding.exchange import compute
from headrace.api.errors import invalid
from headrace.api.openai.writers import ChatWriter, CompletionWriter, Writer
from headrace.api.replies import WholeWriter, writer_of
from headrace.api.responses.routes import ResponsesApi
from headrace.api.responses.wire import RESPONSES, ResponsesBody
from headrace.api.serving import CallNotes
from headrace.api.wire import NotYet, parse_beside
from headrace.response_cache.lookup import CacheLookup


class Endpoint(NamedTuple):
    """How one endpoint parses a body, opens a call, and writes its response."""

    form: type[Generation]
    not_yet: NotYet
    open: Callable[[Answers, ServedModel, Any, Caller, float], Awaitable[Call]]
    writer: Callable[[Call, Any], Writer]


OPENED: Mapping[str, Endpoint] = {
    "/v1/chat/completions": Endpoint(ChatBody, CHAT, open_chat, ChatWriter),
    "/v1/completions": Endpoint(CompletionBody, COMPLETIONS, open_completion, CompletionWriter),
}


class GeneratedLines:
    """A `line_runner.LineEndpoints`; ``request_timeout`` ends lines that run in another class than background."""

    paths = tuple(OPENED)

    def __init__(
        self, recall: CacheLookup, model: ServedModel, notes: CallNotes, *, request_timeout: float
    ) -> None:
        self._recall = recall
        self._model = model
        self._notes = notes
        self._request_timeout = request_timeout

    async def open(self, path: str, raw: bytes, caller: Caller) -> OpenedLine:
        """See `line_runner.LineEndpoints`."""
        endpoint = OPENED[path]
        body = await parse_beside(raw, endpoint.form, endpoint.not_yet)
        self._model.check_name(body.model)
        call = await endpoint.open(self._recall, self._model, body, caller, self._request_timeout)
        writer = writer_of(call, lambda: endpoint.writer(call, body))
        self._notes.put(call, body.metadata)
        return _GeneratedLine(call, writer)


class _GeneratedLine:
    def __init__(self, call: Call, writer: WholeWriter) -> None:
        self._call = call
        self._writer = writer

    async def answer(self, turn: Turn) -> bytes:
        call = self._call
        while not call.settled:
            await call.due()
            if not call.settled:  # events before the end: each token is searched for a stop string
                await call.advance()
        async with turn:
            while not call.done:
                await call.advance()
            return self._writer.whole()

    def close(self) -> None:
        self._call.close()


class ResponsesLines:
    """A `line_runner.LineEndpoints` of the Responses API. Responses are stored as those of requests are."""

    paths = ("/v1/responses",)

    def __init__(self, api: ResponsesApi) -> None:
        self._api = api

    async def open(self, path: str, raw: bytes, caller: Caller) -> OpenedLine:
        """See `line_runner.LineEndpoints`."""
        body = await parse_beside(raw, ResponsesBody, RESPONSES)
        if body.background:
            raise invalid("background cannot be used in a batch", "background")
        opened = await self._api.open(body, caller, _no_disconnect)
        return _ResponseLine(self._api, opened.call, opened.writer)


class _ResponseLine(_GeneratedLine):
    def __init__(self, api: ResponsesApi, call: Call, writer: WholeWriter) -> None:
        super().__init__(call, writer)
        self._api = api

    async def answer(self, turn: Turn) -> bytes:
        written = await super().answer(turn)
        await self._api.written()
        return written


async def _no_disconnect() -> Message:
    """The next message of a client that stays: none."""
    return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]


class MessagesLines:
    """A `line_runner.LineEndpoints` of Anthropic's Messages API."""

    paths = ("/v1/messages",)

    def __init__(self, api: Messages) -> None:
        self._api = api

    async def open(self, path: str, raw: bytes, caller: Caller) -> OpenedLine:
        """See `line_runner.LineEndpoints`."""
        call, writer, _ = await self._api.open(raw, caller)
        return _GeneratedLine(call, writer)


class PooledLines:
    """A `line_runner.LineEndpoints` of embedding models; ``request_timeout`` ends a line."""

    def __init__(self, calls: PoolingCalls, *, request_timeout: float) -> None:
        self._calls = calls
        self._request_timeout = request_timeout

    @property
    def paths(self) -> Sequence[str]:
        """The endpoints that have a model."""
        return self._calls.paths

    async def open(self, path: str, raw: bytes, caller: Caller) -> OpenedLine:
        """See `line_runner.LineEndpoints`."""
        call = await self._calls.prepare(path, raw, caller)
        return _PooledLine(self._calls, call, self._request_timeout)


class _PooledLine:
    def __init__(self, calls: PoolingCalls, call: PoolingCall, seconds: float) -> None:
        self._calls = calls
        self._call = call
        self._seconds = seconds

    async def answer(self, turn: Turn) -> bytes:
        values = await compute(self._calls.worker, self._call, self._seconds)
        async with turn:
            return await self._call.document(values)

    def close(self) -> None:
        """Do nothing: `compute` cleans up after itself."""
