"""Embeddings and scores in this process: batches of inputs, one after the other, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from headrace.compute.encoder.models import run
from headrace.config import ConfigError
from headrace.core.embedding import InputQueue, TokenRow
from headrace.core.request import InvalidParameter
from headrace.llm.outputs import EmbeddingOutput, ScoreOutput
from headrace.serve.embedding.inputs import check_truncation, pair_rows, prompt_of, side_rows, text_rows
from headrace.serve.embedding.models import PoolingModel, PoolingModels, Values
from headrace.serve.embedding.vectors import cosine, finish


def embed(
    models: PoolingModels,
    inputs: Sequence[str | Sequence[int]],
    *,
    dimensions: int | None,
    normalize: bool | None,
    prompt_name: str | None,
    truncate: int | None,
    advance: Callable[[int], None],
) -> list[EmbeddingOutput]:
    """The vectors of texts or token ids.

    Raises:
        ConfigError: there is no embedding model.
        InvalidParameter: an input or parameter that cannot be used.
    """
    model = models.embedding
    if model is None:
        raise ConfigError("there is no embedding model: give one as MODEL, or with embedding_model")
    if dimensions is not None and not 1 <= dimensions <= model.dimensions:
        raise InvalidParameter("dimensions", f"dimensions must be 1 to {model.dimensions}, got {dimensions}")
    limit = check_truncation(model, truncate)
    rows = text_rows(model, inputs, param="inputs", prompt=prompt_of(model, prompt_name), limit=limit)
    vectors = _compute(model, rows, advance)
    shown = finish(vectors, dimensions, model.normalize if normalize is None else normalize)
    return [
        EmbeddingOutput(vector.tolist(), list(row.tokens)) for vector, row in zip(shown, rows, strict=True)
    ]


def score(
    models: PoolingModels,
    pairs: Sequence[tuple[str, str]],
    *,
    truncate: int | None,
    advance: Callable[[int], None],
) -> list[ScoreOutput]:
    """The score of each pair by the cross-encoder, else the cosine of the embeddings.

    Raises:
        ConfigError: there is no model for it.
        InvalidParameter: an input or parameter that cannot be used.
    """
    if models.rerank is not None:
        limit = check_truncation(models.rerank, truncate)
        rows = pair_rows(models.rerank, pairs, param="documents", limit=limit)
        return [ScoreOutput(float(value)) for value in _compute(models.rerank, rows, advance)[:, 0]]
    model = models.embedding
    if model is None:
        raise ConfigError("there is no cross-encoder: give one as MODEL, or with rerank_model")
    rows, at = side_rows(model, pairs, "documents", check_truncation(model, truncate), None)
    values = _compute(model, rows, advance)
    similar = cosine(values[[one for one, _ in at]], values[[other for _, other in at]])
    return [ScoreOutput(each) for each in similar]


def pairs_of(queries: str | Sequence[str], documents: str | Sequence[str]) -> list[tuple[str, str]]:
    """One query with each document, or each query with its document.

    Raises:
        InvalidParameter: there are several queries, and another number of documents.
    """
    ones = [queries] if isinstance(queries, str) else list(queries)
    others = [documents] if isinstance(documents, str) else list(documents)
    if len(ones) == 1:
        ones *= len(others)
    if len(ones) != len(others):
        raise InvalidParameter("documents", f"{len(ones)} queries for {len(others)} documents")
    return list(zip(ones, others, strict=True))


def _compute(model: PoolingModel, rows: Sequence[TokenRow], advance: Callable[[int], None]) -> Values:
    queue: InputQueue[str] = InputQueue()
    unit = model.unit_tokens
    queue.add("", "", [-(-len(row.tokens) // unit) * unit for row in rows])
    values: list[Values | None] = [None] * len(rows)
    while queue:
        batch = [index for _, index in queue.take(model.batch_tokens)]
        for index, each in zip(batch, run(model.run([rows[index] for index in batch])), strict=True):
            values[index] = each
            advance(len(rows[index].tokens))
    return np.stack([each for each in values if each is not None]) if rows else np.empty((0, 1), np.float32)
