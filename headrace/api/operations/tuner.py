"""``/v1/tuner``: reports the tuner's state, and changes its mode while serving."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headrace.api.body import read_body
from headrace.api.wire import Wire, parse_beside


class TunerBody(Wire):
    """The tuner's new mode."""

    mode: Literal["off", "advise", "on"] = Field(
        description="off: undo the change that is not confirmed; advise: rehearse changes and report the better ones; "
        "on: make them."
    )


class TunerRoutes:
    """The endpoints; ``report`` and ``set_mode`` are the tuner's."""

    def __init__(
        self, report: Callable[[], dict[str, Any]], set_mode: Callable[[str], None], *, max_body_bytes: int
    ) -> None:
        self._report = report
        self._set_mode = set_mode
        self._max_body_bytes = max_body_bytes

    def routes(self) -> list[Route]:
        """The routes to mount."""
        return [
            Route("/v1/tuner", self.get, methods=["GET"]),
            Route("/v1/tuner", self.set, methods=["POST"]),
        ]

    async def get(self, request: Request) -> Response:
        """``GET /v1/tuner``: mode, settings with their bounds, the change that is not confirmed, and the log."""
        return JSONResponse(self._report())

    async def set(self, request: Request) -> Response:
        """``POST /v1/tuner``: change the mode."""
        body = await parse_beside(await read_body(request, self._max_body_bytes), TunerBody, {})
        self._set_mode(body.mode)
        return JSONResponse(self._report())
