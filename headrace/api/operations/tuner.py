"""``/v1/tuner``: reports the tuner's state, and changes its mode while serving."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.api.auth.access import Access
from headrace.api.body import read_body
from headrace.api.routing import Endpoints, route
from headrace.api.wire import Wire, parse_beside


class TunerBody(Wire):
    """The tuner's new mode."""

    mode: Literal["off", "advise", "on"] = Field(
        description="off: undo the change that is not confirmed; advise: rehearse changes and report the better ones; "
        "on: make them."
    )


class TunerRoutes(Endpoints):
    """The endpoints; ``report`` and ``set_mode`` are the tuner's."""

    def __init__(
        self, report: Callable[[], dict[str, Any]], set_mode: Callable[[str], None], *, max_body_bytes: int
    ) -> None:
        self._report = report
        self._set_mode = set_mode
        self._max_body_bytes = max_body_bytes

    @route("GET /v1/tuner", Access.ADMIN, "Report the tuner: mode, settings with their bounds, changes.")
    async def get(self, request: Request) -> Response:
        """Mode, settings with their bounds, the change that is not confirmed, and the log."""
        return JSONResponse(self._report())

    @route(
        "POST /v1/tuner", Access.ADMIN, "Change the tuner's mode.", body=TunerBody, example={"mode": "advise"}
    )
    async def set(self, request: Request) -> Response:
        """Change the mode."""
        body = await parse_beside(await read_body(request, self._max_body_bytes), TunerBody, {})
        self._set_mode(body.mode)
        return JSONResponse(self._report())
