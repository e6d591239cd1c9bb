"""The endpoints ``/v1/embeddings``, ``/v1/rerank`` and ``/v1/score``, and their other paths."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.core.embedding import TokenRow
from headrace.serve.auth.api_keys import tenant
from headrace.serve.embedding.inputs import (
    InputTooLong,
    check_truncation,
    pair_rows,
    prompt_of,
    side_rows,
    text_rows,
)
from headrace.serve.embedding.job import EmbeddingJob
from headrace.serve.embedding.models import PoolingModel, PoolingModels, Values, VectorModel
from headrace.serve.embedding.vectors import cosine, finish
from headrace.serve.embedding.worker import EmbeddingWorker
from headrace.serve.http.body import read_body
from headrace.serve.http.edge import CALLER
from headrace.serve.http.embedding import documents
from headrace.serve.http.embedding.exchange import Disconnected, Unsent, compute
from headrace.serve.http.embedding.wire import (
    EMBEDDINGS,
    RERANK,
    SCORE,
    EmbeddingBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
)
from headrace.serve.http.errors import ApiError, invalid
from headrace.serve.http.exchange import DISCONNECTED, record_error
from headrace.serve.http.wire import parse

RERANK_PATHS = ("/v1/rerank", "/rerank", "/v2/rerank")
SCORE_PATHS = ("/v1/score", "/score")

Pairs = Sequence[tuple[str, str]]


class EmbeddingApi:
    """The endpoints. ``models`` are those that the server has; without one, an endpoint names the option for it.

    ``max_body_bytes`` bounds what is read of a request, ``request_timeout`` (seconds) how long it may take.
    ``headers`` are those that every answer to a tenant carries.
    """

    def __init__(
        self,
        worker: EmbeddingWorker,
        models: PoolingModels,
        now: Callable[[], float],
        *,
        max_body_bytes: int,
        request_timeout: float,
        headers: Callable[[str], Mapping[str, str]] = lambda tenant: {},
    ) -> None:
        self._worker = worker
        self._models = models
        self._now = now
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
        return await _answered(request, self._embeddings)

    async def rerank(self, request: Request) -> Response:
        """``POST /v1/rerank``."""
        return await _answered(request, self._rerank)

    async def score(self, request: Request) -> Response:
        """``POST /v1/score``."""
        return await _answered(request, self._score)

    async def _embeddings(self, request: Request) -> Response:
        raw = await read_body(request, self._max_body_bytes)
        body = parse(raw, EmbeddingBody, EMBEDDINGS)
        model = self._vector_model(body.model)
        if body.dimensions is not None and body.dimensions > model.dimensions:
            raise invalid(
                f"dimensions must be at most {model.dimensions}, the length of the vectors of {model.name}",
                "dimensions",
            )
        limit = check_truncation(model, body.truncate_prompt_tokens)
        prompt = prompt_of(model, body.prompt_name)
        rows = await asyncio.to_thread(
            text_rows, model, body.input, param="input", prompt=prompt, limit=limit
        )
        job, vectors = await self._compute(request, body, model, "embed", rows)
        normalize = model.normalize if body.normalize is None else body.normalize
        shown = finish(vectors, body.dimensions, normalize)
        document = await asyncio.to_thread(documents.embeddings, job, shown, body.encoding_format)
        return self._document(job, document)

    async def _rerank(self, request: Request) -> Response:
        raw = await read_body(request, self._max_body_bytes)
        body = parse(raw, RerankBody, RERANK)
        pairs = [(body.query, each) for each in body.documents]
        job, scores = await self._scores(request, body, "rerank", pairs, "documents", body.max_tokens_per_doc)
        texts = body.documents if body.return_documents else None
        return self._document(job, documents.ranking(job, scores, texts, body.top_n or 0))

    async def _score(self, request: Request) -> Response:
        raw = await read_body(request, self._max_body_bytes)
        body = parse(raw, ScoreBody, SCORE)
        param = "documents" if body.text_2 is None else "text_2"
        job, scores = await self._scores(request, body, "score", body.pairs(), param)
        return self._document(job, documents.scored(job, scores))

    async def _scores(
        self,
        request: Request,
        body: PoolingBody,
        task: str,
        pairs: Pairs,
        param: str,
        second_limit: int | None = None,
    ) -> tuple[EmbeddingJob, list[float]]:
        """The score of each pair, by the cross-encoder, else the cosine of their embeddings."""
        cross, vectors = self._models.rerank, self._models.embedding
        if cross is not None and not (vectors is not None and body.model == vectors.name):
            _check_name(cross, body.model)
            limit = check_truncation(cross, body.truncate_prompt_tokens)
            rows = await asyncio.to_thread(
                pair_rows, cross, pairs, param=param, limit=limit, second_limit=second_limit
            )
            job, values = await self._compute(request, body, cross, task, rows)
            return job, [float(value) for value in values[:, 0]]
        if vectors is None:
            raise _absent("a cross-encoder", "--rerank-model, or an embedding model with --embedding-model")
        _check_name(vectors, body.model)
        limits = check_truncation(vectors, body.truncate_prompt_tokens), second_limit
        rows, at = await asyncio.to_thread(side_rows, vectors, pairs, param, *limits)
        job, values = await self._compute(request, body, vectors, task, rows)
        return job, cosine(values[[one for one, _ in at]], values[[other for _, other in at]])

    def _vector_model(self, asked: str | None) -> VectorModel:
        model = self._models.embedding
        if model is None:
            raise _absent("an embedding model", "--embedding-model")
        _check_name(model, asked)
        return model

    async def _compute(
        self, request: Request, body: PoolingBody, model: PoolingModel, task: str, rows: Sequence[TokenRow]
    ) -> tuple[EmbeddingJob, Values]:
        caller = request.scope[CALLER]
        who = tenant(caller.key_id, caller.tenant_header, body.user)
        job = EmbeddingJob(f"{task}-{secrets.token_hex(12)}", who, task, model, rows, self._now())
        return job, await compute(request, self._worker, job, self._request_timeout)

    def _document(self, job: EmbeddingJob, document: bytes) -> Response:
        return Response(document, headers=dict(self._headers(job.tenant)), media_type="application/json")


async def _answered(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
    try:
        return await answer(request)
    except InputTooLong as error:
        raise invalid(f"{error}.", error.param, "context_length_exceeded") from None
    except Disconnected:
        record_error(request.scope, DISCONNECTED)
        return Unsent()


def _check_name(model: PoolingModel, asked: str | None) -> None:
    if asked is not None and asked != model.name:
        message = f"The model {asked!r} is not available on this route; it has {model.name!r}."
        raise ApiError(404, message, param="model", code="model_not_found")


def _absent(what: str, option: str) -> ApiError:
    return ApiError(
        404, f"This server has no such model: start it with {what}, {option}.", code="model_not_found"
    )
