"""From logits to tokens: every row by its own parameters, all rows in a few operations.

Order, as in vLLM: logit_bias, allowed_token_ids, bad_words, min_tokens; then penalties; then, unless greedy,
temperature, min_p, top_k, top_p and the draw. A feature costs nothing in rows that do not use it; a batch of
plain greedy rows is one argmax. What a row draws is a function of its own logits, parameters, tokens, seed
and position alone. `Sampler` never changes the logits it is given and never reads the device.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntFlag
from typing import Any

import numpy as np
import torch

from headrace.compute.sampling import constraints, filters
from headrace.compute.sampling.constraints import Constraints, Rowed, checked
from headrace.compute.sampling.draw import NOT_FINITE, NOTHING_ALLOWED, draw, likeliest, or_fault
from headrace.compute.sampling.generator import uniforms
from headrace.compute.sampling.penalties import Penalties
from headrace.compute.transfer import upload
from headrace.core.plan import Entry
from headrace.core.request import SamplingParams

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them would leave the range of single precision."""

FAULTS = {
    NOT_FINITE: "the model's logits are not finite (NaN or infinity)",
    NOTHING_ALLOWED: "no token is left to choose: logit_bias, allowed_token_ids, bad_words and min_tokens"
    " together forbid them all",
}
"""What `Sampler.sample` returns in place of a token for a row that cannot be sampled, and why."""

_MASK = (1 << 64) - 1


class Feature(IntFlag):
    """What a slot's parameters ask for beyond plain greedy sampling."""

    RANDOM = 1
    MIN_P = 2
    TOP_K = 4
    TOP_P = 8
    PENALTIES = 16
    BIAS = 32
    ALLOWED = 64
    BAD_WORDS = 128
    MIN_TOKENS = 256


_PENALTIES = int(Feature.PENALTIES)  # an IntFlag's operators are slow, and this is asked at every step
_FILTERS = Feature.MIN_P | Feature.TOP_K | Feature.TOP_P

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


def _features(params: SamplingParams, made: Constraints, vocab_size: int) -> Feature:
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    uses = (
        (Feature.RANDOM, params.temperature >= GREEDY_BELOW),
        (Feature.MIN_P, params.min_p > 0),
        (Feature.TOP_K, 0 < params.top_k < vocab_size),
        (Feature.TOP_P, params.top_p < 1),
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
    # The likeliest token survives every filter, so a greedy row needs none.
    return features if features & Feature.RANDOM else features & ~_FILTERS


Pick = Callable[[torch.Tensor], torch.Tensor]


class Sampler:
    """The sampling parameters of all slots, and the sampling of a step's rows.

    ``history`` int32 [slots, width] is the device's buffer of all tokens (`Slots.tokens`); only bad words
    and penalties read it. ``pick`` is `draw.likeliest`, or what does the same for logits of fewer bits as well.
    """

    def __init__(self, history: torch.Tensor, vocab_size: int, pick: Pick = likeliest) -> None:
        self._pick = pick
        self._history = history
        self._vocab_size = vocab_size
        self._features = np.zeros(len(history), dtype=np.int64)
        self._numbers = np.zeros(len(history), dtype=_NUMBERS)
        self._constraints: dict[int, Constraints] = {}
        self._penalties = Penalties(history, vocab_size)

    def admit(self, entry: Entry) -> Ints:
        """A sequence takes a slot; returns its tokens, checked.

        Raises:
            OutsideVocabulary: the request names a token that the model does not have. The slot then
                samples greedily, so that neighbours can go on.
        """
        self._features[entry.slot] = 0
        self._penalties.release(entry.slot)
        tokens = checked("prompt", entry.tokens, self._vocab_size)
        made = Constraints.of(entry, self._vocab_size)
        params = entry.params
        features = _features(params, made, self._vocab_size)
        self._features[entry.slot] = features
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
            self._penalties.admit(entry.slot, tokens[entry.prompt_tokens :])
        return tokens

    def sample(self, logits: torch.Tensor, slots: Ints, positions: Ints) -> torch.Tensor:
        """Draw the token at ``positions`` int64 [S] of ``slots`` int64 [S] from ``logits`` [S, V].

        Returns int64 [S] on the device of the logits; a negative value is a key of `FAULTS`.
        """
        features = self._features[slots]
        if not features.any():
            return self._pick(logits)
        # Rows past their min_tokens are rid of that feature.
        features &= np.where(positions < self._numbers["min_end"][slots], -1, ~int(Feature.MIN_TOKENS))
        shaped = np.flatnonzero(features)
        if shaped.size == 0:
            return self._pick(logits)
        if shaped.size == slots.size:
            return self._shaped(logits.to(torch.float32, copy=True), features, slots, positions)
        (at,) = upload(logits.device, shaped)
        some = self._shaped(
            logits.index_select(0, at).float(), features[shaped], slots[shaped], positions[shaped]
        )
        return self._pick(logits).index_copy_(0, at, some)

    def append(self, slots: Ints, tokens: torch.Tensor) -> None:
        """Count the tokens drawn (int64 [S]; a fault as token 0) for slots whose penalties need it."""
        if not self._penalties:
            return
        using = np.flatnonzero(self._features[slots] & _PENALTIES)
        if using.size:
            (at,) = upload(tokens.device, using)
            self._penalties.append(slots[using], tokens.index_select(0, at).clamp_(min=0))

    def _shaped(self, logits: torch.Tensor, features: Ints, slots: Ints, positions: Ints) -> torch.Tensor:
        """Sample rows that use some feature; ``logits`` may be overwritten."""
        numbers = self._numbers[slots]
        self._constrain(logits, features, slots, positions)
        if (rows := np.flatnonzero(features & Feature.PENALTIES)).size:
            kinds = (numbers[name][rows] for name in ("repetition", "presence", "frequency"))
            self._penalties.apply(logits, rows, slots[rows], positions[rows], *kinds)
        drawn = np.flatnonzero(features & Feature.RANDOM)
        if drawn.size == slots.size:
            return self._random(logits, features, numbers, positions)
        tokens = self._pick(logits)
        if drawn.size:
            (at,) = upload(logits.device, drawn)
            tokens.index_copy_(
                0,
                at,
                self._random(logits.index_select(0, at), features[drawn], numbers[drawn], positions[drawn]),
            )
        return tokens

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

    def _random(
        self, logits: torch.Tensor, features: Ints, numbers: np.ndarray[Any, Any], positions: Ints
    ) -> torch.Tensor:
        """Temperature, filters, draw; ``logits`` may be overwritten."""
        device = logits.device
        temperature, uniform = upload(
            device, numbers["temperature"].copy(), uniforms(numbers["seed"], positions)
        )
        peak = logits.amax(-1)
        logits.sub_(peak.unsqueeze(1)).div_(temperature.to(logits.dtype).unsqueeze(1))
        if (rows := np.flatnonzero(features & Feature.MIN_P)).size:
            (share,) = upload(device, numbers["min_p"][rows])
            _on_rows(logits, rows, lambda part: filters.min_p(part, share.to(part.dtype)))
        masses = np.where(features & Feature.TOP_P, numbers["top_p"], np.inf)
        if (rows := np.flatnonzero(features & Feature.TOP_K)).size:
            counts = numbers["top_k"][rows]
            k, mass = upload(device, counts, masses[rows])
            largest = int(counts.max())
            _on_rows(logits, rows, lambda part: filters.top_k(part, k, mass, largest))
        if (rows := np.flatnonzero((features & (Feature.TOP_K | Feature.TOP_P)) == Feature.TOP_P)).size:
            (mass,) = upload(device, masses[rows])
            _on_rows(logits, rows, lambda part: filters.top_p(part, mass))
        return or_fault(draw(logits.softmax(-1), uniform), peak)


def _on_rows(logits: torch.Tensor, rows: Ints, change: Callable[[torch.Tensor], None]) -> None:
    """Let ``change`` work in place on some rows of ``logits``."""
    if rows.size == len(logits):
        change(logits)
        return
    (at,) = upload(logits.device, rows)
    part = logits.index_select(0, at)
    change(part)
    logits.index_copy_(0, at, part)
