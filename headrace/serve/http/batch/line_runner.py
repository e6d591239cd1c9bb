"""Runs lines of batches on this server's endpoints: below other requests, without a connection of their own.

A line is parsed, rendered and written by the same code as a request. It begins only while no request of another class
is being read or answered, one line at a time, because reading and rendering would delay that request. Near the end of
the completion window, lines run in the class flex and do not wait.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from headrace.core.request import InvalidParameter
from headrace.core.tenancy.classes import is_awaited
from headrace.serve.batch.lines import BatchRequest
from headrace.serve.batch.runs import Busy, Reply
from headrace.serve.cache.lookup import CacheLookup
from headrace.serve.http.errors import ApiError, failed, invalid
from headrace.serve.http.generation import unsupported
from headrace.serve.http.generation.call import Answers, Call
from headrace.serve.http.generation.call_notes import CallNotes
from headrace.serve.http.generation.caller import Caller
from headrace.serve.http.generation.fields import Generation
from headrace.serve.http.generation.unsupported import NotYet
from headrace.serve.http.generation.writing import Writer
from headrace.serve.http.model import ServedModel
from headrace.serve.http.openai.chat import ChatWriter, open_chat
from headrace.serve.http.openai.chat_wire import ChatBody
from headrace.serve.http.openai.completions import CompletionWriter, open_completion
from headrace.serve.http.openai.completions_wire import CompletionBody
from headrace.serve.http.wire import parse

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.01
"""How often it is checked whether other requests have ended."""

BUSY = frozenset({429, 503})


class Endpoint(NamedTuple):
    """How one endpoint reads a body, begins a call, and writes its answer."""

    form: type[Generation]
    not_yet: NotYet
    open: Callable[[Answers, ServedModel, Any, Caller, float], Awaitable[Call]]
    writer: Callable[[Call, Any], Writer]


OPENED: Mapping[str, Endpoint] = {
    "/v1/chat/completions": Endpoint(ChatBody, unsupported.CHAT, open_chat, ChatWriter),
    "/v1/completions": Endpoint(CompletionBody, unsupported.COMPLETIONS, open_completion, CompletionWriter),
}
"""The endpoints of `serve.batch.lines.ENDPOINTS`."""


class LineRunner:
    """A `serve.batch.runs.Port`. ``request_timeout`` ends lines that run in another class than background."""

    def __init__(
        self, recall: CacheLookup, model: ServedModel, notes: CallNotes, *, request_timeout: float
    ) -> None:
        self._recall = recall
        self._service = recall.service
        self._model = model
        self._notes = notes
        self._request_timeout = request_timeout
        self._turn = asyncio.Lock()

    def draining(self) -> bool:
        """Whether the server shuts down."""
        return self._service.draining

    async def run(self, line: BatchRequest, tenant: str, service_class: str) -> Reply:
        """Run one line.

        Raises:
            Busy: the server does not take it now.
            ConnectionError: the engine has failed.
        """
        request_id = f"req_{secrets.token_hex(12)}"
        try:
            body = await self._answer(line, Caller(tenant, None, service_class=service_class))
            return Reply(200, request_id, json.loads(body))
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
        endpoint = OPENED[line.url]
        if is_awaited(caller.service_class):
            call, body = await self._open(endpoint, line, caller)
        else:
            async with self._turn:
                while self._service.awaited:
                    await asyncio.sleep(LOOK_SECONDS)
                call, body = await self._open(endpoint, line, caller)
        try:
            self._notes.put(call, body.metadata)
            writer = endpoint.writer(call, body)
            while not call.done:
                await call.advance()
            return writer.whole()
        finally:
            call.close()

    async def _open(self, endpoint: Endpoint, line: BatchRequest, caller: Caller) -> tuple[Call, Generation]:
        body = parse(_encoded(line.body), endpoint.form, endpoint.not_yet)
        self._model.check_name(body.model)
        call = await endpoint.open(self._recall, self._model, body, caller, self._request_timeout)
        return call, body


def _encoded(body: dict[str, Any]) -> bytes:
    try:
        return json.dumps(body).encode()
    except (ValueError, RecursionError) as error:
        raise invalid(f"The body cannot be read: {error}") from None
