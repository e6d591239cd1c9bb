"""Runs lines of batches on this server's endpoints, below other requests and without connections.

A line is parsed, rendered and written by the same code as a request: by the endpoints of each API at the end of this
file. Its beginning and its end each
take a millisecond or more of the event loop, and lines often end together. So they take turns: one at a time, only
while no request of another class is open, and with a pause in which the loop reads its sockets. Near the end of the
completion window, lines run in the class flex and do not wait.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

from pydantic_core import from_json

from headrace.api.anthropic.routes import Messages
from headrace.api.batch.lines import ENDPOINTS, BatchRequest
from headrace.api.batch.runs import Busy, Reply
from headrace.api.body import beside, parse_beside
from headrace.api.compile.bodies import CHAT, COMPLETIONS, ChatBody, CompletionBody
from headrace.api.compile.call import Answers, Call
from headrace.api.compile.fields import Generation
from headrace.api.compile.model import ServedModel
from headrace.api.compile.submit import open_chat, open_completion
from headrace.api.embedding.calls import PoolingCall, PoolingCalls, compute
from headrace.api.errors import ApiError, failed, invalid, route_not_found
from headrace.api.exchange import Caller
from headrace.api.openai.writers import ChatWriter, CompletionWriter, Writer
from headrace.api.replies import WholeWriter, write_beside, writer_of
from headrace.api.responses.routes import ResponsesApi
from headrace.api.responses.wire import RESPONSES, ResponsesBody
from headrace.api.serving import CallNotes
from headrace.api.wire import NotYet
from headrace.core.constraint import UnusableConstraint, json_text
from headrace.core.request import InvalidParameter
from headrace.core.tenancy.tenants import is_awaited
from headrace.response_cache.lookup import CacheLookup
from headrace.service.service import Service

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.01
"""Interval of the check whether other requests have ended."""

PAUSE_SECONDS = 0.001
"""Pause before each turn, so that a request that arrived during the previous turn is read and runs first."""

BUSY = frozenset({429, 503})

Turn = AbstractAsyncContextManager[object]
"""A context that is entered when the event loop may work for a line."""


class OpenedLine(Protocol):
    """A line that has been submitted; `close` it, whatever happens."""

    async def answer(self, turn: Turn) -> bytes:
        """The body of its response, which is written within ``turn``.

        Raises:
            ApiError: the line was rejected or has failed.
        """
        ...

    def close(self) -> None:
        """Cancel the line if it has not ended."""
        ...


class LineEndpoints(Protocol):
    """Endpoints that run lines."""

    @property
    def paths(self) -> Sequence[str]: ...

    async def open(self, path: str, raw: bytes, caller: Caller) -> OpenedLine:
        """Parse and submit the body ``raw`` of a line for ``path``.

        Raises:
            ApiError: the line is invalid, or the server rejects it.
            InvalidParameter: a parameter is invalid.
        """
        ...


class _Turns:
    """One turn at a time, and none while a request of another class is open in ``service``."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> None:
        await self._lock.acquire()
        try:
            await asyncio.sleep(PAUSE_SECONDS)
            while self._service.awaited:
                await asyncio.sleep(LOOK_SECONDS)
        except BaseException:
            self._lock.release()
            raise

    async def __aexit__(self, *error: object) -> None:
        self._lock.release()


class LineRunner:
    """A `batch.runs.Port` over the endpoints of ``parts``."""

    def __init__(self, service: Service, parts: Sequence[LineEndpoints]) -> None:
        self._service = service
        self._parts = {path: part for part in parts for path in part.paths}
        self._turns = _Turns(service)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The endpoints that batches on this server may use."""
        return tuple(path for path in ENDPOINTS if path in self._parts)

    def draining(self) -> bool:
        """Whether the server is shutting down."""
        return self._service.draining

    async def run(self, line: BatchRequest, tenant: str, service_class: str) -> Reply:
        """Run one line.

        Raises:
            Busy: the server rejects it for now.
            ConnectionError: the engine has failed.
        """
        request_id = f"req_{secrets.token_hex(12)}"
        try:
            body = await self._answer(line, Caller(tenant, None, service_class=service_class))
            return Reply(200, request_id, await beside(body, lambda: from_json(body)))
        except InvalidParameter as error:
            refused = invalid(str(error), error.param)
        except ApiError as error:
            refused = error
        except Exception:
            logger.exception("line %d of a batch failed (%s)", line.number, request_id)
            refused = failed()
        if refused.status >= 500 and not self._service.health().well:
            raise ConnectionError("the engine has failed")
        cut_off = refused.code == "deadline_exceeded" and line.body.get("deadline_ms") is None
        if refused.status in BUSY or cut_off:
            raise Busy(float(refused.headers.get("Retry-After", "0")))
        return Reply(refused.status, request_id, json.loads(refused.body()))

    async def _answer(self, line: BatchRequest, caller: Caller) -> bytes:
        part = self._parts.get(line.url)
        if part is None:
            raise route_not_found(line.url)
        turn: Turn = nullcontext() if is_awaited(caller.service_class) else self._turns
        async with turn:
            opened = await part.open(line.url, _encoded(line.body), caller)
        try:
            return await opened.answer(turn)
        finally:
            opened.close()


def _encoded(body: dict[str, Any]) -> bytes:
    try:
        return json_text(body, "the body").encode("utf-8", "surrogatepass")
    except UnusableConstraint as error:
        raise invalid(f"The body cannot be read: {error}") from None


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
    """A `LineEndpoints`; ``request_timeout`` ends lines that run in another class than background."""

    paths = tuple(OPENED)

    def __init__(
        self, lookup: CacheLookup, model: ServedModel, notes: CallNotes, *, request_timeout: float
    ) -> None:
        self._lookup = lookup
        self._model = model
        self._notes = notes
        self._request_timeout = request_timeout

    async def open(self, path: str, raw: bytes, caller: Caller) -> OpenedLine:
        """See `LineEndpoints`."""
        endpoint = OPENED[path]
        body = await parse_beside(raw, endpoint.form, endpoint.not_yet)
        self._model.check_name(body.model)
        call = await endpoint.open(self._lookup, self._model, body, caller, self._request_timeout)
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
            return await write_beside(call, self._writer.whole)

    def close(self) -> None:
        self._call.close()


class ResponsesLines:
    """A `LineEndpoints` of the Responses API. Responses are stored as those of requests are."""

    paths = ("/v1/responses",)

    def __init__(self, api: ResponsesApi) -> None:
        self._api = api

    async def open(self, path: str, raw: bytes, caller: Caller) -> OpenedLine:
        """See `LineEndpoints`."""
        body = await parse_beside(raw, ResponsesBody, RESPONSES)
        if body.background:
            raise invalid("background cannot be used in a batch", "background")
        opened = await self._api.open(body, caller)
        return _ResponseLine(self._api, opened.call, opened.writer)


class _ResponseLine(_GeneratedLine):
    def __init__(self, api: ResponsesApi, call: Call, writer: WholeWriter) -> None:
        super().__init__(call, writer)
        self._api = api

    async def answer(self, turn: Turn) -> bytes:
        written = await super().answer(turn)
        await self._api.written()
        return written


class MessagesLines:
    """A `LineEndpoints` of Anthropic's Messages API."""

    paths = ("/v1/messages",)

    def __init__(self, api: Messages) -> None:
        self._api = api

    async def open(self, path: str, raw: bytes, caller: Caller) -> OpenedLine:
        """See `LineEndpoints`."""
        call, writer, _ = await self._api.open(raw, caller)
        return _GeneratedLine(call, writer)


class PooledLines:
    """A `LineEndpoints` of embedding models; ``request_timeout`` ends a line."""

    def __init__(self, calls: PoolingCalls, *, request_timeout: float) -> None:
        self._calls = calls
        self._request_timeout = request_timeout

    @property
    def paths(self) -> Sequence[str]:
        """The endpoints that have a model."""
        return self._calls.paths

    async def open(self, path: str, raw: bytes, caller: Caller) -> OpenedLine:
        """See `LineEndpoints`."""
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
