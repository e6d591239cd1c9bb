"""The ASGI applications: all routes behind the edge, and the few routes of the metrics port.

`lifespan_of` starts and stops one without a server.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, Protocol

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Lifespan, Message, Receive, Scope, Send

from headrace.api.anthropic.wire import error_response, speaks_anthropic
from headrace.api.auth.access import (
    Access,
    AccessCheck,
    HostRefused,
    Hosts,
    KeyRequired,
    OriginCheck,
    OriginRefused,
    RoleRequired,
    plain_origin,
    route_path,
    tenant_of,
)
from headrace.api.auth.api_keys import Keys
from headrace.api.compile.normalization import NORMALIZED_HEADER
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
    route_not_found,
    shutting_down,
    unsupported_media_type,
)
from headrace.api.exchange import (
    CALLER,
    COST_HEADER,
    DISCONNECTED,
    EXCHANGE,
    HEADER_TEXT,
    SEND,
    Caller,
    Disconnected,
    Exchange,
    Hooks,
    record_error,
)
from headrace.api.openapi import described
from headrace.api.rate_limit_headers import RATE_HEADERS
from headrace.api.replies import CACHE_HEADER
from headrace.api.routing import FORM, ApiRoute, Row

# The outermost layer: checks origins and API keys, measures every HTTP request, and catches errors of all
# routes.
#
# It gives each request its `Exchange` and each response its ``X-Request-Id``. It is plain ASGI, because a
# stream passes through it thousands of times a second.

logger = logging.getLogger("headrace.edge")

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
        except Disconnected:
            record_error(scope, DISCONNECTED)
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


EXPOSED_HEADERS = (
    "Retry-After",
    "X-Request-Id",
    "traceparent",
    CACHE_HEADER,
    COST_HEADER,
    NORMALIZED_HEADER,
    *RATE_HEADERS,
)
"""Response headers that browsers let pages of other origins read."""


class BackgroundWork(Protocol):
    """Background work on the server's event loop."""

    def start(self) -> None: ...

    async def stop(self) -> None: ...


class Started(Protocol):
    """What is started before all background work, such as the response caches with the engine."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


def create_app(
    started: Started,
    routes: Sequence[Route],
    keys: Keys,
    background: Sequence[BackgroundWork] = (),
    origins: Sequence[str] = (),
    hooks: Hooks = Hooks(),  # noqa: B008 (immutable)
    hosts: Hosts = Hosts(),  # noqa: B008 (immutable)
    forms: Container[str] = (),
) -> ASGIApp:
    """The application of the main port. Its lifespan starts and stops ``started``.

    The ``background`` work starts after it, in order, and stops before it, in reverse order. Browsers let pages of
    ``origins`` call the server. ``hooks`` are called with each HTTP request. Requests that
    name none of the ``hosts`` are refused. Bodies of paths in ``forms``, beside those of known routes, may be forms.

    Raises:
        ValueError: a route has no access, or two.
    """
    table = access_table(routes)

    @asynccontextmanager
    async def lifespan(app: ASGIApp) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:  # if one fails to stop, the others are still stopped
            for hook in reversed(hooks.stopped):
                stack.callback(hook)
            await started.start()
            stack.push_async_callback(started.stop)
            for each in background:
                each.start()
                stack.push_async_callback(each.stop)
            yield

    check = OriginCheck(origins, hosts)
    edge = Edge(
        _router(routes, lifespan),
        AccessCheck(keys, table),
        routes,
        hooks,
        origins=check,
        forms=_Forms(forms),
    )
    if not origins:
        return edge
    # Outermost, because a browser's preflight request carries no key.
    plain = [plain_origin(each) for each in origins]
    return CORSMiddleware(
        edge, allow_origins=plain, allow_methods=["*"], allow_headers=["*"], expose_headers=EXPOSED_HEADERS
    )


def create_metrics_app(
    routes: Iterable[Route],
    origins: Sequence[str] = (),
    hosts: Hosts = Hosts(),  # noqa: B008 (immutable)
) -> ASGIApp:
    """The application of the metrics port: only metrics and health, without a key."""
    served = [route for route in routes if isinstance(route, ApiRoute) and route.rows[0].metrics_port]
    check = AccessCheck(Keys({}), access_table(served))
    return Edge(_router(served), check, served, origins=OriginCheck(origins, hosts))


def access_table(routes: Iterable[Route]) -> dict[str, Access]:
    """The access of every method and path: of ``routes``, and of those that an option of the server would add.

    Raises:
        ValueError: a route has no access, or two.
    """
    table: dict[str, Access] = {}
    mounted: list[Row] = []
    for route in routes:
        if not isinstance(route, ApiRoute):
            raise ValueError(f"no access is declared for the route {route.path}; see api.routing")
        mounted += route.rows
    for row in (*described(), *mounted):
        if table.setdefault(row.key, row.access) is not row.access:
            raise ValueError(f"two kinds of access are declared for {row.key}")
    return table


class _Forms(Container[str]):
    """The paths that take a form: those of known routes, and ``others``."""

    def __init__(self, others: Container[str]) -> None:
        self._known = frozenset(row.path for row in described() if row.media == FORM)
        self._others = others

    def __contains__(self, path: object) -> bool:
        return path in self._known or path in self._others


def _router(routes: Sequence[Route], lifespan: Lifespan[ASGIApp] | None = None) -> Router:
    known = frozenset(route.path for route in routes)

    async def not_found(scope: Scope, receive: Receive, send: Send) -> None:
        raise route_not_found(scope["path"], known)

    return _Router(routes, redirect_slashes=False, default=not_found, lifespan=lifespan)


class _Router(Router):
    """Starlette's, which finds routes without parameters by their path, not one after the other."""

    def __init__(self, routes: Sequence[Route], **options: Any) -> None:
        self._exact = _exact(routes)
        super().__init__(routes, **options)

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = None
        if scope["type"] == "http":
            path = route_path(scope["path"], scope.get("root_path", ""))
            route = self._exact.get((scope["method"], path))
        if route is None:
            await super().app(scope, receive, send)
            return
        scope["endpoint"], scope["path_params"] = route.endpoint, {}
        await route.handle(scope, receive, send)


def _exact(routes: Sequence[Route]) -> dict[tuple[str, str], Route]:
    """The routes without parameters by method and path, as far as none before them matches too."""
    found: dict[tuple[str, str], Route] = {}
    before: list[Route] = []
    for route in routes:
        if "{" in route.path:
            before.append(route)
            continue
        matching = [each for each in before if each.path_regex.match(route.path)]
        for method in route.methods or ():
            if not any(method in (each.methods or ()) for each in matching):
                found.setdefault((method, route.path), route)
    return found


@asynccontextmanager
async def lifespan_of(app: ASGIApp) -> AsyncIterator[None]:
    """Start ``app`` before the block and shut it down after it, with ASGI's lifespan protocol.

    Raises:
        RuntimeError: the application reported that it could not start or stop.
    """
    to_app: asyncio.Queue[Message] = asyncio.Queue()
    from_app: asyncio.Queue[Message] = asyncio.Queue()
    scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": {}}

    async def run() -> None:
        await app(scope, to_app.get, from_app.put)

    async def send(what: str) -> None:
        await to_app.put({"type": f"lifespan.{what}"})
        answer = asyncio.create_task(from_app.get())
        await asyncio.wait({answer, task}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            answer.cancel()
            await task  # raises what ended it
            raise RuntimeError(f"the application ended during {what}")
        if answer.result()["type"] != f"lifespan.{what}.complete":
            raise RuntimeError(f"the application failed during {what}: {answer.result().get('message', '')}")

    task = asyncio.create_task(run())
    try:
        await send("startup")
        yield
        await send("shutdown")
        await task
    finally:
        task.cancel()
