"""The endpoints ``/v1/embeddings``, ``/v1/rerank`` and ``/v1/score``, and their aliases."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response

from headrace.api.auth.access import Access
from headrace.api.body import read_body
from headrace.api.caller import CALLER, Caller
from headrace.api.embedding.calls import PoolingCalls
from headrace.api.embedding.exchange import Disconnected, Unsent, compute
from headrace.api.embedding.wire import EmbeddingBody, RerankBody, ScoreBody
from headrace.api.exchange import DISCONNECTED, record_error
from headrace.api.replies import cost_header, hung_up
from headrace.api.routing import Endpoints, route

RERANK_PATHS = ("/v1/rerank", "/rerank", "/v2/rerank")
SCORE_PATHS = ("/v1/score", "/score")


class EmbeddingApi(Endpoints):
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

    @route(
        "POST /v1/embeddings",
        Access.INFERENCE,
        "Convert texts to vectors. Needs the server's option --embedding-model.",
        body=EmbeddingBody,
        example={"input": ["A first text.", "A second text."]},
    )
    async def embeddings(self, request: Request) -> Response:
        return await self._answered(request, "/v1/embeddings")

    @route(
        "POST /v1/rerank",
        Access.INFERENCE,
        "Order documents by their relevance for a query. Needs --rerank-model or --embedding-model.",
        body=RerankBody,
        example={
            "query": "What is a fox?",
            "documents": ["A fox is an animal.", "A box is a thing."],
            "top_n": 1,
        },
    )
    @route("POST /rerank", Access.INFERENCE, "Alias of /v1/rerank.", body=RerankBody)
    @route("POST /v2/rerank", Access.INFERENCE, "Alias of /v1/rerank.", body=RerankBody)
    async def rerank(self, request: Request) -> Response:
        return await self._answered(request, "/v1/rerank")

    @route(
        "POST /v1/score",
        Access.INFERENCE,
        "Score pairs of texts. Needs --rerank-model or --embedding-model.",
        body=ScoreBody,
        example={"text_1": "What is a fox?", "text_2": ["A fox is an animal.", "A box is a thing."]},
    )
    @route("POST /score", Access.INFERENCE, "Alias of /v1/score.", body=ScoreBody)
    async def score(self, request: Request) -> Response:
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
