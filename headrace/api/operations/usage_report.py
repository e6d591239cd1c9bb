"""``GET /v1/usage``: tokens and requests used by each tenant, and its remaining quotas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.api.auth.access import Access
from headrace.api.caller import CALLER
from headrace.api.errors import invalid
from headrace.api.routing import Endpoints, route
from headrace.service.quota_meter import limits_of
from headrace.service.service import Service
from headrace.service.usage_file import UsageFile

MOST_SHOWN = 1000
"""Most tenants in one response; ``?tenant=`` selects one."""


class UsageReport(Endpoints):
    """The endpoint.

    ``tenants`` lists the known tenants, ``tell`` returns the usage of one, ``device`` the accounting of device time,
    and ``focus`` the cost of a tenant (None: of all, with idle time) as CSV; they come from `observe`. With ``file``,
    cost and savings include earlier processes.
    """

    def __init__(
        self,
        service: Service,
        tenants: Callable[[], Iterable[str]],
        tell: Callable[[str], Mapping[str, Any]],
        device: Callable[[float], Mapping[str, Any]] = lambda now: {},
        focus: Callable[[str | None], str] = lambda tenant: "",
        file: UsageFile | None = None,
    ) -> None:
        self._service = service
        self._tenants = tenants
        self._tell = tell
        self._device = device
        self._focus = focus
        self._file = file

    @route(
        "GET /v1/usage",
        Access.INFERENCE,
        "Report usage and remaining quotas: of the key's tenant, or of all; ?tenant= selects one.",
    )
    async def usage(self, request: Request) -> Response:
        """All tenants, or the one named by ``?tenant=``. An API key sees its own tenant only.

        ``?format=focus`` returns the cost as CSV in the columns of FOCUS. The accounting of device time is shown to
        admin keys, or to all clients if the server has no keys.
        """
        self._service.count()
        asked = request.scope[CALLER].key_id or request.query_params.get("tenant")
        file = self._file
        stored = [] if file is None or asked else await file.tenants()
        names = [asked] if asked else sorted({*self._tenants(), *stored})
        form = request.query_params.get("format", "json")
        if form == "focus":
            text = self._focus(asked) if file is None else await file.focus(asked)
            return Response(text, media_type="text/csv; charset=utf-8")
        if form != "json":
            raise invalid(f"format must be json or focus, got {form[:40]!r}", "format")
        shown = [await self._of(name) for name in names[:MOST_SHOWN]]
        page: dict[str, Any] = {"object": "list", "data": shown, "has_more": len(names) > len(shown)}
        if request.scope[CALLER].key_id is None:
            page["device"] = self._device(self._service.now())
        return JSONResponse(page)

    async def _of(self, tenant: str) -> dict[str, Any]:
        rooms = self._service.meter.rooms(tenant, self._service.now())
        limits = limits_of(rooms)
        stored = {} if self._file is None else await self._file.tenant(tenant)
        return {**self._tell(tenant), **stored, "limits": limits}
