"""Log-probabilities in three response formats: chat's, completions', and vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.api.compile.model import ServedModel
from headrace.core.plan import TokenLogprob

LOWEST = -9999.0
"""Stands for the logarithm of zero, which JSON cannot represent."""


def token_id(token: int) -> str:
    """A token's name with ``return_tokens_as_token_ids``."""
    return f"token_id:{token}"


def chat_logprobs(
    model: ServedModel, logprobs: Sequence[TokenLogprob], top: int, by_id: bool = False
) -> dict[str, Any]:
    """The object ``logprobs`` of a chat choice: one entry per token, each with its ``top`` alternatives."""
    name = token_id if by_id else model.token_text

    def shown(token: int, logprob: float) -> dict[str, Any]:
        token_bytes = list(model.streams.token_bytes(token))
        return {"token": name(token), "logprob": max(logprob, LOWEST), "bytes": token_bytes}

    content = [
        shown(entry.token, entry.logprob)
        | {"top_logprobs": [shown(token, value) for token, value in entry.top[:top]]}
        for entry in logprobs
    ]
    return {"content": content, "refusal": None}


UNSCORED = 0
"""The rank of a token without a score: the first of a prompt."""


def completion_logprobs(
    model: ServedModel,
    entries: Sequence[TokenLogprob],
    offsets: Sequence[int],
    top: int,
    by_id: bool = False,
) -> dict[str, Any]:
    """The object ``logprobs`` of a completion choice: one entry per token, null for an unscored one."""
    name = token_id if by_id else model.token_text
    scored = [entry.rank != UNSCORED for entry in entries]
    return {
        "tokens": [name(entry.token) for entry in entries],
        "token_logprobs": [
            max(e.logprob, LOWEST) if known else None for e, known in zip(entries, scored, strict=True)
        ],
        "top_logprobs": [
            _by_name(name, e, top) if known else None for e, known in zip(entries, scored, strict=True)
        ],
        "text_offset": list(offsets),
    }


def prompt_entries(tokens: Sequence[int], scored: Mapping[int, TokenLogprob]) -> list[TokenLogprob]:
    """One entry per prompt token, in order; the first is unscored."""
    return [scored.get(at, TokenLogprob(token, 0.0, UNSCORED, ())) for at, token in enumerate(tokens)]


def prompt_logprobs(
    model: ServedModel, entries: Sequence[TokenLogprob], top: int
) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: per token an object from ids to logprob, rank and text; null for the first."""
    return [None if entry.rank == UNSCORED else _by_id(model, entry, top) for entry in entries]


def _by_id(model: ServedModel, entry: TokenLogprob, top: int) -> dict[str, Any]:
    ranked = [(token, value, rank) for rank, (token, value) in enumerate(entry.top[:top], 1)]
    ranked.append((entry.token, entry.logprob, entry.rank))
    return {
        str(token): {"logprob": max(value, LOWEST), "rank": rank, "decoded_token": model.token_text(token)}
        for token, value, rank in ranked
    }


def _by_name(name: Callable[[int], str], entry: TokenLogprob, top: int) -> dict[str, float]:
    """Alternatives by their name, always with the chosen token; of two with the same name, the likelier one."""
    shown: dict[str, float] = {}
    for token, value in (*entry.top[:top], (entry.token, entry.logprob)):
        shown.setdefault(name(token), max(value, LOWEST))
    return shown
