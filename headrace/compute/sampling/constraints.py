"""Constraints of single tokens: logit_bias, allowed_token_ids, bad_words, min_tokens.

Each slot's lists are checked and converted to arrays once, when a sequence takes the slot. A step joins the arrays of
the rows that need them and touches no other row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headrace.compute.batch import Ints
from headrace.compute.transfer import upload
from headrace.core.plan import Entry

_ANY = -1
_BEFORE_START = -2


class OutsideVocabulary(ValueError):
    """A request names a token that the model does not have."""

    def __init__(self, param: str, token: int, vocab_size: int) -> None:
        super().__init__(f"{param}: token {token} is outside the vocabulary (0 to {vocab_size - 1})")


def checked(param: str, tokens: Sequence[int], vocab_size: int) -> Ints:
    """``tokens`` as an int64 array. Raises `OutsideVocabulary`, which names ``param`` and the first invalid token."""
    try:
        array = np.array(tokens, dtype=np.int64)
    except OverflowError:
        array = np.array([vocab_size])
    if array.size and not (array.min() >= 0 and array.max() < vocab_size):
        raise OutsideVocabulary(param, next(t for t in tokens if not 0 <= t < vocab_size), vocab_size)
    return array


@dataclass(frozen=True, slots=True)
class BadWords:
    """``last`` int64 [W] is forbidden where ``prefix`` int64 [W, L] (left-padded with -1) equals the last tokens."""

    prefix: Ints
    last: Ints

    @classmethod
    def of(cls, words: tuple[tuple[int, ...], ...], vocab_size: int) -> BadWords:
        width = max(len(word) for word in words) - 1
        prefix = np.full((len(words), width), _ANY, dtype=np.int64)
        for line, word in enumerate(words):
            if len(word) > 1:
                prefix[line, width - len(word) + 1 :] = checked("bad_words", word[:-1], vocab_size)
        return cls(prefix, checked("bad_words", [word[-1] for word in words], vocab_size))


@dataclass(frozen=True, slots=True)
class Constraints:
    """The constraints of one request as arrays; a field is None if the request does not use it."""

    bias_tokens: Ints | None
    bias: np.ndarray[Any, np.dtype[np.float64]] | None
    allowed: Ints | None
    bad_words: BadWords | None
    stops: Ints | None

    @classmethod
    def of(cls, entry: Entry, vocab_size: int) -> Constraints:
        """Raises `OutsideVocabulary` if the request names a token outside the vocabulary."""
        params = entry.params
        bias = params.logit_bias
        stops = checked("stop_token_ids", params.stop_token_ids, vocab_size)
        if params.min_tokens and not params.ignore_eos:
            # Some model configurations name an end token beyond the vocabulary: it cannot be sampled anyway.
            ends = [token for token in entry.eos_token_ids if token < vocab_size]
            stops = np.concatenate([stops, np.array(ends, dtype=np.int64)])
        return cls(
            bias_tokens=checked("logit_bias", [token for token, _ in bias], vocab_size) if bias else None,
            bias=np.array([value for _, value in bias]) if bias else None,
            allowed=None
            if params.allowed_token_ids is None
            else checked("allowed_token_ids", params.allowed_token_ids, vocab_size),
            bad_words=BadWords.of(params.bad_words, vocab_size) if params.bad_words else None,
            stops=stops if params.min_tokens and stops.size else None,
        )


Rowed = list[tuple[int, Constraints]]
"""Rows of the logits with the constraints of their slots."""


def _places(parts: list[tuple[int, Ints]], vocab_size: int) -> Ints:
    return np.concatenate([row * vocab_size + tokens for row, tokens in parts])


def add_bias(logits: torch.Tensor, rows: Rowed) -> None:
    """Add each row's logit_bias."""
    parts = [(row, each.bias_tokens) for row, each in rows if each.bias_tokens is not None]
    values = np.concatenate([each.bias for _, each in rows if each.bias is not None])
    at, bias = upload(logits.device, _places(parts, logits.shape[1]), values)
    logits.view(-1).index_add_(0, at, bias.to(logits.dtype))


def keep_allowed(logits: torch.Tensor, rows: Rowed) -> None:
    """Forbid all but each row's allowed_token_ids."""
    parts = [(row, each.allowed) for row, each in rows if each.allowed is not None]
    lines = np.array([row for row, _ in parts], dtype=np.int64)
    at, rows_ = upload(logits.device, _places(parts, logits.shape[1]), lines)
    flat = logits.view(-1)
    kept = flat[at]
    logits.index_fill_(0, rows_, -torch.inf)
    flat[at] = kept


def forbid_stops(logits: torch.Tensor, rows: Rowed) -> None:
    """Forbid each row's end and stop tokens, for rows that have not reached min_tokens."""
    parts = [(row, each.stops) for row, each in rows if each.stops is not None]
    (at,) = upload(logits.device, _places(parts, logits.shape[1]))
    logits.view(-1).index_fill_(0, at, -torch.inf)


def forbid_bad_words(
    logits: torch.Tensor, rows: Rowed, history: torch.Tensor, slots: Ints, positions: Ints
) -> None:
    """Forbid the last token of each bad word whose other tokens are the last ones of the row's sequence.

    ``history`` int32 [slots, width] holds all tokens. ``slots`` and ``positions`` int64 [S] give for each row of the
    logits the place of its next token. The comparison runs on the device, because the last token may not have reached
    the host yet.
    """
    words = [(row, each.bad_words) for row, each in rows if each.bad_words is not None]
    width = max(each.prefix.shape[1] for _, each in words)
    lines = np.concatenate([np.full(each.last.size, row) for row, each in words])
    prefix = np.full((lines.size, width), _ANY, dtype=np.int64)
    done = 0
    for _, each in words:
        prefix[done : done + each.last.size, width - each.prefix.shape[1] :] = each.prefix
        done += each.last.size
    places = positions[lines, None] - np.arange(width, 0, -1)
    prefix[(places < 0) & (prefix != _ANY)] = _BEFORE_START
    tail_at = slots[lines, None] * history.shape[1] + np.maximum(places, 0)
    last = np.concatenate([each.last for _, each in words])
    at, flat_prefix, flat_tail = upload(
        logits.device, lines * logits.shape[1] + last, prefix.reshape(-1), tail_at.reshape(-1)
    )
    wanted = flat_prefix.view(len(at), width)
    tail = history.view(-1)[flat_tail].view(len(at), width)
    complete = ((wanted == tail) | (wanted == _ANY)).all(-1)
    penalty = torch.zeros(len(at), dtype=logits.dtype, device=logits.device)
    logits.view(-1).index_add_(0, at, penalty.masked_fill_(complete, -torch.inf))
