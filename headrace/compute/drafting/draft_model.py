"""A proposer that runs a second, small checkpoint: its likeliest tokens are the drafts.

```
 asks ─► followed requests ─► first pass: tokens that are new since the last call, all rows in one batch
                              next passes: one drafted token of each row that is still confident
 rejected drafts are overwritten at the next call; a row that is not caught up yet proposes nothing
```
Drafts are greedy whatever the request's temperature: with the built-in models at temperature 1, the likeliest token of
the draft model is accepted more often (0.79) than a draw by the target's own random number (0.76).
A failure disables drafting with one warning, and requests continue without drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from headrace.compute.drafting.followed import DraftPages, Followed
from headrace.compute.drafting.forward import Decoder, Forward, Guesses, Tables
from headrace.compute.kv import PagedKV
from headrace.core.drafting.proposal import DraftAsk, Proposal
from headrace.core.request import Request

LEAST_CONFIDENCE = 0.3
"""A draft ends where the probability that all its tokens are accepted falls below this: the pass costs more then."""

CATCH_UP_TOKENS = {"cpu": 256, "cuda": 2048}
"""Tokens that rows which are behind may compute in one call, together, so that a long prompt does not delay a step."""


class _Line(NamedTuple):
    """A row of a call: the ask's place in it, and how many of its tokens are computed now."""

    place: int
    state: Followed
    length: int
    most: int  # tokens to propose; 0: it is not caught up after this call


class _Draft:
    """The tokens drafted for a row so far; ``survival`` is the probability that all are accepted."""

    __slots__ = ("confidences", "line", "survival", "tokens")

    def __init__(self, line: _Line) -> None:
        self.line = line
        self.tokens: list[int] = []
        self.confidences: list[float] = []
        self.survival = 1.0

    def take(self, token: int, probability: float, least: float) -> bool:
        """Append the next token, unless the draft ends before it; whether a further one is wanted."""
        self.survival *= probability
        if not self.survival >= least:  # false for NaN too
            return False
        self.tokens.append(token)
        self.confidences.append(probability)
        return len(self.tokens) < self.line.most


class DraftModel:
    """`core.drafting.proposal.Proposer` on a decoder with its own pages.

    Args:
        decoder: the draft model, of the target's vocabulary.
        kv: its pages.
        max_model_len: the longest sequence that it can continue; longer ones get no drafts.
        warn: receives the one message that says why drafting was disabled.
        least_confidence: see `LEAST_CONFIDENCE`.
        catch_up_tokens: see `CATCH_UP_TOKENS`.
    """

    name = "draft_model"

    def __init__(
        self,
        decoder: Decoder,
        kv: PagedKV,
        *,
        max_model_len: int,
        warn: Callable[[str], None],
        least_confidence: float = LEAST_CONFIDENCE,
        catch_up_tokens: int | None = None,
    ) -> None:
        self.pages = DraftPages(kv.num_blocks, kv.block_size, max_model_len)
        self._forward = Forward(decoder, kv)
        self._max_model_len = max_model_len
        self._warn = warn
        self._least_confidence = least_confidence
        self._catch_up_tokens = catch_up_tokens or CATCH_UP_TOKENS[kv.device.type]
        self._enabled = True

    def propose(self, asks: Sequence[DraftAsk]) -> Sequence[Proposal | None]:
        """See `Proposer.propose`; None also for rows that are not caught up or have no pages."""
        if not self._enabled:
            return [None] * len(asks)
        try:
            with torch.inference_mode():
                return self._propose(asks)
        except (
            Exception
        ) as error:  # of the device, of memory, or of the model: requests continue without drafts
            self._enabled = False
            self.pages.clear()
            self._warn(f"the draft model failed ({error}); requests continue without its drafts")
            return [None] * len(asks)

    def ended(self, request: Request, tokens: list[int]) -> None:
        """See `Proposer.ended`."""
        self.pages.drop(request.id)

    def _propose(self, asks: Sequence[DraftAsk]) -> Sequence[Proposal | None]:
        proposals: list[Proposal | None] = [None] * len(asks)
        lines = self._lines(asks)
        if not lines:
            return proposals
        for draft in self._draft(asks, lines):
            if draft.tokens:
                draft.line.state.drafted = draft.tokens
                tokens, confidences = tuple(draft.tokens), tuple(draft.confidences)
                proposals[draft.line.place] = Proposal(tokens, confidences, self.name)
        return proposals

    def _lines(self, asks: Sequence[DraftAsk]) -> list[_Line]:
        """The rows to compute, those of one token first."""
        asking = frozenset(ask.request.id for ask in asks)
        found: list[tuple[int, Followed, int]] = []
        for place, (request, tokens, most) in enumerate(asks):
            # The last draft is never computed here, so its position may be the first one beyond the limit.
            most = min(most, self._max_model_len + 1 - len(tokens))
            if most < 1:
                continue
            state = self.pages.find(request, tokens, len(tokens) + most - 1, asking)
            if state is not None:
                found.append((place, state, most))
        lines = []
        left = self._catch_up_tokens
        for place, state, most in sorted(found, key=lambda each: each[1].number):
            behind = state.known - state.computed
            length = behind
            if behind > most + 1:
                length = min(behind, left)
                left -= length
            if length:
                lines.append(_Line(place, state, length, most if length == behind else 0))
        lines.sort(key=lambda line: line.length)
        return lines

    def _draft(self, asks: Sequence[DraftAsk], lines: Sequence[_Line]) -> list[_Draft]:
        """The drafts of ``lines``: their first pass, then one pass a token while any row is confident."""
        width = max(len(line.state.table) for line in lines)
        tables = np.stack([line.state.row[:width] for line in lines])
        guesses = self._first_pass(asks, lines, tables)
        drafts = [_Draft(line) for line in lines if line.most]
        going = list(range(len(drafts)))
        where = np.array([row for row, line in enumerate(lines) if line.most], dtype=np.int64)
        while guesses is not None:
            tokens, probabilities = guesses.tokens.tolist(), guesses.probabilities.tolist()
            on = []
            for at, draft in enumerate(going):
                if drafts[draft].take(tokens[at], probabilities[at], self._least_confidence):
                    on.append(at)
            if not on:
                break
            going = [going[at] for at in on]
            if len(on) < len(where):
                where = where[on]
            starts = np.array([drafts[draft].line.state.computed for draft in going], dtype=np.int64)
            some = guesses.tokens[on].astype(np.int32)
            rows = len(on)
            every = tables if rows == len(tables) else tables[where]
            guesses = self._forward.run(some, starts, np.ones(rows, dtype=np.int64), every, np.arange(rows))
            for draft in going:
                drafts[draft].line.state.computed += 1
        return drafts

    def _first_pass(self, asks: Sequence[DraftAsk], lines: Sequence[_Line], tables: Tables) -> Guesses | None:
        """Compute the known tokens of ``lines``; the guesses of those that are caught up then."""
        starts = np.array([line.state.computed for line in lines], dtype=np.int64)
        lengths = np.array([line.length for line in lines], dtype=np.int64)
        tokens: list[int] = []
        for line in lines:
            begin = line.state.computed
            tokens += asks[line.place].tokens[begin : begin + line.length]
        wanted = (np.cumsum(lengths) - 1)[[line.most > 0 for line in lines]]
        guesses = self._forward.run(np.array(tokens, dtype=np.int32), starts, lengths, tables, wanted)
        for line in lines:
            line.state.computed += line.length
            self.pages.register(line.state, asks[line.place].tokens)
        return guesses
