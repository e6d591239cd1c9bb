"""The ASGI applications: all routes behind the edge, and the few routes of the metrics port."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Lifespan

from headrace.api.auth.access import AccessCheck
from headrace.api.auth.api_keys import Keys
from headrace.api.auth.origin import Hosts, OriginCheck, plain_origin
from headrace.api.auth.roles import METRICS_PORT, ROUTES
from headrace.api.caller import COST_HEADER
from headrace.api.compile.render import NORMALIZED_HEADER
from headrace.api.edge import Edge
from headrace.api.errors import ApiError, api_error, http_exception, invalid_parameter, unexpected
from headrace.api.exchange import Hooks
from headrace.api.rate_limit_headers import RATE_HEADERS
from headrace.api.replies import CACHE_HEADER
from headrace.core.request import InvalidParameter
from headrace.response_cache.lookup import CacheLookup

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


def create_app(
    recall: CacheLookup,
    routes: Sequence[Route],
    keys: Keys,
    background: Sequence[BackgroundWork] = (),
    origins: Sequence[str] = (),
    hooks: Hooks = Hooks(),  # noqa: B008 (immutable)
    hosts: Hosts = Hosts(),  # noqa: B008 (immutable)
) -> ASGIApp:
    """The application of the main port. Its lifespan starts and stops ``recall`` with the engine.

    The ``background`` work starts after it, in order, and stops before it, in reverse order. Browsers let pages of
    ``origins`` call the server. ``hooks`` are called with each HTTP request. Requests that
    name none of the ``hosts`` are refused.

    Raises:
        ValueError: a route is not in the table of roles.
    """
    if missing := unlisted(routes):
        raise ValueError(f"not in api.auth.roles.ROUTES: {', '.join(missing)}")

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:  # if one fails to stop, the others are still stopped
            for hook in reversed(hooks.stopped):
                stack.callback(hook)
            await recall.start()
            stack.push_async_callback(recall.stop)
            for each in background:
                each.start()
                stack.push_async_callback(each.stop)
            yield

    check = OriginCheck(origins, hosts)
    edge = Edge(_starlette(routes, lifespan), AccessCheck(keys), routes, hooks, origins=check)
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
    served = [route for route in routes if f"GET {route.path}" in METRICS_PORT]
    return Edge(_starlette(served), AccessCheck(Keys({})), served, origins=OriginCheck(origins, hosts))


def endpoints(routes: Iterable[Route]) -> list[str]:
    """Every method and path of ``routes``, as in the table of roles; HEAD is the same as GET."""
    return [
        f"{method} {route.path}" for route in routes for method in sorted((route.methods or set()) - {"HEAD"})
    ]


def unlisted(routes: Iterable[Route]) -> list[str]:
    """The methods and paths that the table of roles does not have."""
    return [each for each in endpoints(routes) if each not in ROUTES]


def _starlette(routes: Sequence[Route], lifespan: Lifespan[Starlette] | None = None) -> Starlette:
    handlers = {
        ApiError: api_error,
        InvalidParameter: invalid_parameter,
        HTTPException: http_exception,
        Exception: unexpected,
    }
    app = Starlette(routes=list(routes), exception_handlers=handlers, lifespan=lifespan)
    app.router.redirect_slashes = False
    return app
