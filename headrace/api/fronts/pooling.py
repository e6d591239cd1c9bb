"""Embeddings, reranking and scores of front ends: text and JSON there, the models at the owner.

```
 front end: parse, tokenize ── POOL, POOL_END ──> owner: admission, quotas, the model between the engine's steps
        <── JSON, base64 ── POOLED, POOL_REFUSED <──
```
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from headrace.api.fronts.messages import Refusal, SentModel, SentPooling, ToFront, ToOwner
from headrace.core.embedding import TokenRow
from headrace.core.ports import LOST_PREFIX
from headrace.core.request import FinishReason
from headrace.service.embedding_models import PoolingModel, PoolingModels, Tokenizes, Values
from headrace.service.embedding_worker import EmbeddingFailed, EmbeddingJob, EmbeddingWorker
from headrace.service.packing import Plain, packed, unpacked
from headrace.service.service import Refused
from headrace.service.thread import ENGINE_FAILED

Send = Callable[[Plain], None]


@dataclass(frozen=True, slots=True, eq=False)
class FrontModel:
    """A `VectorModel` whose vectors or scores another process computes; ``tokenizer`` is that of the model."""

    name: str
    tokenizer: Tokenizes
    vocab_size: int
    max_tokens: int
    batch_tokens: int
    unit_tokens: int
    dimensions: int
    normalize: bool
    prompts: Mapping[str, str]
    default_prompt: str | None

    def run(self, rows: Sequence[TokenRow]) -> Generator[None, None, Values]:
        """Another process computes."""
        raise AssertionError("the weights are in another process")


def front_models(sent: SentPooling, tokenizer: Callable[[SentModel], Tokenizes]) -> PoolingModels:
    """The models that another process described with `sent_models`."""

    def made(model: SentModel | None) -> FrontModel | None:
        if model is None:
            return None
        sizes = model.vocab_size, model.max_tokens, model.batch_tokens, model.unit_tokens
        vectors = model.dimensions, model.normalize, model.prompts, model.default_prompt
        return FrontModel(model.name, tokenizer(model), *sizes, *vectors)

    return PoolingModels(made(sent.embedding), made(sent.rerank), sent.also_named)


def sent_models(models: PoolingModels, tokenizer: Callable[[PoolingModel], tuple[str, bool]]) -> SentPooling:
    """A description of models for `front_models`; ``tokenizer`` says what is needed for a model's tokenizer."""

    def sent(model: PoolingModel) -> SentModel:
        facts = model.vocab_size, model.max_tokens, model.batch_tokens, model.unit_tokens
        return SentModel(model.name, *tokenizer(model), *facts)

    embedding, rerank, vectors = models.embedding, models.rerank, None
    if embedding is not None:
        vectors = sent(embedding)._replace(
            dimensions=embedding.dimensions,
            normalize=embedding.normalize,
            prompts=dict(embedding.prompts),
            default_prompt=embedding.default_prompt,
        )
    named = {name: tuple(names) for name, names in models.also_named.items()}
    return SentPooling(vectors, None if rerank is None else sent(rerank), named)


class RemoteWorker:
    """The `PoolingWorker` of a front end: ``send`` sends its calls to the owner, `take` gets what they answer."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._last = 0
        self._numbers: dict[EmbeddingJob, int] = {}
        self._jobs: dict[int, EmbeddingJob] = {}

    @property
    def open_calls(self) -> int:
        """Number of calls that have not ended."""
        return len(self._jobs)

    def submit(self, job: EmbeddingJob) -> None:
        """Send a call; its `result` is set later, also if the owner refuses it. Always call `end` afterwards."""
        self._last += 1
        self._numbers[job], self._jobs[self._last] = self._last, job
        rows = [tuple(row) for row in job.rows]
        call = job.id, job.tenant, job.task, job.model.name, rows, job.arrived
        self._send((ToOwner.POOL, self._last, call))

    def end(self, job: EmbeddingJob, why: FinishReason) -> None:
        """End a call. Ending it again does nothing."""
        number = self._numbers.pop(job, None)
        if number is None:
            return
        del self._jobs[number]
        if job.open:
            job.result.cancel()
            self._send((ToOwner.POOL_END, number, why.value))

    def take(self, message: Plain) -> EmbeddingJob | None:
        """Give an answer of the owner to its call; returns the call, if it still waits."""
        job = self._jobs.get(message[1])
        if job is None or not job.open:
            return None
        match message:
            case (ToFront.POOLED, _, shape, values, _, _):
                job.result.set_result(np.frombuffer(values, np.float32).reshape(shape))
            case (ToFront.POOL_REFUSED, _, None):
                job.result.cancel()  # the server ends
            case (ToFront.POOL_REFUSED, _, refusal):
                why = unpacked(Refusal, refusal)
                refused = None if why.verdict is None else Refused(why.verdict, why.rooms)
                job.result.set_exception(refused or EmbeddingFailed(why.message))
        return job

    def close(self) -> None:
        """End all calls: the owner has ended."""
        for job in tuple(self._jobs.values()):
            if job.open:
                job.result.cancel()


class OwnedPooling(NamedTuple):
    """What the owner computes for front ends; ``tokenizer`` says what a front end needs for a model's tokenizer."""

    worker: EmbeddingWorker
    models: PoolingModels
    cost: Callable[[Iterable[str]], Mapping[str, Any]] | None
    tokenizer: Callable[[PoolingModel], tuple[str, bool]]

    def sent(self) -> SentPooling:
        """The models as front ends get them."""
        return sent_models(self.models, self.tokenizer)


class FrontJobs:
    """The calls of one front end at the owner; ``send`` sends results, with costs and the ``headers`` of quotas."""

    def __init__(
        self, pooling: OwnedPooling, send: Send, headers: Callable[[str, str], Mapping[str, str]]
    ) -> None:
        self._pooling = pooling
        self._models = {model.name: model for model in pooling.models.all()}
        self._send = send
        self._headers = headers
        self._jobs: dict[int, EmbeddingJob] = {}

    @property
    def open_calls(self) -> int:
        """Number of calls that have not ended."""
        return len(self._jobs)

    def take(self, message: Plain) -> None:
        """A message of the front end."""
        match message:
            case (ToOwner.POOL, number, (id, tenant, task, model, rows, arrived)):
                given = [TokenRow(*row) for row in rows]
                job = EmbeddingJob(id, tenant, task, self._models[model], given, arrived)
                self._jobs[number] = job
                job.result.add_done_callback(lambda result: self._ended(number, job, result))
                try:
                    self._pooling.worker.submit(job)
                except Refused as refused:
                    job.result.set_exception(refused)
            case (ToOwner.POOL_END, number, why):
                if (ended := self._jobs.pop(number, None)) is not None:
                    self._pooling.worker.end(ended, FinishReason(why))

    def close(self) -> None:
        """End all calls: the front end has ended."""
        while self._jobs:
            self._pooling.worker.end(self._jobs.popitem()[1], FinishReason.CANCELLED)

    def _ended(self, number: int, job: EmbeddingJob, result: asyncio.Future[Values]) -> None:
        """Send the result of a call, unless the front end does not wait for it any more."""
        if result.cancelled():
            if self._jobs.pop(number, None) is not None:
                self._send((ToFront.POOL_REFUSED, number, None))
            return
        error = result.exception()
        self._pooling.worker.end(job, FinishReason.STOP if error is None else FinishReason.FAILED)
        if self._jobs.pop(number, None) is None:
            return
        if error is None:
            values = np.ascontiguousarray(result.result(), np.float32)
            cost = None if self._pooling.cost is None else dict(self._pooling.cost([job.id]))
            headers = dict(self._headers(job.tenant, job.model.name))
            self._send((ToFront.POOLED, number, values.shape, values.tobytes(), cost, headers))
            return
        message = str(error)
        known = message == ENGINE_FAILED or message.startswith(LOST_PREFIX)
        refusal = Refusal(message=message if known else "failed")  # what a model raised stays here
        if isinstance(error, Refused):
            refusal = Refusal(error.verdict, error.rooms)
        self._send((ToFront.POOL_REFUSED, number, packed(Refusal, refusal)))
