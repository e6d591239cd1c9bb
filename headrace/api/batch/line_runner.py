"""Runs lines of batches on this server's endpoints, below other requests and without connections.

A line is parsed, rendered and written by the same code as a request (`line_endpoints`). Its beginning and its end each
take a millisecond or more of the event loop, and lines often end together. So they take turns: one at a time, only
while no request of another class is open, and with a pause in which the loop reads its sockets. Near the end of the
completion window, lines run in the class flex and do not wait.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Protocol

from headrace.api.batch.lines import ENDPOINTS, BatchRequest
from headrace.api.batch.runs import Busy, Reply
from headrace.api.caller import Caller
from headrace.api.errors import ApiError, failed, invalid, route_not_found
from headrace.core.constraint import UnusableConstraint, json_text
from headrace.core.request import InvalidParameter
from headrace.core.tenancy.classes import is_awaited
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
    """A `api.batch.runs.Port` over the endpoints of ``parts``."""

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
