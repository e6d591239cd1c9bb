"""The outermost layer: an id for every HTTP request, the key check, and a last net under all routes.

Plain ASGI, because a stream passes through it thousands of times a second.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.serve.auth.api_keys import Keys
from headrace.serve.http.errors import ApiError, failed, invalid, invalid_api_key, shutting_down
from headrace.serve.http.generation.call import Caller

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/health/ready", "/ping", "/version", "/docs", "/openapi.json"})
"""What answers without a key: liveness for probes, and pages that say nothing about anyone."""

CALLER = "headrace.caller"
"""Where the scope holds the `Caller`."""

SEND = "headrace.send"
"""Where the scope holds how the server itself sends: layers between only look for the beginning of an answer, and a
stream passes its thousands of parts by them."""

_HEADER_VALUE = re.compile(r"[\x21-\x7e][\x20-\x7e]{0,127}")


class Edge:
    """Wraps the application."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _HEADER_VALUE.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            scope[CALLER] = self._caller(scope["path"], headers)
            scope[SEND] = send
            await self._app(scope, receive, send_with_id)
        except ApiError as error:
            await error.response()(scope, receive, send_with_id)
        except asyncio.CancelledError:
            if not started:  # the server ends, and this caller has not even sent his whole question
                await shutting_down().response()(scope, receive, send_with_id)
            raise
        except Exception:
            logger.exception("%s %s failed (X-Request-Id %s)", scope["method"], scope["path"], request_id)
            if not started:
                await failed().response()(scope, receive, send_with_id)

    def _caller(self, path: str, headers: Headers) -> Caller:
        key_id = self._keys.key_id(headers.get("authorization"))
        if self._keys.required and key_id is None and path not in OPEN_PATHS:
            raise invalid_api_key()
        tenant = headers.get("x-tenant-id")
        if tenant is not None and not _HEADER_VALUE.fullmatch(tenant):
            raise invalid("X-Tenant-Id must be 1 to 128 printable ASCII characters", "X-Tenant-Id")
        return Caller(key_id, tenant, headers.get("cache-control"))
