"""Packed forward passes of a draft model: returns the likeliest token of each row and its probability.

```
 first pass    row 0: tokens since the last call   row 1: 256 tokens of a prompt (not caught up: no logits)
 next passes   row 0: the token that it guessed
```
Kernels that support it run all passes in one call. Otherwise guesses are copied to the host after every pass, because a
draft may end there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import torch

from headrace.compute.batch import Batch, Ints
from headrace.compute.kernels import Drafted
from headrace.compute.kernels.step_arrays import step_arrays
from headrace.compute.model.kv import PagedKV
from headrace.compute.transfer import upload
from headrace.core.drafting.proposal import DraftRow, Proposal

# The common base of proposers with a model: measures their time, and disables drafts on failure.

LEAST_CONFIDENCE = 0.3  # see docs/decisions/speculative-decoding.md#drafting-for-sampled-requests
"""A draft ends when the probability that all its tokens are accepted falls below this: a further pass does not pay."""

MOST = 16
"""Default maximum length of a draft."""


class GuardedProposer:
    """A `core.drafting.proposal.CostlyProposer` that is disabled with one warning when it raises an error.

    ``warn`` receives that warning. ``seconds`` is the total time of all proposals.
    """

    label: ClassVar[str]
    """Name of the proposer in the warning."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._enabled = True
        self.seconds = 0.0

    def propose(self, draft_rows: Sequence[DraftRow]) -> Sequence[Proposal | None]:
        """See `Proposer.propose`; None also for rows whose tokens are not all computed yet."""
        if not self._enabled:
            return [None] * len(draft_rows)
        began = time.perf_counter()
        try:
            with torch.inference_mode():
                return self._propose(draft_rows)
        except Exception as error:
            self._disable(error)
            return [None] * len(draft_rows)
        finally:
            self.seconds += time.perf_counter() - began

    def _disable(self, error: Exception) -> None:
        """Disable the proposer after an error; requests continue without its drafts."""
        self._enabled = False
        self._release()
        self._warn(f"the {self.label} failed ({error}); requests continue without its drafts")

    def clear(self) -> None:
        """Give the memory of its keys and values back to the system, on a CPU; no request is running."""
        raise NotImplementedError

    def _propose(self, draft_rows: Sequence[DraftRow]) -> Sequence[Proposal | None]:
        raise NotImplementedError

    def _release(self) -> None:
        """Release the resources of all requests."""


Tokens = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
Tables = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
Reals = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


class Decoder(Protocol):
    """The methods of a model that drafting needs: see `headrace.compute.runner.Decoder`."""

    def hidden(self, batch: Batch, kv: PagedKV) -> torch.Tensor:
        """Write the batch's keys and values into ``kv``; return the last states [S, hidden] of the wanted positions."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [S, vocab] of hidden states."""
        ...

    def draft(self, batch: Batch, kv: PagedKV, most: Ints, least: float) -> Drafted | None:
        """`Forward.draft` in one call: see `Kernels.draft`."""
        ...


class Guesses(NamedTuple):
    """The likeliest token of each row, int64 [S], and its probability, float32 [S].

    The probability is NaN if the logits are not finite.
    """

    tokens: Ints
    probabilities: Reals


class Rows(NamedTuple):
    """R rows of a pass, those of one token first.

    ``tokens`` int32 [T] are those of all rows, ``starts`` int64 [R] the position of each row's first token and
    ``lengths`` int64 [R] its number of tokens. ``tables`` int32 [R, W] are its blocks, at least up to its last
    position.
    """

    tokens: Tokens
    starts: Ints
    lengths: Ints
    tables: Tables


class Forward:
    """A decoder with its pages; one pass at a time.

    ``follow`` is called before each pass after the first, with the rows of the pass before that continue. ``names``
    int64 are the tokens of the decoder's logits, if they are not those of the vocabulary in order.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: PagedKV,
        follow: Callable[[Ints], None] = lambda rows: None,
        names: Ints | None = None,
    ) -> None:
        self._decoder = decoder
        self._kv = kv
        self._follow = follow
        self._names = names
        self._block_size = kv.block_size
        self._arrays = step_arrays(kv.device, kv.block_size)
        self._guess: Callable[[torch.Tensor], Guesses] = (
            guesses_on_cpu if kv.device.type == "cpu" else guesses
        )

    def compute(self, rows: Rows) -> None:
        """Compute only the keys and values of ``rows``."""
        self._decoder.hidden(self._pack(rows, np.zeros(0, dtype=np.int64)), self._kv)

    def draft(self, rows: Rows, wanted: Ints, most: Ints, least: float) -> Drafted:
        """Compute ``rows``, and continue S of them with their likeliest tokens.

        Args:
            rows: their blocks reach to the end of their drafts.
            wanted: int64 [S], the packed positions of the last tokens of the rows to continue, ascending.
            most: int64 [S], tokens to draft, at least 1.
            least: a draft ends before the token with which the probability that it is all accepted falls below this.
        """
        batch = self._pack(rows, wanted)
        drafted = self._decoder.draft(batch, self._kv, most, least)
        return self._pass_by_pass(batch, rows, wanted, most, least) if drafted is None else drafted

    def _pass_by_pass(self, batch: Batch, rows: Rows, wanted: Ints, most: Ints, least: float) -> Drafted:
        count, longest = len(wanted), int(most.max())
        drafted = Drafted(
            np.zeros((count, longest), dtype=np.int64),
            np.zeros((count, longest), dtype=np.float32),
            np.zeros(count, dtype=np.int64),
            np.zeros(count, dtype=np.int64),
        )
        sources = np.searchsorted(np.cumsum(rows.lengths), wanted, side="right")
        begins = (rows.starts + rows.lengths)[sources]
        survivals = np.ones(count)
        going = np.arange(count)
        while True:
            found = self._guess(self._decoder.logits(self._decoder.hidden(batch, self._kv)))
            survivals[going] *= found.probabilities
            confident = survivals[going] >= least  # false for NaN too
            going, tokens = going[confident], found.tokens[confident]
            if self._names is not None:
                tokens = self._names[tokens]
            places = drafted.counts[going]
            drafted.tokens[going, places] = tokens
            drafted.probabilities[going, places] = found.probabilities[confident]
            drafted.counts[going] += 1
            on = drafted.counts[going] < most[going]
            going, tokens = going[on], tokens[on]
            if not going.size:
                return drafted
            self._follow(np.flatnonzero(confident)[on])
            one = np.ones(len(going), dtype=np.int64)
            starts = begins[going] + drafted.computed[going]
            following = Rows(tokens.astype(np.int32), starts, one, rows.tables[sources[going]])
            batch = self._pack(following, np.arange(len(going)))
            drafted.computed[going] += 1

    def _pack(self, packed: Rows, wanted: Ints) -> Batch:
        tokens, starts, lengths, tables = packed
        if self._arrays is not None:
            tables = np.ascontiguousarray(tables)
            return self._arrays.pack(
                None, starts, lengths, wanted, tables, None, tokens, limit=tables.shape[1] * self._block_size
            )
        rows, size = len(starts), self._block_size
        ends = starts + lengths
        firsts = np.zeros(rows + 1, dtype=np.int64)
        np.cumsum(lengths, out=firsts[1:])
        owners, positions = np.arange(rows), starts
        if len(tokens) != rows:
            owners = np.repeat(owners, lengths)
            positions = np.arange(len(tokens)) + np.repeat(starts - firsts[:-1], lengths)
        pages, offsets = np.divmod(positions, size)
        places = tables[owners, pages].astype(np.int64) * size + offsets
        counts = tuple(lengths.tolist())
        each = upload(
            self._kv.device,
            tokens,
            positions,
            places,
            firsts.astype(np.int32),
            ends.astype(np.int32),
            tables.reshape(-1),
            wanted,
        )
        return Batch(
            tokens=each[0],
            positions=each[1],
            slot_mapping=each[2],
            query_starts=each[3],
            context_lens=each[4],
            block_tables=each[5].view(tables.shape),
            logits_indices=each[6],
            lengths=counts,
            contexts=tuple(ends.tolist()),
            decode_rows=counts.count(1),
            block_size=size,
        )


def guesses(logits: torch.Tensor) -> Guesses:
    """The likeliest token of each row of logits [S, V], and its probability at temperature 1."""
    wide = logits.float()
    peak, tokens = wide.max(-1)
    sums = (wide - peak.unsqueeze(1)).exp_().sum(-1)
    return Guesses(tokens.cpu().numpy(), sums.reciprocal_().cpu().numpy())


def guesses_on_cpu(logits: torch.Tensor) -> Guesses:
    """`guesses` by numpy: torch would wake its threads, which then spin on cores that the kernels' threads need."""
    wide = _wide(logits)
    tokens = wide.argmax(-1)
    with np.errstate(invalid="ignore"):
        wide -= wide[np.arange(len(wide)), tokens, None]
        return Guesses(tokens, 1 / np.exp(wide, out=wide).sum(-1))


def _wide(logits: torch.Tensor) -> Reals:
    """A copy in float32."""
    if logits.dtype == torch.bfloat16:  # the upper half of a float32
        words = logits.view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
        return np.left_shift(words, 16, out=words).view(np.float32)
    wide: Reals = logits.numpy().astype(np.float32)
    return wide
