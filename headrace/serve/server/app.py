"""The ASGI application: all routes behind one edge, one service for as long as it lives."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from headrace.core.request import InvalidParameter
from headrace.serve.auth import Keys
from headrace.serve.server.edge import Edge
from headrace.serve.server.errors import ApiError, api_error, http_exception, invalid_parameter, unexpected
from headrace.serve.service import Service


def create_app(service: Service, routes: Sequence[BaseRoute], keys: Keys) -> ASGIApp:
    """The application; it starts the service with the server's loop and stops it with the server."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.start()
        yield
        service.stop()

    handlers = {
        ApiError: api_error,
        InvalidParameter: invalid_parameter,
        HTTPException: http_exception,
        Exception: unexpected,
    }
    app = Starlette(routes=list(routes), exception_handlers=handlers, lifespan=lifespan)
    app.router.redirect_slashes = False
    return Edge(app, keys)
