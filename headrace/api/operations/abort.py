"""``POST /abort_request``: cancels a request by its id."""

from __future__ import annotations

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.api.auth.access import Access
from headrace.api.body import read_body
from headrace.api.caller import CALLER
from headrace.api.errors import request_not_found
from headrace.api.routing import Endpoints, route
from headrace.api.serving import CallNotes
from headrace.api.wire import Wire, parse_beside


class AbortBody(Wire):
    """The request to cancel."""

    request_id: str = Field(
        min_length=1,
        max_length=512,
        description="The `id` of the response, or the `X-Request-Id` of the request.",
    )


class Abort(Endpoints):
    """The endpoint. With API keys, a request is cancelled only by its own tenant."""

    def __init__(self, notes: CallNotes, *, max_body_bytes: int) -> None:
        self._notes = notes
        self._max_body_bytes = max_body_bytes

    @route(
        "POST /abort_request",
        Access.INFERENCE,
        "Cancel a running request, by its id or its X-Request-Id.",
        body=AbortBody,
    )
    async def abort(self, request: Request) -> Response:
        """The cancelled request ends with the error ``request_aborted``."""
        body = await parse_beside(await read_body(request, self._max_body_bytes), AbortBody, {})
        caller = request.scope[CALLER]
        key_id = caller.key_id
        call = self._notes.under_way(self._notes.find(body.request_id, key_id or caller.tenant_header))
        if call is None or (key_id is not None and call.tenant != key_id):
            raise request_not_found(body.request_id)
        call.abort()
        return JSONResponse({"request_id": body.request_id, "aborted": True})
