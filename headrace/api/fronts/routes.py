"""The routes of a front end that the owner answers: every request that no other route takes is sent on as it is."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from headrace.api.auth.access import Access
from headrace.api.errors import shutting_down
from headrace.api.exchange import EXCHANGE
from headrace.api.models.relay import (
    Content,
    Lost,
    ModelClient,
    Relayed,
    Reply,
    forwarded_headers,
    has_body,
    target_of,
)
from headrace.api.routing import Endpoints, route


class Onward(Endpoints):
    """Sends requests to the owner's socket at ``path``; ``open`` counts those that are being answered."""

    def __init__(self, path: str) -> None:
        self.open = 0
        self._client = ModelClient(path)

    @route("GET /{path:path}", Access.ANY_KEY)
    @route("POST /{path:path}", Access.ANY_KEY)
    @route("DELETE /{path:path}", Access.ANY_KEY)
    async def other(self, request: Request) -> Response:
        """The owner's response, with the trace context that the owner gave it."""
        request.scope[EXCHANGE].traceparent = ""
        body = None if has_body(request) else b""
        return Relayed(self, lambda content: self._send(request, content), body)

    async def _send(self, request: Request, content: Content) -> Reply:
        headers = forwarded_headers(request, request.scope[EXCHANGE].request_id, content, request.method)
        try:
            return await self._client.send(request.method, target_of(request), headers, content)
        except Lost:
            raise shutting_down() from None
