"""Puts the served model to sleep and wakes it up, with vLLM's routes and parameters."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.api.auth.access import Access
from headrace.api.errors import ApiError, invalid
from headrace.api.routing import Endpoints, route
from headrace.service.sleep import (
    LEVELS,
    MODES,
    CannotSleep,
    CannotWakeUp,
    Change,
    Part,
    Sleep,
    WokenUp,
)


class SleepRoutes(Endpoints):
    """The endpoints. Cached responses are served while the model sleeps; other requests are rejected with 503."""

    def __init__(self, sleep: Sleep) -> None:
        self._sleep = sleep

    @route(
        "POST /sleep",
        Access.ADMIN,
        "Free the memory of the model: ?level=1 of its KV cache, ?level=2 of its weights too.",
    )
    async def sleep(self, request: Request) -> Response:
        """``?level=``, or ``?tags=``, and ``?mode=``: see the guide of serving."""
        query = request.query_params
        level, mode = query.get("level", "1"), query.get("mode", "wait")
        if level not in map(str, LEVELS):
            raise invalid(
                f"level must be 1 or 2, got {level[:40]!r}; to reject requests only, use /pause", "level"
            )
        if mode not in MODES:
            raise invalid(f"mode must be wait, abort or keep, got {mode[:40]!r}", "mode")
        parts = _parts(request) or LEVELS[int(level)]
        try:
            change = await self._sleep.sleep(parts, mode)
        except CannotSleep as error:
            raise invalid(f"{error}.", "tags" if "tags" in query else "level") from None
        except WokenUp:
            raise ApiError(409, "The model was woken up before it slept.", code="woken_up") from None
        shown = _shown(change)
        return JSONResponse(
            shown | {"prefix_cache_reset": Part.KV_CACHE in parts, "aborted_requests": change.aborted}
        )

    @route(
        "POST /wake_up", Access.ADMIN, "Restore the memory of a sleeping model, or the parts ?tags= of it."
    )
    async def wake_up(self, request: Request) -> Response:
        """Requests run again when no part sleeps any more."""
        try:
            change = await self._sleep.wake_up(_parts(request) or frozenset(Part))
        except CannotWakeUp as error:
            raise ApiError(409, f"The model sleeps on: {error}.", code="not_woken_up") from None
        return JSONResponse(_shown(change))

    @route(
        "GET /is_sleeping", Access.ANY_KEY, "Report whether the model sleeps, and which parts of its memory."
    )
    async def is_sleeping(self, request: Request) -> Response:
        """``sleeping`` lists the parts."""
        sleeping = self._sleep.sleeping
        return JSONResponse({"is_sleeping": bool(sleeping), "sleeping": sleeping})


def _parts(request: Request) -> frozenset[Part]:
    """The parts that the query's ``tags`` name.

    Raises:
        ApiError: there is no such part.
    """
    tags = request.query_params.getlist("tags")
    for tag in tags:
        if tag not in list(Part):
            raise invalid(f"tags must be kv_cache or weights, got {tag[:40]!r}", "tags")
    return frozenset(map(Part, tags))


def _shown(change: Change) -> dict[str, Any]:
    memory = change.memory
    return {
        "is_sleeping": bool(memory.sleeping),
        "sleeping": memory.sleeping,
        "open_requests": change.kept,
        "resident_bytes_before": memory.before_bytes,
        "resident_bytes": memory.after_bytes,
        "seconds": round(change.seconds, 3),
    }
