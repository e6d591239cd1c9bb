"""Calls of embeddings, reranking and scores (HTTP requests or lines of batches): their bodies, and from body to
response.

A body becomes a `PoolingCall`, `compute` submits it and waits for its results, and its document is the response.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, Protocol

from pydantic import BeforeValidator, Field, SkipValidation

from headrace.api.auth.api_keys import tenant
from headrace.api.body import parse_beside
from headrace.api.compile.call import usage
from headrace.api.errors import ApiError, invalid, lost, shutting_down, timed_out, turned_away
from headrace.api.exchange import COST_HEADER, Caller, Exchange
from headrace.api.rate_limit_headers import rate_headers
from headrace.api.replies import written
from headrace.api.wire import NotYet, Wire, is_token_ids, wrong_type, wrong_value
from headrace.core.embedding import TokenRow
from headrace.core.request import FinishReason
from headrace.service.embedding_models import (
    MAX_INPUTS,
    InputTooLong,
    PoolingModel,
    PoolingModels,
    Values,
    VectorModel,
    as_base64,
    as_json,
    check_truncation,
    cosine,
    finish,
    pair_rows,
    prompt_of,
    side_rows,
    text_rows,
)
from headrace.service.embedding_worker import EmbeddingFailed, EmbeddingJob
from headrace.service.service import Refused

MAX_TOKENS = 2**31 - 1
_FORMS = "a string, a list of strings, a list of token ids, or a list of lists of token ids"

_ANYWHERE: dict[str, tuple[object, ...]] = {
    "priority": (0,),
    "add_special_tokens": (True,),
    "mm_processor_kwargs": ({},),
    "truncation_side": (),
}
_SCORES = _ANYWHERE | {"activation": (True,), "use_activation": (True,), "softmax": (True,)}

EMBEDDINGS: NotYet = _ANYWHERE | {
    "messages": (),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "embedding_types": (["float"],),
}
RERANK: NotYet = _SCORES | {"rank_fields": ([],), "max_chunks_per_doc": ()}
SCORE: NotYet = _SCORES | {"data_1": (), "data_2": (), "items": ()}


def _counted(values: Sequence[Any], what: str) -> None:
    """Raise unless there are 1 to `MAX_INPUTS` values, none of them empty."""
    if len(values) > MAX_INPUTS:
        raise wrong_value(f"must have at most {MAX_INPUTS} {what}, got {len(values)}")
    if not values or not all(values):
        raise wrong_value("must not be empty")


def _inputs(value: Any) -> Any:
    """A list of texts or of lists of token ids."""
    if isinstance(value, str):
        inputs: Any = [value]
    elif is_token_ids(value) and value:
        inputs = [value]
    else:
        inputs = value
    if not isinstance(inputs, list):
        raise wrong_type(_FORMS)
    if not (all(isinstance(each, str) for each in inputs) or all(map(is_token_ids, inputs))):
        raise wrong_type(_FORMS)
    _counted(inputs, "inputs")
    return inputs


def _texts(value: Any) -> Any:
    """A list of texts."""
    if value is None:
        return None
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
        raise wrong_type("a string or a list of strings")
    _counted(texts, "texts")
    return texts


def _documents(value: Any) -> Any:
    """A list of texts; a document may also be an object with its text."""
    expected = "a list of strings or of objects with a field text"
    if not isinstance(value, list):
        raise wrong_type(expected)
    texts = []
    for each in value:
        text = each.get("text") if isinstance(each, dict) and set(each) == {"text"} else each
        if not isinstance(text, str):
            raise wrong_type(expected)
        texts.append(text)
    _counted(texts, "documents")
    return texts


Texts = Annotated[SkipValidation[list[str] | None], BeforeValidator(_texts)]


class PoolingBody(Wire):
    """The fields that all of these endpoints have."""

    model: str | None = None
    user: str | None = Field(None, max_length=512)
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        le=MAX_TOKENS,
        description="Cut longer inputs to this many tokens; -1: to the model's limit.",
    )
    include_cost: bool | None = Field(None, description="Add `cost` and `cost_details` to `usage`.")


class EmbeddingBody(PoolingBody):
    """Texts to convert to vectors."""

    input: Annotated[SkipValidation[list[str] | list[list[int]]], BeforeValidator(_inputs)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1, description="Truncate each vector to this many numbers.")
    normalize: bool | None = Field(
        None, description="Whether vectors are scaled to length 1 (default: as in the model's files)."
    )
    prompt_name: str | None = Field(None, description="Name of the model's prompt to put before each text.")


class RerankBody(PoolingBody):
    """Documents to order by their relevance for a query."""

    query: str = Field(min_length=1)
    documents: Annotated[SkipValidation[list[str]], BeforeValidator(_documents)]
    top_n: int | None = Field(
        None, ge=0, le=MAX_TOKENS, description="Return only this many documents; 0: all."
    )
    return_documents: bool = True
    max_tokens_per_doc: int | None = Field(None, ge=1, le=MAX_TOKENS, description="Cut longer documents.")


class ScoreBody(PoolingBody):
    """Pairs of texts to score; one text is paired with each of several."""

    text_1: Texts = None
    text_2: Texts = None
    queries: Texts = Field(None, description="Another name of text_1.")
    documents: Texts = Field(None, description="Another name of text_2.")

    def sides(self) -> tuple[list[str] | None, list[str] | None]:
        """The first and the second texts."""
        if self.queries is not None or self.documents is not None:
            return self.queries, self.documents
        return self.text_1, self.text_2

    def pairs(self) -> list[tuple[str, str]]:
        """The pairs to score.

        Raises:
            ApiError: a side is missing or given twice, or the numbers of texts do not match.
        """
        one, other = self.sides()
        named = self.queries is not None or self.documents is not None
        numbered = self.text_1 is not None or self.text_2 is not None
        if named == numbered or one is None or other is None:
            raise invalid(
                "give text_1 and text_2, or queries and documents", "queries" if named else "text_1"
            )
        if len(one) not in (1, len(other)):
            raise invalid(
                f"there are {len(one)} and {len(other)} texts: give one, or as many as on the other side",
                "queries" if named else "text_1",
            )
        firsts = one * len(other) if len(one) == 1 else one
        return list(zip(firsts, other, strict=True))


CostOf = Callable[[Iterable[str]], Mapping[str, Any]]
"""``cost`` and ``cost_details`` of calls, by their ids."""

Pairs = Sequence[tuple[str, str]]


class PoolingWorker(Protocol):
    """What computes calls: the `EmbeddingWorker`, or in a front end the connection to it."""

    def submit(self, job: EmbeddingJob) -> None: ...

    def end(self, job: EmbeddingJob, why: FinishReason) -> None: ...


class PoolingCall(NamedTuple):
    """A call that has not been submitted. ``document`` converts its results to the response; ``cost`` returns its cost
    so far, if the client asked for it.
    """

    job: EmbeddingJob
    document: Callable[[Values], Awaitable[bytes]]
    cost: Callable[[], Mapping[str, Any]]


class PoolingCalls:
    """The calls to ``models``; the error for a missing model names the option that loads it.

    ``cost`` returns the cost of calls; None: the server has no prices.
    """

    def __init__(
        self,
        worker: PoolingWorker,
        models: PoolingModels,
        now: Callable[[], float],
        cost: CostOf | None = None,
    ) -> None:
        self.worker = worker
        self._models = models
        self._now = now
        self._cost = cost
        self.open: Mapping[str, Callable[[bytes, Caller], Awaitable[PoolingCall]]] = {
            "/v1/embeddings": self._embeddings,
            "/v1/rerank": self._rerank,
            "/v1/score": self._score,
        }

    @property
    def paths(self) -> tuple[str, ...]:
        """The endpoints that have a model."""
        names = tuple(self.open)
        return names if self._models.embedding is not None else names[1:] if self._models.all() else ()

    async def prepare(self, path: str, raw: bytes, caller: Caller) -> PoolingCall:
        """The call of a body that was sent to ``path``, one of `open`.

        Raises:
            ApiError: it cannot be computed.
            InvalidParameter: an input or a parameter is invalid.
        """
        try:
            return await self.open[path](raw, caller)
        except InputTooLong as error:
            raise invalid(f"{error}.", error.param, "context_length_exceeded") from None

    async def _embeddings(self, raw: bytes, caller: Caller) -> PoolingCall:
        body = await parse_beside(raw, EmbeddingBody, EMBEDDINGS)
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
        normalize = model.normalize if body.normalize is None else body.normalize
        job, cost = self._job(body, caller, model, "embed", rows)

        async def document(vectors: Values) -> bytes:
            def written() -> bytes:
                shown = finish(vectors, body.dimensions, normalize)
                return embeddings_document(job, shown, body.encoding_format, charged)

            charged = cost()
            return await asyncio.to_thread(written)

        return PoolingCall(job, document, cost)

    async def _rerank(self, raw: bytes, caller: Caller) -> PoolingCall:
        body = await parse_beside(raw, RerankBody, RERANK)
        pairs = [(body.query, each) for each in body.documents]
        texts = body.documents if body.return_documents else None
        return await self._scored(
            body,
            caller,
            "rerank",
            pairs,
            "documents",
            lambda job, scores, cost: ranking_document(job, scores, texts, body.top_n or 0, cost),
            body.max_tokens_per_doc,
        )

    async def _score(self, raw: bytes, caller: Caller) -> PoolingCall:
        body = await parse_beside(raw, ScoreBody, SCORE)
        param = "documents" if body.text_2 is None else "text_2"
        return await self._scored(body, caller, "score", body.pairs(), param, scores_document)

    async def _scored(
        self,
        body: PoolingBody,
        caller: Caller,
        task: str,
        pairs: Pairs,
        param: str,
        shown: Callable[[EmbeddingJob, list[float], Mapping[str, Any]], bytes],
        second_limit: int | None = None,
    ) -> PoolingCall:
        """The score of each pair: the cross-encoder's, or else the cosine similarity of the embeddings."""
        cross, vectors = self._models.rerank, self._models.embedding
        asked = self._models.name_of(body.model)
        scores: Callable[[Values], list[float]]
        model: PoolingModel
        if cross is not None and not (vectors is not None and asked == vectors.name):
            _check_name(cross, asked)
            limit = check_truncation(cross, body.truncate_prompt_tokens)
            rows = await asyncio.to_thread(
                pair_rows, cross, pairs, param=param, limit=limit, second_limit=second_limit
            )
            model, scores = cross, _first_numbers
        elif vectors is None:
            raise _absent("a cross-encoder", "--rerank-model, or an embedding model with --embedding-model")
        else:
            _check_name(vectors, asked)
            limits = check_truncation(vectors, body.truncate_prompt_tokens), second_limit
            rows, at = await asyncio.to_thread(side_rows, vectors, pairs, param, *limits)
            model, scores = vectors, partial(_similarities, at)
        job, cost = self._job(body, caller, model, task, rows)

        async def document(values: Values) -> bytes:
            charged = cost()
            return await asyncio.to_thread(lambda: shown(job, scores(values), charged))

        return PoolingCall(job, document, cost)

    def _vector_model(self, asked: str | None) -> VectorModel:
        model = self._models.embedding
        if model is None:
            raise _absent("an embedding model", "--embedding-model")
        _check_name(model, self._models.name_of(asked))
        return model

    def _job(
        self, body: PoolingBody, caller: Caller, model: PoolingModel, task: str, rows: Sequence[TokenRow]
    ) -> tuple[EmbeddingJob, Callable[[], Mapping[str, Any]]]:
        """The job of a call, and its cost."""
        tenant_name = tenant(caller.key_id, caller.tenant_header, body.user)
        job = EmbeddingJob(f"{task}-{secrets.token_hex(12)}", tenant_name, task, model, rows, self._now())
        if not body.include_cost and not caller.asks_cost:
            return job, dict
        price = self._cost
        if price is None:
            field = "include_cost" if body.include_cost else COST_HEADER
            raise invalid(
                f"{field}: this server has no prices; it needs --device-price or prices of tokens", field
            )
        return job, lambda: price([job.id])


def _first_numbers(values: Values) -> list[float]:
    return [float(value) for value in values[:, 0]]


def _similarities(at: Sequence[tuple[int, int]], values: Values) -> list[float]:
    return cosine(values[[one for one, _ in at]], values[[other for _, other in at]])


def _check_name(model: PoolingModel, asked: str | None) -> None:
    if asked is not None and asked != model.name:
        message = f"The model {asked!r:.200} is not available on this route; it has {model.name!r:.200}."
        raise ApiError(404, message, param="model", code="model_not_found")


def _absent(what: str, option: str) -> ApiError:
    return ApiError(
        404, f"This server has no such model: start it with {what}, {option}.", code="model_not_found"
    )


def embeddings_document(job: EmbeddingJob, vectors: Values, encoding: str, cost: Mapping[str, Any]) -> bytes:
    """The body of ``/v1/embeddings``; call it on a worker thread. It yields to other threads after each vector."""
    items = []
    for index, vector in enumerate(vectors):
        shown = f'"{as_base64(vector)}"' if encoding == "base64" else as_json(vector)
        items.append(f'{{"object": "embedding", "index": {index}, "embedding": {shown}}}')
    head = {
        "id": job.id,
        "object": "list",
        "created": int(time.time()),
        "model": job.model.name,
        "usage": _tokens(job, cost),
    }
    return f'{json.dumps(head)[:-1]}, "data": [{", ".join(items)}]}}'.encode()


def ranking_document(
    job: EmbeddingJob,
    scores: Sequence[float],
    documents: Sequence[str] | None,
    top_n: int,
    cost: Mapping[str, Any],
) -> bytes:
    """The body of ``/v1/rerank``: the best documents first, with their texts if ``documents`` are given."""
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: top_n or None]
    results = []
    for index in best:
        shown = {} if documents is None else {"document": {"text": documents[index]}}
        results.append({"index": index, **shown, "relevance_score": scores[index]})
    return written({"id": job.id, "model": job.model.name, "usage": _tokens(job, cost), "results": results})


def scores_document(job: EmbeddingJob, scores: Sequence[float], cost: Mapping[str, Any]) -> bytes:
    """The body of ``/v1/score``: a score for each pair, in order."""
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    created = int(time.time())
    head = {"id": job.id, "object": "list", "created": created, "model": job.model.name}
    return written(head | {"data": data, "usage": _tokens(job, cost)})


def _tokens(job: EmbeddingJob, cost: Mapping[str, Any]) -> dict[str, Any]:
    """The tokens of a call, and its ``cost`` if it was requested."""
    return {"prompt_tokens": job.tokens, "total_tokens": job.tokens, **cost}


class LoggedCall:
    """The fields of a call for the access log and traces; see `api.exchange.AnsweredCall`."""

    stream = False
    cache_note = ""
    first_token_at: float | None = None
    service_class = "default"

    def __init__(self, call: PoolingCall) -> None:
        self._call = call

    @property
    def finish_reasons(self) -> list[str]:
        """Always empty: embeddings have no finish reason."""
        return []

    def cost(self) -> Mapping[str, Any]:
        """The cost so far; empty if the client has not asked for it."""
        return self._call.cost()

    def tokens(self) -> dict[str, Any]:
        """The tokens of the call."""
        return usage(self._call.job.tokens, 0, 0)


async def compute(
    worker: PoolingWorker, call: PoolingCall, timeout: float, exchange: Exchange | None = None
) -> Values:
    """The results of a call, which ends after ``timeout`` seconds.

    ``exchange`` is the HTTP request of the call, if there is one: the call ends when its client disconnects.

    Raises:
        ApiError: the call was rejected, failed or timed out.
        Disconnected: the client has disconnected.
    """
    job = call.job
    if exchange is not None:
        exchange.opened(job.id, job.model.name, job.tenant, ())
    why = FinishReason.CANCELLED
    try:
        worker.submit(job)
        waiting = asyncio.wait((job.result,), timeout=timeout)
        if exchange is None:
            done, _ = await waiting
        else:
            exchange.call = LoggedCall(call)
            done, _ = await exchange.while_connected(waiting)
        if not done:
            why = FinishReason.TIMEOUT
            raise timed_out(timeout)
        if job.result.cancelled():
            raise shutting_down()
        why = FinishReason.FAILED
        values = job.result.result()
        why = FinishReason.STOP
        return values
    except Refused as refused:
        raise turned_away(refused.verdict, rate_headers(refused.rooms)) from None
    except EmbeddingFailed as error:
        raise lost(str(error)) from None
    finally:
        worker.end(job, why)
