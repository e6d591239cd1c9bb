"""One row a route: method, path, access, body and summary, written above its handler.

The application mounts the rows of its `Endpoints`, the edge checks API keys against them, and `openapi` describes them.
A route cannot be declared without its access, so a new route cannot be open by mistake.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from itertools import groupby
from typing import Any, ClassVar, NamedTuple, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from headrace.api.auth.access import Access
from headrace.api.errors import wrong_method

HandlerT = TypeVar("HandlerT", bound=Callable[..., Any])

FORM = "multipart/form-data"

_ROWS = "_route_rows"
"""The attribute of a handler that holds its rows."""


class Row(NamedTuple):
    """One method and path. ``path`` is spelled as in Starlette's routes.

    ``summary`` describes the route in the reference; a route without one is an alias that is not listed. ``listed``:
    the OpenAPI document has it too. ``body`` parses the request's body, ``example`` is a body to start from, ``media``
    its content type. ``metrics_port``: ``--metrics-port`` serves the route as well.
    """

    method: str
    path: str
    access: Access
    summary: str = ""
    body: type[BaseModel] | None = None
    example: dict[str, Any] | None = None
    media: str = "application/json"
    listed: bool = True
    metrics_port: bool = False

    @property
    def key(self) -> str:
        """Method and path, as in ``GET /health``."""
        return f"{self.method} {self.path}"

    @property
    def shown_path(self) -> str:
        """The path without the kinds of its parameters, as OpenAPI spells it."""
        return self.path.replace(":path}", "}")


def route(
    key: str,
    access: Access,
    summary: str = "",
    *,
    body: type[BaseModel] | None = None,
    example: dict[str, Any] | None = None,
    media: str = "application/json",
    listed: bool = True,
    metrics_port: bool = False,
) -> Callable[[HandlerT], HandlerT]:
    """Declare that a method of an `Endpoints` class serves ``key``, such as ``GET /health``; see `Row`.

    Raises:
        TypeError: ``access`` is no `Access`.
    """
    if not isinstance(access, Access):
        raise TypeError(f"{key}: a route needs its access")
    method, _, path = key.partition(" ")
    row = Row(method, path, access, summary, body, example, media, listed, metrics_port)

    def declared(handler: HandlerT) -> HandlerT:
        # Decorators are applied from the bottom up; the rows keep the order in which they are read.
        setattr(handler, _ROWS, (row, *getattr(handler, _ROWS, ())))
        return handler

    return declared


class ApiRoute(Route):
    """A route whose access is known: ``rows`` has one for each of its methods."""

    def __init__(self, rows: list[Row], handler: Callable[..., Any]) -> None:
        super().__init__(rows[0].path, handler, methods=[row.method for row in rows])
        self.rows = rows
        self.app = partial(_answer, handler)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request.

        Raises:
            ApiError: 405, the route has other methods.
        """
        methods = self.methods or ()
        if scope["method"] not in methods:
            raise wrong_method(scope["method"], scope["path"], methods)
        await self.app(scope, receive, send)


async def _answer(
    handler: Callable[[Request], Awaitable[Response]], scope: Scope, receive: Receive, send: Send
) -> None:
    """Send what a handler returns; the edge makes responses of what it raises."""
    response = await handler(Request(scope, receive, send))
    await response(scope, receive, send)


class Endpoints:
    """The base of classes with handlers; ``declared`` are their rows, by the names of the handlers."""

    declared: ClassVar[dict[str, tuple[Row, ...]]] = {}

    def __init_subclass__(cls) -> None:
        cls.declared = {
            name: getattr(each, _ROWS) for name, each in vars(cls).items() if hasattr(each, _ROWS)
        }

    def routes(self) -> list[Route]:
        """The routes to mount. Methods of one handler at one path are one route."""
        return [
            ApiRoute(list(rows), getattr(self, name))
            for name, declared in self.declared.items()
            for _, rows in groupby(declared, lambda row: row.path)
        ]
