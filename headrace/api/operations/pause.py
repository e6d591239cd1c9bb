"""``POST /pause`` and ``POST /resume``: reject new requests for a while, and accept them again.

Queued and running requests continue, and cached responses are still served.
"""

from __future__ import annotations

import logging

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.api.auth.access import Access
from headrace.api.routing import Endpoints, route
from headrace.service.service import Service

logger = logging.getLogger(__name__)


class Pause(Endpoints):
    """The two endpoints."""

    def __init__(self, service: Service) -> None:
        self._service = service

    @route("POST /pause", Access.ADMIN, "Reject new requests; queued and running ones continue.")
    async def pause(self, request: Request) -> Response:
        """Reject new requests with 503 until ``/resume``."""
        return self._set(True)

    @route("POST /resume", Access.ADMIN, "Accept new requests again.")
    async def resume(self, request: Request) -> Response:
        """Accept new requests again."""
        return self._set(False)

    def _set(self, paused: bool) -> Response:
        if paused != self._service.paused:
            logger.warning("paused: new requests are rejected" if paused else "resumed")
        self._service.paused = paused
        return JSONResponse({"paused": paused, "open_requests": self._service.open_requests()})
