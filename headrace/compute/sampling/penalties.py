"""Penalties on tokens that have already occurred (repetition, presence, frequency), and masks of allowed tokens.

On a CPU they touch only the tokens of the row's own sequence: those logits are gathered through the token history,
changed and scattered back. So a vocabulary of 150,000 costs no more than one of 4,000. A GPU reads whole rows of
counts instead, in one launch that needs no lengths of sequences from the host.

Counts of output tokens are kept only for slots whose requests use a penalty, in one lane of the table each. The device
increments them for each sampled token, so a step whose tokens the host has not received yet can already be penalized.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from headrace.compute.batch import Ints, ramps
from headrace.compute.transfer import upload

# Token bitmasks of grammars, applied before any other filter.
#
# This is the definition of `Kernels.restrict` in torch.

Flags = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
Words = np.ndarray[tuple[int, int], np.dtype[np.int32]]


class Allowed(NamedTuple):
    """The masks of the restricted rows of a batch, as host arrays.

    ``lines`` int64 [M] are rows of the logits, ascending. ``words`` int32 [M, ceil(V / 32)] hold one bit per token,
    the lowest first; bits from V on are ignored. ``ending`` bool [M]: rows that can only end (None: none).
    """

    lines: Ints
    words: Words
    ending: Flags | None = None

    def part(self, begin: int, end: int) -> Allowed | None:
        """The masks of lines ``[begin, end)``, counted from ``begin``; None if there are none."""
        first, last = np.searchsorted(self.lines, (begin, end))
        if first == last:
            return None
        ending = None if self.ending is None else self.ending[first:last]
        return Allowed(self.lines[first:last] - begin, self.words[first:last], ending)


Restrict = Callable[[torch.Tensor, Allowed], torch.Tensor]


def restrict(logits: torch.Tensor, allowed: Allowed) -> torch.Tensor:
    """A copy of ``logits`` [S, V] with minus infinity for tokens that are not allowed."""
    each = np.unpackbits(allowed.words.view(np.uint8), axis=1, bitorder="little")  # a byte per token
    lines, flat = upload(logits.device, allowed.lines, each.reshape(-1).view(np.int32))
    closed = flat.view(torch.uint8).view(len(lines), -1)[:, : logits.shape[1]] == 0
    if len(lines) == len(logits):
        return logits.masked_fill(closed, -torch.inf)
    return logits.index_copy(0, lines, logits.index_select(0, lines).masked_fill_(closed, -torch.inf))


Reals = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


TOKENS_AT_ONCE = 1 << 18
"""Tokens of histories processed at once; about 60 bytes each. A single row may have more."""
IN_PROMPT = 1 << 30
"""Added to the count of a token that is in the prompt, where whole rows of counts are read."""


class Penalty(NamedTuple):
    """The penalties of P rows, as arrays on the host, or all on the device: ``rows`` of logits and ``lanes`` of counts,
    int64 [P].

    ``drafts`` int64 [N] from ``begins`` to ``ends`` int64 [P] are tokens before a row that are not included in its
    counts; values that are not tokens are ignored.
    """

    rows: Ints
    lanes: Ints
    repetition: Reals
    presence: Reals
    frequency: Reals
    drafts: Ints
    begins: Ints
    ends: Ints


class LinePenalties(NamedTuple):
    """The penalties of all L lines of a step. Where ``counted`` int64 [L] is 0, values are neutral and the lane is 0;
    where it is 1, the line's token is also counted.
    """

    lanes: Ints
    repetition: Reals
    presence: Reals
    frequency: Reals
    counted: Ints


Penalize = Callable[[torch.Tensor, torch.Tensor, Penalty], None]


def penalize(logits: torch.Tensor, counts: torch.Tensor, penalty: Penalty) -> None:
    """Penalize rows of ``logits`` float32 [S, V] in place by ``counts`` int32 [lanes, V]; see `Penalties.apply`."""
    ahead = penalty.ends - penalty.begins
    lines, drafts = np.repeat(np.arange(ahead.size), ahead), np.repeat(penalty.begins, ahead) + ramps(ahead)
    drafts = penalty.drafts[drafts]
    known = penalty[:5]
    rows, lanes, *factors, lines_, drafts_ = upload(
        logits.device, *known, lines[drafts >= 0], drafts[drafts >= 0]
    )
    repetition, presence, frequency = (each.to(logits.dtype).unsqueeze(1) for each in factors)
    seen = counts.index_select(0, lanes)
    output = seen & (IN_PROMPT - 1)
    output.index_put_((lines_, drafts_), output.new_ones(()), accumulate=True)
    said = logits.index_select(0, rows)
    repeated = torch.where(said > 0, said / repetition, said * repetition)
    said = torch.where((output > 0) | (seen >= IN_PROMPT), repeated, said)
    logits.index_copy_(0, rows, said - frequency * output - presence * (output > 0))


class Penalties:
    """How often each token occurs in the output of a slot (int32 [lanes, V]), and the penalties from these counts.

    ``history`` int32 [slots, width] is the device's buffer of all tokens. ``by_counts`` is `penalize` or a kernel for
    it; None: penalties go through the history. With ``fixed`` there is a lane for each slot from the start, and
    ``counts`` stay where they are.
    """

    def __init__(
        self,
        history: torch.Tensor,
        vocab_size: int,
        by_counts: Penalize | None = None,
        *,
        fixed: bool = False,
    ) -> None:
        self._history = history
        self._by_counts = by_counts
        lanes = len(history) if fixed else 0
        self.counts = torch.zeros(lanes, vocab_size, dtype=torch.int32, device=history.device)
        self.fixed = fixed
        self._lane: dict[int, int] = {}
        self._free = list(range(lanes))

    def __len__(self) -> int:
        """Number of slots with counts."""
        return len(self._lane)

    def lines(
        self, slots: Ints, penalized: Flags, repetition: Reals, presence: Reals, frequency: Reals
    ) -> LinePenalties:
        """The penalties of the lines of ``slots`` [L], of which some are ``penalized``; all arguments are [L]."""
        lanes = np.zeros(slots.size, dtype=np.int64)
        lanes[penalized] = self._lanes(slots[penalized])
        return LinePenalties(
            lanes,
            np.where(penalized, repetition, 1.0),
            np.where(penalized, presence, 0.0),
            np.where(penalized, frequency, 0.0),
            penalized.astype(np.int64),
        )

    def admit(self, slot: int, prompt: Ints, output: Ints) -> None:
        """Start a slot's counts from its prompt and the output tokens known so far."""
        if slot not in self._lane:
            if not self._free:
                self._grow()
            self._lane[slot] = self._free.pop()
        counts = self.counts[self._lane[slot]].zero_()
        (tokens,) = upload(counts.device, output)
        if self._by_counts is not None:
            (given,) = upload(counts.device, prompt)
            counts.index_fill_(0, given, IN_PROMPT)
        counts.index_add_(0, tokens, torch.ones_like(tokens, dtype=torch.int32))

    def release(self, slot: int) -> None:
        """The new sequence of the slot needs no counts."""
        if slot in self._lane:
            self._free.append(self._lane.pop(slot))

    def append(self, slots: Ints, tokens: torch.Tensor, counting: torch.Tensor | None = None) -> None:
        """Count sampled tokens (int64 [S], on the device), of these the ones that are ``counting``.

        A slot occurs twice only if ``counting`` is given.
        """
        (lanes,) = upload(tokens.device, self._lanes(slots))
        if counting is None:
            self.counts[lanes, tokens] += 1
        else:
            self.counts.index_put_((lanes, tokens), counting.to(self.counts.dtype), accumulate=True)

    def apply(
        self,
        logits: torch.Tensor,
        rows: Ints,
        slots: Ints,
        lengths: Ints,
        repetition: Reals,
        presence: Reals,
        frequency: Reals,
        drafts: Ints | None = None,
    ) -> None:
        """Penalize ``rows`` [P] of ``logits`` float32 [S, V] in place; all other arguments are [P].

        ``lengths`` counts the tokens of each slot that come before the row, at least 1. The last of them may be
        drafts, which are not among the counts: ``drafts`` [P, K] holds them, and other numbers than tokens.
        Repetition (CTRL, arXiv:1909.05858) divides the positive and multiplies the negative logits of tokens in prompt
        or output. Then frequency and presence (OpenAI) subtract per occurrence and once, for output tokens only.
        """
        if self._by_counts is not None:
            lanes = self._lanes(slots)
            each = 0 if drafts is None else drafts.shape[1]
            flat, begins = lanes if drafts is None else drafts.reshape(-1), np.arange(rows.size) * each
            factors = (repetition, presence, frequency)
            self._by_counts(logits, self.counts, Penalty(rows, lanes, *factors, flat, begins, begins + each))
            return
        numbers = (rows, slots, self._lanes(slots), repetition, presence, frequency)
        parts = np.flatnonzero(np.diff(np.cumsum(lengths) // TOKENS_AT_ONCE)) + 1
        for part in np.split(np.arange(rows.size), parts):
            ahead = None if drafts is None else drafts[part]
            self._penalize(logits, lengths[part], ahead, *(each[part] for each in numbers))

    def _penalize(
        self, logits: torch.Tensor, lengths: Ints, drafts: Ints | None, *of_rows: Ints | Reals
    ) -> None:
        """`apply` to some rows, with all of their tokens concatenated, so that no row is padded to a longer one."""
        total = int(lengths.sum())
        uploaded = upload(logits.device, lengths, *of_rows)
        lengths_ = uploaded[0]
        begins = lengths_.cumsum(0) - lengths_
        spread = (value.repeat_interleave(lengths_, output_size=total) for value in (begins, *uploaded[1:]))
        begins, rows, slots, lanes, factor, once, each = spread
        tokens = self._history[slots, torch.arange(total, device=logits.device) - begins].long()
        # A token that occurs twice is written twice, with the same value.
        said, counts = logits[rows, tokens], self.counts[lanes, tokens]
        if drafts is not None:
            (ahead,) = upload(logits.device, drafts.reshape(-1))
            ahead = ahead.view(drafts.shape).repeat_interleave(lengths_, dim=0, output_size=total)
            counts = counts + (ahead == tokens.unsqueeze(1)).sum(1)
        factor, once, each = (value.to(logits.dtype) for value in (factor, once, each))
        said = torch.where(said > 0, said / factor, said * factor) - each * counts - once * (counts > 0)
        logits[rows, tokens] = said

    def _lanes(self, slots: Ints) -> Ints:
        return np.array([self._lane[slot] for slot in slots.tolist()], dtype=np.int64)

    def _grow(self) -> None:
        lanes, vocab_size = self.counts.shape
        added = max(4, lanes)
        self.counts = torch.cat([self.counts, self.counts.new_zeros(added, vocab_size)])
        self._free.extend(range(lanes + added - 1, lanes - 1, -1))
