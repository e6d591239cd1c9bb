"""The sampler: from logits to tokens, each row by its own parameters, all rows in a few operations.

The order is that of vLLM: the tokens that a grammar allows, logit_bias, allowed_token_ids, bad_words, min_tokens;
then penalties; then, unless greedy, temperature, min_p, top_k, top_p and the draw. A feature costs nothing in rows
that do not use it; a batch of plain greedy rows is one argmax. The token of a row depends only on its own logits,
parameters, tokens, seed and position. `Sampler` never changes the logits it is given and never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import Any, NamedTuple

import numpy as np
import torch

from headrace.compute.batch import Ints
from headrace.compute.sampling import choice
from headrace.compute.sampling.choice import NOT_FINITE, NOTHING_ALLOWED, TokenChoice, likeliest
from headrace.compute.sampling.penalties import (
    Allowed,
    LinePenalties,
    Penalize,
    Penalties,
    Restrict,
    restrict,
)
from headrace.compute.transfer import upload
from headrace.core.plan import Entry
from headrace.core.request import SamplingParams

# A counter-based random generator: the number at a position is a pure function of (seed, position).
#
# No state is carried from step to step. So neighbours, batch order, chunking and preemption cannot change a request's
# tokens, and a preempted request samples the same tokens again.

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
Unsigned = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]


def _mix(words: Unsigned) -> Unsigned:
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    return words ^ (words >> np.uint64(31))


def uniforms(
    seeds: Unsigned, positions: np.ndarray[Any, np.dtype[np.int64]]
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """One number in [0, 1) per pair, multiples of 2**-52.

    SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014), entered at ``position`` of
    the stream of the mixed seed. Mixing the seed first keeps neighbouring seeds from giving shifted copies of one
    stream.
    """
    words = _mix(_mix(seeds + _GAMMA) + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    return (words >> np.uint64(12)).astype(np.float64) * 2.0**-52


# Constraints of single tokens: logit_bias, allowed_token_ids, bad_words, min_tokens.
#
# Each slot's lists are checked and converted to arrays once, when a sequence takes the slot. A step joins the arrays of
# the rows that need them and touches no other row.

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


Flags = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would leave the range of single precision."""

FAULTS = {
    NOT_FINITE: "the model's logits are not finite (NaN or infinity)",
    NOTHING_ALLOWED: "no token is left to sample: logit_bias, allowed_token_ids, bad_words, min_tokens"
    " and structured outputs together forbid them all",
}
"""The values that `Sampler.sample` returns instead of a token for a row that cannot be sampled, and why."""

_MASK = (1 << 64) - 1


class Feature(IntFlag):
    """The features that a slot's parameters use, beyond plain greedy sampling."""

    RANDOM = 1
    PENALTIES = 2
    BIAS = 4
    ALLOWED = 8
    BAD_WORDS = 16
    MIN_TOKENS = 32


# The operators of an IntFlag are slow, and these are used in every step.
_RANDOM = int(Feature.RANDOM)
_PENALTIES = int(Feature.PENALTIES)

_NUMBERS = np.dtype(
    [
        ("temperature", np.float64),
        ("min_p", np.float64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("repetition", np.float64),
        ("presence", np.float64),
        ("frequency", np.float64),
        ("min_end", np.int64),
        ("seed", np.uint64),
    ]
)


def _features(params: SamplingParams, made: Constraints) -> Feature:
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    uses = (
        (Feature.RANDOM, params.temperature >= GREEDY_BELOW),
        (Feature.PENALTIES, penalties != (1, 0, 0)),
        (Feature.BIAS, made.bias is not None),
        (Feature.ALLOWED, made.allowed is not None),
        (Feature.BAD_WORDS, made.bad_words is not None),
        (Feature.MIN_TOKENS, made.stops is not None),
    )
    features = Feature(0)
    for feature, used in uses:
        if used:
            features |= feature
    return features


class Drawing(NamedTuple):
    """The parameters of lines that need only penalties and greedy or random sampling.

    ``random`` bool [L] says which lines are sampled. ``choice`` is for all lines, with neutral values for greedy ones.
    ``penalties`` are those of all lines; None if there are none.
    """

    random: Flags
    choice: TokenChoice
    penalties: LinePenalties | None = None


Pick = Callable[[torch.Tensor], torch.Tensor]
Choose = Callable[[torch.Tensor, TokenChoice], torch.Tensor]


class Sampler:
    """The sampling parameters of all slots, and the sampling of a step's rows.

    ``history`` int32 [slots, width] is the device's buffer of all tokens (`Slots.tokens`); only bad words and
    penalties read it. ``pick``, ``choose`` and ``restrict`` are `choice.likeliest`, `choice.choose` and
    `penalties.restrict`, or equivalents that also accept logits of fewer bits. ``penalize`` and ``fixed`` as in
    `Penalties`.
    """

    def __init__(
        self,
        history: torch.Tensor,
        vocab_size: int,
        pick: Pick = likeliest,
        choose: Choose = choice.choose,
        restrict: Restrict = restrict,
        penalize: Penalize | None = None,
        *,
        fixed: bool = False,
    ) -> None:
        self._restrict = restrict
        self._pick = pick
        self._choose = choose
        self._history = history
        self._vocab_size = vocab_size
        self._features = np.zeros(len(history), dtype=np.int64)
        self._featured = set[int]()  # slots with any
        self._numbers = np.zeros(len(history), dtype=_NUMBERS)
        self._constraints: dict[int, Constraints] = {}
        self._penalties = Penalties(history, vocab_size, penalize, fixed=fixed)

    def admit(self, entry: Entry) -> Ints:
        """A sequence takes a slot; returns its tokens, checked.

        Raises:
            OutsideVocabulary: the request names a token that the model does not have. The slot then samples greedily,
                so that other rows can continue.
        """
        self._features[entry.slot] = 0
        self._featured.discard(entry.slot)
        self._penalties.release(entry.slot)
        tokens = checked("prompt", entry.tokens, self._vocab_size)
        made = Constraints.of(entry, self._vocab_size)
        params = entry.params
        features = _features(params, made)
        self._features[entry.slot] = features
        if features:
            self._featured.add(entry.slot)
        self._numbers[entry.slot] = (
            params.temperature,
            params.min_p,
            params.top_k,
            params.top_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            entry.prompt_tokens + params.min_tokens,
            entry.seed & _MASK,
        )
        self._constraints[entry.slot] = made
        if features & Feature.PENALTIES:
            self._penalties.admit(entry.slot, *np.split(tokens, [entry.prompt_tokens]))
        return tokens

    @property
    def penalizes(self) -> bool:
        """Whether any slot has penalties: only they read drafts."""
        return bool(self._penalties)

    @property
    def counts(self) -> torch.Tensor:
        """Token counts of each slot's output: see `Penalties`."""
        return self._penalties.counts

    def drawing(self, slots: Ints, positions: Ints) -> Drawing | None:
        """The sampling parameters at ``positions`` int64 [L] of ``slots`` int64 [L]; None if a line needs more than
        `Drawing` supports.
        """
        features = self._wanted(slots, positions)
        held = _RANDOM | _PENALTIES if self._penalties.fixed else _RANDOM
        if (features & ~held).any():
            return None
        random, penalized = features & _RANDOM != 0, features & _PENALTIES != 0
        penalties = None
        if penalized.any():
            numbers = self._numbers[slots]
            factors = (numbers[name] for name in ("repetition", "presence", "frequency"))
            penalties = self._penalties.lines(slots, penalized, *factors)
        temperature, min_p, top_k, top_p, uniform = self._choice(slots, positions)
        choice = TokenChoice(
            np.where(random, temperature, 1.0),
            np.where(random, min_p, 0.0),
            np.where(random, top_k, 0),
            np.where(random, top_p, 1.0),
            uniform,
        )
        return Drawing(random, choice, penalties)

    def takes_likeliest(self, slots: Ints, positions: Ints) -> bool:
        """Whether the tokens at ``positions`` int64 [S] of ``slots`` int64 [S] are those of the largest logits."""
        return not self._featured or not self._wanted(slots, positions).any()

    def sample(
        self,
        logits: torch.Tensor,
        slots: Ints,
        positions: Ints,
        allowed: Allowed | None = None,
        drafts: Ints | None = None,
    ) -> torch.Tensor:
        """Draw the token at ``positions`` int64 [S] of ``slots`` int64 [S] from ``logits`` [S, V].

        ``allowed`` says what the grammars of some rows leave to draw from. ``drafts`` [S, K] are the last tokens before
        these positions that have not been appended, and other numbers than tokens.

        Returns int64 [S] on the device of the logits; a negative value is a key of `FAULTS`.
        """
        if allowed is not None:
            logits = self._restrict(logits, allowed)
        if not self._featured:
            return self._pick(logits)
        features = self._wanted(slots, positions)
        if not features.any():
            return self._pick(logits)
        if allowed is not None and allowed.ending is not None:  # these rows can only end
            features[allowed.lines[allowed.ending]] &= ~int(Feature.MIN_TOKENS)
        shaped = np.flatnonzero(features & ~_RANDOM)
        if shaped.size == 0:
            return self._tokens(logits, features, slots, positions)
        if shaped.size == slots.size:
            changed = logits.to(torch.float32, copy=True)
            self._shape(changed, features, slots, positions, drafts)
            return self._tokens(changed, features, slots, positions)
        tokens = self._tokens(logits, np.where(features == _RANDOM, _RANDOM, 0), slots, positions)
        (at,) = upload(logits.device, shaped)
        features, slots, positions = features[shaped], slots[shaped], positions[shaped]
        changed = logits.index_select(0, at).float()
        self._shape(changed, features, slots, positions, None if drafts is None else drafts[shaped])
        return tokens.index_copy_(0, at, self._tokens(changed, features, slots, positions))

    def append(self, slots: Ints, tokens: torch.Tensor, counting: torch.Tensor | None = None) -> None:
        """Count the sampled tokens (int64 [S]; a fault as token 0) for slots whose penalties need it.

        If ``counting`` (bool [S], on the device) is given, only those of them.
        """
        if not self._penalties:
            return
        using = np.flatnonzero(self._features[slots] & _PENALTIES)
        if using.size:
            (at,) = upload(tokens.device, using)
            some = None if counting is None else counting.index_select(0, at)
            self._penalties.append(slots[using], tokens.index_select(0, at).clamp_(min=0), some)

    def _wanted(self, slots: Ints, positions: Ints) -> Ints:
        """The features of each line; min_tokens is dropped once it is reached."""
        features = self._features[slots]
        if features.any():
            features &= np.where(positions < self._numbers["min_end"][slots], -1, ~int(Feature.MIN_TOKENS))
        return features

    def _shape(
        self, logits: torch.Tensor, features: Ints, slots: Ints, positions: Ints, drafts: Ints | None
    ) -> None:
        """Constrain and penalize rows of ``logits`` float32 in place."""
        self._constrain(logits, features, slots, positions)
        if (rows := np.flatnonzero(features & _PENALTIES)).size:
            numbers = self._numbers[slots[rows]]
            repetition, presence, frequency = (
                numbers[name] for name in ("repetition", "presence", "frequency")
            )
            ahead = None if drafts is None else drafts[rows]
            lengths = positions[rows]
            self._penalties.apply(logits, rows, slots[rows], lengths, repetition, presence, frequency, ahead)

    def _tokens(self, logits: torch.Tensor, features: Ints, slots: Ints, positions: Ints) -> torch.Tensor:
        """A token for each row: sampled if the row is random, else the likeliest."""
        drawn = np.flatnonzero(features & _RANDOM)
        if drawn.size == slots.size:
            return self._choose(logits, self._choice(slots, positions))
        tokens = self._pick(logits)
        if drawn.size:
            (at,) = upload(logits.device, drawn)
            some = self._choose(logits.index_select(0, at), self._choice(slots[drawn], positions[drawn]))
            tokens.index_copy_(0, at, some)
        return tokens

    def _choice(self, slots: Ints, positions: Ints) -> TokenChoice:
        numbers = self._numbers[slots]
        temperature, min_p, top_k, top_p = (
            numbers[name].copy() for name in ("temperature", "min_p", "top_k", "top_p")
        )
        return TokenChoice(temperature, min_p, top_k, top_p, uniforms(numbers["seed"], positions))

    def _constrain(self, logits: torch.Tensor, features: Ints, slots: Ints, positions: Ints) -> None:
        def rows(feature: Feature) -> Rowed:
            return [
                (row, self._constraints[int(slots[row])])
                for row in np.flatnonzero(features & feature).tolist()
            ]

        if used := rows(Feature.BIAS):
            add_bias(logits, used)
        if used := rows(Feature.ALLOWED):
            keep_allowed(logits, used)
        if used := rows(Feature.BAD_WORDS):
            forbid_bad_words(logits, used, self._history, slots, positions)
        if used := rows(Feature.MIN_TOKENS):
            forbid_stops(logits, used)
