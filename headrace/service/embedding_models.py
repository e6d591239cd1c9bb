"""The interface of embedding models and cross-encoders; `compute.encoder` implements it."""

from __future__ import annotations

import base64
import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.core.embedding import TokenRow
from headrace.core.request import InvalidParameter

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

    def names(self) -> list[str]:
        """All names that requests may use."""
        further = (name for names in self.also_named.values() for name in names)
        return [*(model.name for model in self.all()), *further]

    def all(self) -> list[PoolingModel]:
        """The models that are not missing."""
        return [model for model in (self.embedding, self.rerank) if model is not None]


# Post-processing of vectors: truncation, normalization, cosine similarity.

_SMALLEST = 1e-12


def finish(vectors: Values, dimensions: int | None, normalize: bool) -> Values:
    """The first ``dimensions`` of each vector (arXiv:2205.13147), scaled to length 1 if ``normalize``."""
    shorter = vectors if dimensions is None else vectors[:, :dimensions]
    return unit(shorter) if normalize else shorter


def unit(vectors: Values) -> Values:
    """Vectors scaled to length 1; a vector of zeros is not changed."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    result: Values = vectors / np.maximum(lengths, _SMALLEST)
    return result


def cosine(one: Values, other: Values) -> list[float]:
    """The cosine similarity of each pair of rows; a single row is compared with all."""
    products: Values = (unit(one) * unit(other)).sum(1)
    return [float(each) for each in products]


def as_base64(vector: Values) -> str:
    """A vector as packed little-endian float32 in base64, as OpenAI sends it."""
    return base64.b64encode(np.ascontiguousarray(vector, "<f4").tobytes()).decode()


def as_json(vector: Values) -> str:
    """A vector as a JSON list."""
    return json.dumps(vector.tolist())


# Converts the inputs of a call to rows of tokens: adds prompts, checks limits, and truncates on request.

MAX_INPUTS = 2048
"""Maximum inputs of a call, as in OpenAI's API."""

QUERY_PROMPTS = ("query",)
DOCUMENT_PROMPTS = ("document", "passage", "corpus")
"""Names that models for sentence-transformers use for their prompts for queries and documents."""


class InputTooLong(InvalidParameter):
    """An input has more tokens than the model reads."""


def check_truncation(model: PoolingModel, truncate: int | None) -> int | None:
    """The token limit that ``truncate`` asks for (None: none; -1: the model's).

    Raises:
        InvalidParameter: it is more than the model's limit, or less than one token.
    """
    if truncate is None:
        return None
    if truncate == -1:
        return model.max_tokens
    if not 1 <= truncate <= model.max_tokens:
        param = "truncate_prompt_tokens"
        raise InvalidParameter(
            param, f"{param} must be -1 or 1 to {model.max_tokens}, the longest input of {model.name}"
        )
    return truncate


def prompt_of(model: VectorModel, name: str | None) -> str:
    """The text of the prompt ``name``, or else of the model's default prompt, or else an empty text.

    Raises:
        InvalidParameter: the model has no such prompt.
    """
    if name is not None and name not in model.prompts:
        known = ", ".join(sorted(model.prompts)) or "none"
        raise InvalidParameter(
            "prompt_name", f"prompt_name: {model.name} has the prompts {known}, not {name!r:.200}"
        )
    chosen = name or model.default_prompt
    return model.prompts[chosen] if chosen is not None else ""


def first_prompt(model: VectorModel, names: Sequence[str]) -> str:
    """The text of the first of these prompts that the model has, else of its default prompt."""
    return prompt_of(model, next((name for name in names if name in model.prompts), None))


def text_rows(
    model: PoolingModel,
    inputs: Sequence[str | Sequence[int]],
    *,
    param: str,
    prompt: str = "",
    limit: int | None = None,
) -> list[TokenRow]:
    """Rows of texts, which get ``prompt`` in front, and of token ids, which are used as they are.

    Raises:
        InvalidParameter: a text is not valid Unicode, or a token id does not exist.
        InputTooLong: an input has more tokens than the model reads.
    """
    texts = [prompt + each for each in inputs if isinstance(each, str)]
    encoded = iter(_encode(partial(model.tokenizer.texts, texts, limit), param) if texts else [])
    rows = []
    for index, each in enumerate(inputs):
        if isinstance(each, str):
            rows.append(next(encoded))
        else:
            _check_ids(model, each, f"{param}[{index}]" if len(inputs) > 1 else param)
            rows.append(TokenRow(tuple(each[:limit])))
    return _fitting(model, rows, param)


def pair_rows(
    model: PoolingModel,
    pairs: Sequence[tuple[str, str]],
    *,
    param: str,
    limit: int | None = None,
    second_limit: int | None = None,
) -> list[TokenRow]:
    """Rows of pairs of texts for a cross-encoder.

    Raises:
        InvalidParameter: a text is not valid Unicode.
        InputTooLong: a pair has more tokens than the model reads.
    """
    return _fitting(model, _encode(partial(model.tokenizer.pairs, pairs, limit, second_limit), param), param)


def side_rows(
    model: VectorModel,
    pairs: Sequence[tuple[str, str]],
    param: str,
    limit: int | None,
    second_limit: int | None,
) -> tuple[list[TokenRow], list[tuple[int, int]]]:
    """The distinct texts of pairs for an embedding model, and the two rows of each pair.

    Queries and documents get the prompts that the model has for them.

    Raises:
        InvalidParameter: a text is not valid Unicode.
        InputTooLong: a text has more tokens than the model reads.
    """
    queries = list(dict.fromkeys(one for one, _ in pairs))
    texts = list(dict.fromkeys(other for _, other in pairs))
    limits = [each for each in (limit, second_limit) if each is not None]
    shorter = min(*limits, model.max_tokens) if limits else None
    rows = text_rows(model, queries, param="query", prompt=first_prompt(model, QUERY_PROMPTS), limit=limit)
    rows += text_rows(model, texts, param=param, prompt=first_prompt(model, DOCUMENT_PROMPTS), limit=shorter)
    firsts = {text: index for index, text in enumerate(queries)}
    seconds = {text: len(queries) + index for index, text in enumerate(texts)}
    return rows, [(firsts[one], seconds[other]) for one, other in pairs]


def _encode(encode: partial[list[TokenRow]], param: str) -> list[TokenRow]:
    try:
        return encode()
    except ValueError as error:
        raise InvalidParameter(param, f"{param}: {error}") from None


def _check_ids(model: PoolingModel, tokens: Sequence[int], param: str) -> None:
    wrong = next((token for token in tokens if not 0 <= token < model.vocab_size), None)
    if wrong is not None:
        raise InvalidParameter(
            param, f"{param} has the token id {wrong}; ids are 0 to {model.vocab_size - 1}"
        )


def _fitting(model: PoolingModel, rows: list[TokenRow], param: str) -> list[TokenRow]:
    for index, row in enumerate(rows):
        if not row.tokens:
            raise InvalidParameter(param, f"{param}[{index}] has no tokens")
        if (highest := max(row.tokens)) >= model.vocab_size:
            raise InvalidParameter(
                param,
                f"{param}[{index}]: the tokenizer gives a part of it the token id {highest}, which {model.name} does "
                f"not have (its ids are 0 to {model.vocab_size - 1}); remove this part from the text",
            )
        if len(row.tokens) > model.max_tokens:
            raise InputTooLong(
                param,
                f"{param}[{index}] has {len(row.tokens)} tokens; {model.name} reads at most {model.max_tokens}. "
                "Shorten it, or set truncate_prompt_tokens to -1",
            )
    return rows
