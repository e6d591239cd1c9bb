"""``POST /pause`` and ``POST /resume``: reject new requests for a while, and accept them again.

Queued and running requests continue, and cached responses are still served.
"""

from __future__ import annotations

import logging

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headrace.service.service import Service

logger = logging.getLogger(__name__)


class Pause:
    """The two endpoints."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        """The routes to mount."""
        return [
            Route("/pause", self.pause, methods=["POST"]),
            Route("/resume", self.resume, methods=["POST"]),
        ]

    async def pause(self, request: Request) -> Response:
        """``POST /pause``: reject new requests with 503 until ``/resume``."""
        return self._set(True)

    async def resume(self, request: Request) -> Response:
        """``POST /resume``: accept new requests again."""
        return self._set(False)

    def _set(self, paused: bool) -> Response:
        if paused != self._service.paused:
            logger.warning("paused: new requests are rejected" if paused else "resumed")
        self._service.paused = paused
        return JSONResponse({"paused": paused, "open_requests": self._service.open_requests()})
