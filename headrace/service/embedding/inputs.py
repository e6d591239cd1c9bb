"""Converts the inputs of a call to rows of tokens: adds prompts, checks limits, and truncates on request.

Tokenizing many texts takes a while; call these functions on a worker thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from headrace.core.embedding import TokenRow
from headrace.core.request import InvalidParameter
from headrace.service.embedding.models import PoolingModel, VectorModel

MAX_INPUTS = 2048
"""Maximum inputs of a call, as in OpenAI's API."""

QUERY_PROMPTS = ("query",)
DOCUMENT_PROMPTS = ("document", "passage", "corpus")
"""Names that models for sentence-transformers use for their prompts for queries and documents."""


class InputTooLong(InvalidParameter):
    """An input has more tokens than the model reads."""


def check_truncation(
    model: PoolingModel, truncate: int | None, param: str = "truncate_prompt_tokens"
) -> int | None:
    """The token limit that ``truncate`` asks for (None: none; -1: the model's).

    Raises:
        InvalidParameter: it is more than the model's limit, or less than one token.
    """
    if truncate is None:
        return None
    if truncate == -1:
        return model.max_tokens
    if not 1 <= truncate <= model.max_tokens:
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
            "prompt_name", f"prompt_name: {model.name} has the prompts {known}, not {name!r}"
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
