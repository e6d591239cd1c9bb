"""The sampler: from logits to tokens, each row by its own parameters, all rows in a few operations.

The order is that of vLLM: the tokens that a grammar allows, logit_bias, allowed_token_ids, bad_words, min_tokens;
then penalties; then, unless greedy, temperature, min_p, top_k, top_p and the draw. A feature costs nothing in rows
that do not use it; a batch of plain greedy rows is one argmax. The token of a row depends only on its own logits,
parameters, tokens, seed and position. `Sampler` never changes the logits it is given and never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntFlag
from typing import NamedTuple

import numpy as np
import torch

from headrace.compute.batch import Ints
from headrace.compute.sampling import choice, constraints
from headrace.compute.sampling.allowed import Allowed, Restrict, restrict
from headrace.compute.sampling.choice import Choice
from headrace.compute.sampling.constraints import Constraints, Rowed, checked
from headrace.compute.sampling.draw import NOT_FINITE, NOTHING_ALLOWED, likeliest
from headrace.compute.sampling.generator import uniforms
from headrace.compute.sampling.penalties import LinePenalties, Penalize, Penalties
from headrace.compute.transfer import upload
from headrace.core.plan import Entry
from headrace.core.request import SamplingParams

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
    choice: Choice
    penalties: LinePenalties | None = None


Pick = Callable[[torch.Tensor], torch.Tensor]
Choose = Callable[[torch.Tensor, Choice], torch.Tensor]


class Sampler:
    """The sampling parameters of all slots, and the sampling of a step's rows.

    ``history`` int32 [slots, width] is the device's buffer of all tokens (`Slots.tokens`); only bad words and
    penalties read it. ``pick``, ``choose`` and ``restrict`` are `draw.likeliest`, `choice.choose` and
    `allowed.restrict`, or equivalents that also accept logits of fewer bits. ``penalize`` and ``fixed`` as in
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
        choice = Choice(
            np.where(random, temperature, 1.0),
            np.where(random, min_p, 0.0),
            np.where(random, top_k, 0),
            np.where(random, top_p, 1.0),
            uniform,
        )
        return Drawing(random, choice, penalties)

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

    def _choice(self, slots: Ints, positions: Ints) -> Choice:
        numbers = self._numbers[slots]
        temperature, min_p, top_k, top_p = (
            numbers[name].copy() for name in ("temperature", "min_p", "top_k", "top_p")
        )
        return Choice(temperature, min_p, top_k, top_p, uniforms(numbers["seed"], positions))

    def _constrain(self, logits: torch.Tensor, features: Ints, slots: Ints, positions: Ints) -> None:
        def rows(feature: Feature) -> Rowed:
            return [
                (row, self._constraints[int(slots[row])])
                for row in np.flatnonzero(features & feature).tolist()
            ]

        if used := rows(Feature.BIAS):
            constraints.add_bias(logits, used)
        if used := rows(Feature.ALLOWED):
            constraints.keep_allowed(logits, used)
        if used := rows(Feature.BAD_WORDS):
            constraints.forbid_bad_words(logits, used, self._history, slots, positions)
        if used := rows(Feature.MIN_TOKENS):
            constraints.forbid_stops(logits, used)
