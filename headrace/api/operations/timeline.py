"""``GET /v1/requests/{id}/timeline``: when a request waited, computed its prompt, and generated each token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.api.auth.access import Access
from headrace.api.errors import invalid
from headrace.api.operations.owned_requests import Explain, owned
from headrace.api.routing import Endpoints, route
from headrace.api.serving import CallNotes
from headrace.service.service import Service

FORMATS = ("json", "perfetto")


def read_format(request: Request) -> str:
    """The query's ``format``.

    Raises:
        ApiError: it is none of `FORMATS`.
    """
    form = request.query_params.get("format", "json")
    if form not in FORMATS:
        raise invalid(f"format must be json or perfetto, got {form[:40]!r}", "format")
    return form


def download(trace: Mapping[str, Any], name: str) -> Response:
    """A trace for Perfetto as a file; ``name`` has no extension."""
    safe = "".join(each if each.isalnum() or each in "-_." else "_" for each in name)[:80]
    return JSONResponse(
        trace, headers={"Content-Disposition": f'attachment; filename="{safe}.perfetto.json"'}
    )


class RequestTimeline(Endpoints):
    """The endpoint.

    ``explain``, ``timeline`` and ``trace`` come from `observe`: the explanation of a request, its timeline up to a
    time, and the timelines of requests as a trace.
    """

    def __init__(
        self,
        service: Service,
        notes: CallNotes,
        *,
        explain: Explain,
        timeline: Explain,
        trace: Callable[[Sequence[str], float], Mapping[str, Any]],
    ) -> None:
        self._service = service
        self._notes = notes
        self._explain = explain
        self._timeline = timeline
        self._trace = trace

    @route(
        "GET /v1/requests/{id}/timeline",
        Access.INFERENCE,
        "Report when a request waited, computed its prompt and generated each token; ?format=perfetto for a trace.",
    )
    async def timeline(self, request: Request) -> Response:
        """``?format=perfetto`` returns it for https://ui.perfetto.dev.

        With API keys, a request is shown only to its tenant. A timeline holds no text.
        """
        form = read_format(request)
        call = owned(request, self._service, self._notes, self._explain)
        now = self._service.now()
        if form == "perfetto":
            return download(self._trace([each["id"] for each in call.sequences], now), call.call_id)
        shown = []
        for each in call.sequences:
            known = {name: each[name] for name in ("id", "state", "cached_tokens", "preemptions", "cost")}
            shown.append({**known, **(self._timeline(each["id"], now) or {})})
        return JSONResponse(call.shown(shown))
