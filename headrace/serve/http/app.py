"""Builds the ASGI application: all routes behind the edge, and what starts and stops with the server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from headrace.core.request import InvalidParameter
from headrace.serve.auth.api_keys import Keys
from headrace.serve.cache.lookup import CacheLookup
from headrace.serve.http.edge import Edge
from headrace.serve.http.errors import ApiError, api_error, http_exception, invalid_parameter, unexpected
from headrace.serve.http.exchange import Hooks
from headrace.serve.http.rate_limit_headers import RATE_HEADERS
from headrace.serve.http.replies import CACHE_HEADER

EXPOSED_HEADERS = ("Retry-After", "X-Request-Id", "traceparent", CACHE_HEADER, *RATE_HEADERS)
"""Response headers that pages of other origins may read."""


class Beside(Protocol):
    """Background work on the server's loop."""

    def start(self) -> None: ...

    async def stop(self) -> None: ...


def create_app(
    recall: CacheLookup,
    routes: Sequence[BaseRoute],
    keys: Keys,
    beside: Sequence[Beside] = (),
    origins: Sequence[str] = (),
    hooks: Hooks = Hooks(),  # noqa: B008 (immutable)
) -> ASGIApp:
    """Build the application. It starts ``recall`` when the server starts, and stops it when the server stops.

    ``beside`` starts after that in its order, and stops before it in reverse order. Browsers let pages of ``origins``
    call the API and read its headers. ``hooks`` are called with each HTTP request.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await recall.start()
        for each in beside:
            each.start()
        yield
        for each in reversed(beside):
            await each.stop()
        await recall.stop()

    handlers = {
        ApiError: api_error,
        InvalidParameter: invalid_parameter,
        HTTPException: http_exception,
        Exception: unexpected,
    }
    app = Starlette(routes=list(routes), exception_handlers=handlers, lifespan=lifespan)
    app.router.redirect_slashes = False
    edge = Edge(app, keys, routes, hooks)
    if not origins:
        return edge
    # Outermost, because a browser sends its preflight request without a key.
    return CORSMiddleware(
        edge, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=EXPOSED_HEADERS
    )
