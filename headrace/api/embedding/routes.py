"""The endpoints ``/v1/embeddings``, ``/v1/rerank`` and ``/v1/score``, and their aliases."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.api.body import read_body
from headrace.api.caller import CALLER, Caller
from headrace.api.embedding.calls import PoolingCalls
from headrace.api.embedding.exchange import Disconnected, Unsent, compute
from headrace.api.exchange import DISCONNECTED, record_error
from headrace.api.replies import cost_header, hung_up

RERANK_PATHS = ("/v1/rerank", "/rerank", "/v2/rerank")
SCORE_PATHS = ("/v1/score", "/score")


class EmbeddingApi:
    """The endpoints of ``calls``.

    ``max_body_bytes`` limits a request's body, ``request_timeout`` (seconds) its duration. ``headers`` returns the
    headers of every response to a tenant.
    """

    def __init__(
        self,
        calls: PoolingCalls,
        *,
        max_body_bytes: int,
        request_timeout: float,
        headers: Callable[[str], Mapping[str, str]] = lambda tenant: {},
    ) -> None:
        self._calls = calls
        self._max_body_bytes = max_body_bytes
        self._request_timeout = request_timeout
        self._headers = headers

    def routes(self) -> list[Route]:
        """The routes to mount."""
        return [
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            *(Route(path, self.rerank, methods=["POST"]) for path in RERANK_PATHS),
            *(Route(path, self.score, methods=["POST"]) for path in SCORE_PATHS),
        ]

    async def embeddings(self, request: Request) -> Response:
        """``POST /v1/embeddings``."""
        return await self._answered(request, "/v1/embeddings")

    async def rerank(self, request: Request) -> Response:
        """``POST /v1/rerank``."""
        return await self._answered(request, "/v1/rerank")

    async def score(self, request: Request) -> Response:
        """``POST /v1/score``."""
        return await self._answered(request, "/v1/score")

    async def _answered(self, request: Request, path: str) -> Response:
        raw = await read_body(request, self._max_body_bytes)
        caller: Caller = request.scope[CALLER]
        call = await self._calls.prepare(path, raw, caller)
        worker, timeout = self._calls.worker, self._request_timeout
        try:
            values = await compute(worker, call, timeout, caller.exchange, hung_up(request.receive))
        except Disconnected:
            record_error(request.scope, DISCONNECTED)
            return Unsent()
        document = await call.document(values)
        headers = {**self._headers(call.job.tenant), **cost_header(call.cost())}
        return Response(document, headers=headers, media_type="application/json")
