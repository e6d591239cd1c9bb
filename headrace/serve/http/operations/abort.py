"""``POST /abort_request``: whoever has a request's id may end it, as if its caller had hung up."""

from __future__ import annotations

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headrace.serve.http.body import read_body
from headrace.serve.http.edge import CALLER
from headrace.serve.http.errors import request_not_found
from headrace.serve.http.generation.call_notes import CallNotes
from headrace.serve.http.wire import Wire, parse


class AbortBody(Wire):
    """Which request is to end."""

    request_id: str = Field(min_length=1, max_length=512, description="The `id` of its answer.")


class Abort:
    """The endpoint. With API keys, a request is ended only by the key that made it."""

    def __init__(self, notes: CallNotes, *, max_body_bytes: int) -> None:
        self._notes = notes
        self._max_body_bytes = max_body_bytes

    def routes(self) -> list[Route]:
        """What to mount."""
        return [Route("/abort_request", self.abort, methods=["POST"])]

    async def abort(self, request: Request) -> Response:
        """``POST /abort_request``; its caller's answer ends with an error that says so."""
        body = parse(await read_body(request, self._max_body_bytes), AbortBody, {})
        call = self._notes.under_way(body.request_id)
        key_id = request.scope[CALLER].key_id
        if call is None or (key_id is not None and call.tenant != key_id):
            raise request_not_found(body.request_id)
        call.abort()
        return JSONResponse({"request_id": body.request_id, "aborted": True})
