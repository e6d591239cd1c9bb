"""The outermost layer: checks origins and API keys, measures every HTTP request, and catches errors of all routes.

It gives each request its `Exchange` and each response its ``X-Request-Id``. It is plain ASGI, because a stream passes
through it thousands of times a second.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Container, Iterable
from functools import partial

from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.api.anthropic.formats import error_response, speaks_anthropic
from headrace.api.auth.access import AccessCheck, KeyRequired, RoleRequired, route_path, tenant_of
from headrace.api.auth.origin import HostRefused, OriginCheck, OriginRefused
from headrace.api.caller import CALLER, COST_HEADER, Caller
from headrace.api.errors import (
    ERROR_FORMAT,
    ApiError,
    as_api_error,
    failed,
    host_not_allowed,
    invalid,
    invalid_api_key,
    origin_not_allowed,
    respond,
    role_required,
    shutting_down,
    unsupported_media_type,
)
from headrace.api.exchange import EXCHANGE, HEADER_TEXT, SEND, Exchange, Hooks, record_error

logger = logging.getLogger(__name__)

SINGLE = frozenset(
    {
        *(b"authorization", b"x-api-key", b"host", b"origin", b"sec-fetch-site", b"content-length"),
        *(b"content-type", b"content-encoding", b"x-tenant-id", b"x-session-id", b"x-headrace-cost"),
    }
)
"""Headers that a request may have once: a proxy in front may have read the other one."""


class Edge:
    """Wraps the application.

    ``access`` checks each request's key against the route that it asks for. ``routes`` are the application's, ``hooks``
    are called with each exchange. ``origins`` checks the host that a request names, and the page that sent it. Paths of
    ``forms`` take a form, all others JSON.
    """

    def __init__(
        self,
        app: ASGIApp,
        access: AccessCheck,
        routes: Iterable[BaseRoute] = (),
        hooks: Hooks = Hooks(),  # noqa: B008 (immutable)
        clock: Callable[[], float] = time.monotonic,
        origins: OriginCheck | None = None,
        forms: Container[str] = (),
    ) -> None:
        self._app = app
        self._origins = origins or OriginCheck()
        self._access = access
        self._forms = forms
        self._paths = {route.endpoint: route.path for route in routes if isinstance(route, Route)}
        self._hooks = hooks
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        exchange = scope[EXCHANGE] = Exchange(scope, headers, self._clock(), self._hooks)
        if speaks_anthropic(scope, headers):
            scope[ERROR_FORMAT] = partial(error_response, request_id=exchange.request_id)
        for hook in self._hooks.begun:
            hook(exchange)
        try:
            await self._serve(exchange, headers, scope, *_counted(exchange, receive, send))
        finally:
            exchange.ended = self._clock()
            if "endpoint" in scope:
                exchange.route = self._paths.get(scope["endpoint"], exchange.route)
            for hook in self._hooks.ended:
                hook(exchange)

    async def _serve(
        self, exchange: Exchange, headers: Headers, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Check the request, pass it to the application, and turn what is raised into a response."""

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                added = {b"x-request-id": exchange.request_id.encode()}
                if ERROR_FORMAT in scope:
                    added[b"request-id"] = exchange.request_id.encode()
                if exchange.traceparent:
                    added[b"traceparent"] = exchange.traceparent.encode()
                kept = [each for each in message["headers"] if each[0] not in added]
                message["headers"] = [*kept, *added.items()]
            await send(message)

        async def refuse(error: ApiError) -> None:
            record_error(scope, error.code)
            await respond(error, scope)(scope, receive, send_with_id)

        try:
            scope[CALLER] = self._caller(scope, headers, exchange)
            scope[SEND] = send
            await self._app(scope, receive, send_with_id)
        except asyncio.CancelledError:
            if not exchange.status:  # the server stops before the request has been read
                await refuse(shutting_down())
            raise
        except Exception as error:
            shown = as_api_error(error)
            if shown is None or exchange.status:
                fields = {"method": exchange.method, "path": exchange.path, "request_id": exchange.request_id}
                logger.exception("request failed", extra={"fields": fields})
                record_error(scope, "server_error")
            if not exchange.status:
                await refuse(shown or failed())

    def _caller(self, scope: Scope, headers: Headers, exchange: Exchange) -> Caller:
        """The client of a request whose headers are in order; its body has not been read yet."""
        path = route_path(scope["path"], scope.get("root_path", ""))
        # 1. May this page send it, and can nothing before the server have read it in another way?
        _check_single(headers)
        self._check_origin(scope["method"], headers)
        if path not in self._forms:
            _check_media_type(headers)
        # 2. May this key use the route?
        try:
            identity = self._access.identity(
                scope["method"], path, _authorization(headers, self._access.keys_required)
            )
        except KeyRequired:
            raise invalid_api_key() from None
        except RoleRequired as error:
            raise role_required(error.access) from None
        # 3. For which tenant and session?
        exchange.tenant = identity.name if identity is not None else ""
        claimed = headers.get("x-tenant-id")
        if claimed is not None and not HEADER_TEXT.fullmatch(claimed):
            raise invalid("X-Tenant-Id must be 1 to 128 printable ASCII characters", "X-Tenant-Id")
        session = headers.get("x-session-id")
        if session is not None and not HEADER_TEXT.fullmatch(session):
            raise invalid("X-Session-Id must be 1 to 128 printable ASCII characters", "X-Session-Id")
        key_id, tenant = tenant_of(identity, claimed)
        asks_cost = COST_HEADER in headers and _switch(headers[COST_HEADER])
        return Caller(
            key_id,
            tenant,
            headers.get("cache-control"),
            exchange=exchange,
            asks_cost=asks_cost,
            session=session,
            role=None if identity is None else identity.role,
        )

    def _check_origin(self, method: str, headers: Headers) -> None:
        try:
            self._origins.check(method, headers, self._access.keys_required)
        except HostRefused as refused:
            raise host_not_allowed(str(refused)) from None
        except OriginRefused as refused:
            raise origin_not_allowed(str(refused)) from None


def _counted(exchange: Exchange, receive: Receive, send: Send) -> tuple[Receive, Send]:
    """The same, with the bytes of bodies counted."""

    async def received() -> Message:
        message = await receive()
        exchange.received_bytes += len(message.get("body", b""))
        return message

    def sent(message: Message) -> Awaitable[None]:
        exchange.sent_bytes += len(message.get("body", b""))
        return send(message)

    return received, sent


def _switch(value: str) -> bool:
    """The value of ``X-Headrace-Cost`` in a request."""
    if value.lower() not in ("true", "false"):
        raise invalid(f"{COST_HEADER} must be true or false", COST_HEADER)
    return value.lower() == "true"


def _check_single(headers: Headers) -> None:
    """Raise ApiError (400) if a header that must be unique comes twice."""
    seen: set[bytes] = set()
    for name, _ in headers.raw:
        if name in SINGLE:
            if name in seen:
                title = name.decode().title()
                raise invalid(f"The header {title} must be given once", title, "duplicate_header")
            seen.add(name)


def _check_media_type(headers: Headers) -> None:
    """Raise ApiError (415) if a body is not declared as JSON.

    Outside a browser, no declaration at all or the one of ``curl -d`` is accepted too.
    """
    if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
        return
    given = headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return
    from_browser = "origin" in headers or "sec-fetch-site" in headers
    if from_browser or kind not in ("", "application/x-www-form-urlencoded"):
        raise unsupported_media_type(given)


def _authorization(headers: Headers, keys_required: bool) -> str | None:
    """The request's key as in ``Authorization``; Anthropic's clients send it in ``x-api-key``."""
    given, key = headers.get("authorization"), headers.get("x-api-key")
    if not key:
        return given
    if keys_required and given is not None and given.partition(" ")[2].strip() != key:
        raise invalid("Authorization and x-api-key have different keys", "x-api-key", "duplicate_header")
    return f"Bearer {key}" if given is None else given
