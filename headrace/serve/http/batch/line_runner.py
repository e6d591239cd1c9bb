"""Runs lines of batches on this server's endpoints: below other requests, without a connection of their own.

A line is parsed, rendered and written by the same code as a request (`line_endpoints`). It begins only while no request
of another class is being read or answered, one line at a time, because reading and rendering would delay that request.
Near the end of the completion window, lines run in the class flex and do not wait.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Sequence
from typing import Any, Protocol

from headrace.core.request import InvalidParameter
from headrace.core.tenancy.classes import is_awaited
from headrace.serve.batch.lines import ENDPOINTS, BatchRequest
from headrace.serve.batch.runs import Busy, Reply
from headrace.serve.http.errors import ApiError, failed, invalid, route_not_found
from headrace.serve.http.generation.caller import Caller
from headrace.serve.service import Service

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.01
"""How often it is checked whether other requests have ended."""

BUSY = frozenset({429, 503})


class OpenedLine(Protocol):
    """A line that has been submitted; `close` it, whatever happens."""

    async def answer(self) -> bytes:
        """Its response's body.

        Raises:
            ApiError: it was refused or has failed.
        """
        ...

    def close(self) -> None:
        """End what is still open."""
        ...


class LineEndpoints(Protocol):
    """Endpoints that run lines."""

    @property
    def paths(self) -> Sequence[str]: ...

    async def open(self, path: str, raw: bytes, caller: Caller) -> OpenedLine:
        """Parse and submit the body ``raw`` of a line for ``path``.

        Raises:
            ApiError: it cannot be served as it is, or not now.
            InvalidParameter: a parameter is invalid.
        """
        ...


class LineRunner:
    """A `serve.batch.runs.Port` over the endpoints of ``parts``."""

    def __init__(self, service: Service, parts: Sequence[LineEndpoints]) -> None:
        self._service = service
        self._parts = {path: part for part in parts for path in part.paths}
        self._turn = asyncio.Lock()

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The endpoints that batches on this server may use."""
        return tuple(path for path in ENDPOINTS if path in self._parts)

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
        part = self._parts.get(line.url)
        if part is None:
            raise route_not_found(line.url)
        if is_awaited(caller.service_class):
            opened = await part.open(line.url, _encoded(line.body), caller)
        else:
            async with self._turn:
                while self._service.awaited:
                    await asyncio.sleep(LOOK_SECONDS)
                opened = await part.open(line.url, _encoded(line.body), caller)
        try:
            return await opened.answer()
        finally:
            opened.close()


def _encoded(body: dict[str, Any]) -> bytes:
    try:
        return json.dumps(body).encode()
    except (ValueError, RecursionError) as error:
        raise invalid(f"The body cannot be read: {error}") from None
