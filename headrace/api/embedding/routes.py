"""``/v1/embeddings``, ``/v1/rerank`` and ``/v1/score``; the models' cards; a server that generates no text."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from starlette.requests import Request
from starlette.responses import Response

from headrace.api.auth.access import Access
from headrace.api.body import read_body
from headrace.api.embedding.calls import (
    EmbeddingBody,
    PoolingCalls,
    RerankBody,
    ScoreBody,
    compute,
)
from headrace.api.errors import ApiError, model_not_found
from headrace.api.exchange import CALLER, Caller
from headrace.api.replies import cost_header
from headrace.api.routing import Endpoints, route
from headrace.service.embedding_models import PoolingModel


class EmbeddingApi(Endpoints):
    """The endpoints of ``calls``.

    ``max_body_bytes`` limits a request's body, ``request_timeout`` (seconds) its duration. ``headers`` returns the
    headers of every response to a tenant, of the model with this name.
    """

    def __init__(
        self,
        calls: PoolingCalls,
        *,
        max_body_bytes: int,
        request_timeout: float,
        headers: Callable[[str, str], Mapping[str, str]] = lambda tenant, model: {},
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
        values = await compute(worker, call, timeout, caller.exchange)
        document = await call.document(values)
        headers = {**self._headers(call.job.tenant, call.job.model.name), **cost_header(call.cost())}
        return Response(document, headers=headers, media_type="application/json")


class PoolingCard:
    """A model's name and limit, for `operations.status`."""

    def __init__(self, model: PoolingModel, also_named: Sequence[str] = ()) -> None:
        self.name = model.name
        self.names = (model.name, *also_named)
        self.max_model_len = model.max_tokens
        self.created = int(time.time())
        self.card = {
            "id": model.name,
            "object": "model",
            "created": self.created,
            "owned_by": "headrace",
            "root": model.name,
            "parent": None,
            "max_model_len": model.max_tokens,
        }

    def check_name(self, asked: str | None) -> None:
        """Raise `ApiError` 404 unless ``asked`` names this model or is None."""
        if asked is not None and asked not in self.names:
            raise model_not_found(str(asked))


class NoGeneration(Endpoints):
    """Text generation on a server without a model for it: 404; ``model`` is the name of the model that it has."""

    def __init__(self, model: str) -> None:
        self._model = model

    @route("POST /v1/chat/completions", Access.INFERENCE)
    @route("POST /v1/completions", Access.INFERENCE)
    @route("POST /v1/responses", Access.INFERENCE)
    @route("POST /v1/responses/input_tokens", Access.INFERENCE)
    @route("POST /v1/messages", Access.INFERENCE)
    @route("POST /v1/messages/count_tokens", Access.INFERENCE)
    @route("POST /tokenize", Access.INFERENCE)
    @route("POST /detokenize", Access.INFERENCE)
    async def refuse(self, request: Request) -> Response:
        """Return 404."""
        raise ApiError(
            404,
            f"This server has only {self._model}, which generates no text: start headrace serve with a model that "
            f"does, and name {self._model} with --embedding-model or --rerank-model.",
            code="model_not_found",
        )
