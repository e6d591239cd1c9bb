"""``GET /v1/usage``: tokens and requests used by each tenant, and its remaining quotas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headrace.serve.http.edge import CALLER
from headrace.serve.service import Service

MOST_SHOWN = 1000
"""Most tenants in one response; ``?tenant=`` selects one."""


class UsageReport:
    """The endpoint. ``tenants`` lists the known tenants and ``tell`` returns the usage of one; both are `observe`'s."""

    def __init__(
        self,
        service: Service,
        tenants: Callable[[], Iterable[str]],
        tell: Callable[[str], Mapping[str, Any]],
    ) -> None:
        self._service = service
        self._tenants = tenants
        self._tell = tell

    def routes(self) -> list[Route]:
        """The route of this endpoint."""
        return [Route("/v1/usage", self.usage)]

    async def usage(self, request: Request) -> Response:
        """``GET /v1/usage``: all tenants, or the one named by ``?tenant=``. An API key sees its own tenant only."""
        self._service.count()
        asked = request.scope[CALLER].key_id or request.query_params.get("tenant")
        names = [asked] if asked else sorted(self._tenants())
        shown = [self._of(name) for name in names[:MOST_SHOWN]]
        return JSONResponse({"object": "list", "data": shown, "has_more": len(names) > len(shown)})

    def _of(self, tenant: str) -> dict[str, Any]:
        rooms = self._service.meter.rooms(tenant, self._service.now())
        limits = {
            limit: {
                "limit": room.allowed,
                "remaining": room.remaining,
                "reset_seconds": round(room.reset_seconds, 3),
            }
            for limit, room in rooms.items()
        }
        return {**self._tell(tenant), "limits": limits}
