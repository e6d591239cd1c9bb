"""Embeddings and scores in this process: the inputs of a call, and its outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from headrace.compute.encoder.models import run
from headrace.config import ConfigError
from headrace.core.embedding import InputQueue, TokenRow
from headrace.core.request import InvalidParameter
from headrace.llm.job import items
from headrace.llm.outputs import EmbeddingOutput, ScoreOutput
from headrace.service.embedding_models import (
    PoolingModel,
    PoolingModels,
    Values,
    check_truncation,
    cosine,
    finish,
    pair_rows,
    prompt_of,
    side_rows,
    text_rows,
)

OutputT = TypeVar("OutputT")


class PoolingTask(NamedTuple, Generic[OutputT]):
    """Inputs ``rows`` of a model; ``outputs`` converts its results [rows, numbers] to outputs."""

    task: str
    model: PoolingModel
    rows: Sequence[TokenRow]
    outputs: Callable[[Values], list[OutputT]]


def embedding_task(
    models: PoolingModels,
    inputs: Sequence[str | Sequence[int]],
    *,
    dimensions: int | None,
    normalize: bool | None,
    prompt_name: str | None,
    truncate: int | None,
) -> PoolingTask[EmbeddingOutput]:
    """The vectors of texts or token ids.

    Raises:
        ConfigError: there is no embedding model.
        InvalidParameter: an input or parameter is invalid.
    """
    model = models.embedding
    if model is None:
        raise ConfigError("there is no embedding model: set one as MODEL, or with embedding_model")
    _check_types(
        dimensions=dimensions, normalize=normalize, prompt_name=prompt_name, truncate_prompt_tokens=truncate
    )
    if dimensions is not None and not 1 <= dimensions <= model.dimensions:
        raise InvalidParameter("dimensions", f"dimensions must be 1 to {model.dimensions}, got {dimensions}")
    limit = check_truncation(model, truncate)
    rows = text_rows(model, inputs, param="inputs", prompt=prompt_of(model, prompt_name), limit=limit)
    unit = model.normalize if normalize is None else normalize
    return PoolingTask("embed", model, rows, partial(_vectors, rows, dimensions, unit))


def score_task(
    models: PoolingModels, pairs: Sequence[tuple[str, str]], truncate: int | None
) -> PoolingTask[ScoreOutput]:
    """The score of each pair: the cross-encoder's, or else the cosine similarity of the embeddings.

    Raises:
        ConfigError: there is no model for it.
        InvalidParameter: an input or parameter is invalid.
    """
    _check_types(truncate_prompt_tokens=truncate)
    if models.rerank is not None:
        limit = check_truncation(models.rerank, truncate)
        rows = pair_rows(models.rerank, pairs, param="documents", limit=limit)
        return PoolingTask("score", models.rerank, rows, _scores)
    model = models.embedding
    if model is None:
        raise ConfigError("there is no cross-encoder: set one as MODEL, or with rerank_model")
    rows, at = side_rows(model, pairs, "documents", check_truncation(model, truncate), None)
    return PoolingTask("score", model, rows, partial(_similarities, at))


def pairs_of(queries: str | Sequence[str], documents: str | Sequence[str]) -> list[tuple[str, str]]:
    """One query with each document, or each query with its document.

    Raises:
        InvalidParameter: a value is no text, or there are several queries, and a different number of documents.
    """
    ones, others = _texts(queries, "queries"), _texts(documents, "documents")
    if len(ones) == 1:
        ones *= len(others)
    if len(ones) != len(others):
        raise InvalidParameter("documents", f"{len(ones)} queries for {len(others)} documents")
    return list(zip(ones, others, strict=True))


def _texts(given: str | Sequence[str], param: str) -> list[str]:
    texts = [given] if isinstance(given, str) else items(given, param, "text or a list of texts")
    for at, text in enumerate(texts):
        if not isinstance(text, str):
            raise InvalidParameter(param, f"{param}[{at}] must be text, got {type(text).__name__}")
    return texts


def _check_types(**given: object) -> None:
    """Refuse values of wrong types, by name; None is allowed."""
    for param, value in given.items():
        kind, shown = _KINDS.get(param, (int, "an integer"))
        if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise InvalidParameter(param, f"{param} must be {shown}, got {value!r:.80}")


_KINDS: Mapping[str, tuple[type, str]] = {"normalize": (bool, "True or False"), "prompt_name": (str, "text")}


def compute(
    task: PoolingTask[OutputT],
    turn: Callable[[], AbstractContextManager[None]],
    advance: Callable[[int], None],
) -> list[OutputT]:
    """The outputs, computed on this thread in batches, each in a ``turn``.

    ``advance`` is called with the tokens of each input.
    """
    model, rows = task.model, task.rows
    queue: InputQueue[str] = InputQueue()
    unit = model.unit_tokens
    queue.add("", "", [-(-len(row.tokens) // unit) * unit for row in rows])
    values: list[Values | None] = [None] * len(rows)
    while queue:
        batch = [index for _, index in queue.take(model.batch_tokens)]
        with turn():
            computed = run(model.run([rows[index] for index in batch]))
        for index, each in zip(batch, computed, strict=True):
            values[index] = each
            advance(len(rows[index].tokens))
    return task.outputs(np.stack([each for each in values if each is not None])) if rows else []


def _vectors(
    rows: Sequence[TokenRow], dimensions: int | None, normalize: bool, vectors: Values
) -> list[EmbeddingOutput]:
    shown = finish(vectors, dimensions, normalize)
    return [
        EmbeddingOutput(vector.tolist(), list(row.tokens)) for vector, row in zip(shown, rows, strict=True)
    ]


def _scores(values: Values) -> list[ScoreOutput]:
    return [ScoreOutput(float(value)) for value in values[:, 0]]


def _similarities(at: Sequence[tuple[int, int]], values: Values) -> list[ScoreOutput]:
    return [ScoreOutput(each) for each in cosine(values[[a for a, _ in at]], values[[b for _, b in at]])]
