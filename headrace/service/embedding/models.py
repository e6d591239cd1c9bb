"""The interface of embedding models and cross-encoders; `compute.encoder` implements it."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.core.embedding import TokenRow

Values: TypeAlias = NDArray[np.float32]
"""Vectors [inputs, dimensions], or scores [inputs, 1]."""


class Tokenizes(Protocol):
    """Converts texts to rows of tokens with special tokens, truncated to ``limit`` tokens.

    Raises:
        ValueError: a text is not valid Unicode, or a limit leaves no room for the special tokens.
    """

    def texts(self, texts: Sequence[str], limit: int | None = None) -> list[TokenRow]: ...

    def pairs(
        self, pairs: Sequence[tuple[str, str]], limit: int | None = None, second_limit: int | None = None
    ) -> list[TokenRow]: ...


class PoolingModel(Protocol):
    """A model that computes a vector or a score for each input.

    ``run`` computes a batch and yields after each part of it. A batch has at most ``batch_tokens`` tokens, where each
    input is rounded up to a multiple of ``unit_tokens``; one input has at most ``max_tokens``.
    """

    @property
    def name(self) -> str: ...

    @property
    def tokenizer(self) -> Tokenizes: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_tokens(self) -> int: ...

    @property
    def batch_tokens(self) -> int: ...

    @property
    def unit_tokens(self) -> int: ...

    def run(self, rows: Sequence[TokenRow]) -> Generator[None, None, Values]: ...


class VectorModel(PoolingModel, Protocol):
    """An embedding model: vectors of ``dimensions``, of length one if ``normalize``; see `inputs` for the prompts."""

    @property
    def dimensions(self) -> int: ...

    @property
    def normalize(self) -> bool: ...

    @property
    def prompts(self) -> Mapping[str, str]: ...

    @property
    def default_prompt(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class PoolingModels:
    """The models for embeddings and reranking; each may be missing.

    ``also_named`` are further names that requests may use for a model, by the model's own.
    """

    embedding: VectorModel | None = None
    rerank: PoolingModel | None = None
    also_named: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def name_of(self, asked: str | None) -> str | None:
        """The own name of the model that a request names; ``asked`` itself if it is none of the further names."""
        return next((own for own, names in self.also_named.items() if asked in names), asked)

    def all(self) -> list[PoolingModel]:
        """The models that are not missing."""
        return [model for model in (self.embedding, self.rerank) if model is not None]
