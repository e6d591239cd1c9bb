"""The ASGI applications: all routes behind the edge, and the few routes of the metrics port.

`lifespan_of` starts and stops one without a server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Container, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Protocol

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Lifespan, Message, Receive, Scope, Send

from headrace.api.auth.access import Access, AccessCheck, route_path
from headrace.api.auth.api_keys import Keys
from headrace.api.auth.origin import Hosts, OriginCheck, plain_origin
from headrace.api.caller import COST_HEADER
from headrace.api.compile.normalization import NORMALIZED_HEADER
from headrace.api.edge import Edge
from headrace.api.errors import route_not_found
from headrace.api.exchange import Hooks
from headrace.api.openapi import described
from headrace.api.rate_limit_headers import RATE_HEADERS
from headrace.api.replies import CACHE_HEADER
from headrace.api.routing import FORM, ApiRoute, Row

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
    for route in routes:
        for method in (route.methods or ()) if "{" not in route.path else ():
            matching = (each for each in routes if method in (each.methods or ()))
            if next(each for each in matching if each.path_regex.match(route.path)) is route:
                found[method, route.path] = route
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
