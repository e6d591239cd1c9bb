"""The ASGI application: all routes behind one edge, one road to answers for as long as it lives."""

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
from headrace.serve.http.rate_limit_headers import RATE_HEADERS
from headrace.serve.http.replies import CACHE_HEADER

TOLD_HEADERS = ("Retry-After", "X-Request-Id", CACHE_HEADER, *RATE_HEADERS)
"""What pages of other origins may read beside the body."""


class Beside(Protocol):
    """What works beside the answering, on the server's loop."""

    def start(self) -> None: ...

    async def stop(self) -> None: ...


def create_app(
    recall: CacheLookup,
    routes: Sequence[BaseRoute],
    keys: Keys,
    beside: Sequence[Beside] = (),
    origins: Sequence[str] = (),
) -> ASGIApp:
    """The application; it starts with the server's loop what answers, and stops it with the server.

    What is ``beside`` starts after that in its order and stops before in the reverse one. Browsers let pages of
    ``origins`` call it, and read of its headers what is ours.
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
    edge = Edge(app, keys)
    if not origins:
        return edge
    # Outermost: a browser asks for permission without a key.
    return CORSMiddleware(
        edge, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=TOLD_HEADERS
    )
