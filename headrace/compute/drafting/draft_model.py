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

from headrace.compute.drafting.followed import DraftPages, Followed
from headrace.compute.drafting.forward import Decoder, Forward, Rows
from headrace.compute.drafting.guarded import LEAST_CONFIDENCE, MOST, GuardedProposer
from headrace.compute.kernels import Drafted
from headrace.compute.kv import PagedKV
from headrace.core.drafting.proposal import DraftRow, Proposal
from headrace.core.request import Request

CATCH_UP_TOKENS = {"cpu": 256, "cuda": 2048}
"""Total tokens per call for rows that are not caught up, so that a long prompt does not delay a step."""


COLUMNS = 8
"""Block tables are padded to a multiple of this width, so that shapes seldom change."""


class _Line(NamedTuple):
    """A row of a call: the index of its ask, and the number of tokens to compute now."""

    place: int
    state: Followed
    length: int
    most: int  # tokens to propose; 0: it is not caught up after this call


class DraftModel(GuardedProposer):
    """`core.drafting.proposal.CostlyProposer` on a decoder with its own pages.

    Args:
        decoder: the draft model, of the target's vocabulary.
        kv: its pages.
        max_model_len: the longest sequence that it can continue; longer ones get no drafts.
        warn: receives the message when drafting is disabled.
        most: maximum number of tokens to draft for a row, beyond tokens that are sampled but not known yet.
        least_confidence: see `guarded.LEAST_CONFIDENCE`.
        catch_up_tokens: see `CATCH_UP_TOKENS`.
    """

    name, label = "draft_model", "draft model"

    def __init__(
        self,
        decoder: Decoder,
        kv: PagedKV,
        *,
        max_model_len: int,
        warn: Callable[[str], None],
        most: int = MOST,
        least_confidence: float = LEAST_CONFIDENCE,
        catch_up_tokens: int | None = None,
    ) -> None:
        super().__init__(warn)
        self.pages = DraftPages(kv.num_blocks, kv.block_size, max_model_len)
        self._forward = Forward(decoder, kv)
        self._max_model_len = max_model_len
        self._most = most
        self._least_confidence = least_confidence
        self._catch_up_tokens = catch_up_tokens or CATCH_UP_TOKENS[kv.device.type]

    def ended(self, request: Request, tokens: list[int]) -> None:
        """See `Proposer.ended`."""
        self.pages.drop(request.id)

    def _release(self) -> None:
        self.pages.clear()

    def _propose(self, draft_rows: Sequence[DraftRow]) -> Sequence[Proposal | None]:
        proposals: list[Proposal | None] = [None] * len(draft_rows)
        lines = self._lines(draft_rows)
        if not lines:
            return proposals
        caught_up = [line for line in lines if line.most]
        drafted = self._compute(draft_rows, lines, caught_up)
        for line in lines:
            line.state.computed += line.length
            self.pages.register(line.state, draft_rows[line.place].tokens)
        if drafted is None:
            return proposals
        for at, (line, count) in enumerate(zip(caught_up, drafted.counts.tolist(), strict=True)):
            tokens = tuple(drafted.tokens[at, :count].tolist())
            line.state.computed += int(drafted.computed[at])
            line.state.drafted = tokens
            if tokens:
                confidences = tuple(drafted.probabilities[at, :count].tolist())
                proposals[line.place] = Proposal(tokens, confidences, self.name)
        return proposals

    def _lines(self, draft_rows: Sequence[DraftRow]) -> list[_Line]:
        """The rows to compute, those of one token first."""
        asking = frozenset(draft_row.request.id for draft_row in draft_rows)
        found: list[tuple[int, Followed, int]] = []
        for place, (request, tokens, most, ahead, _) in enumerate(draft_rows):
            # The last draft is never computed here, so its position may be the first one beyond the limit.
            most = min(most, self._most + ahead, self._max_model_len + 1 - len(tokens))
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

    def _compute(
        self, draft_rows: Sequence[DraftRow], lines: Sequence[_Line], caught_up: Sequence[_Line]
    ) -> Drafted | None:
        """Compute the new tokens of ``lines``, and continue those that are ``caught_up``."""
        lengths = np.array([line.length for line in lines], dtype=np.int64)
        tokens: list[int] = []
        for place, state, length, _ in lines:
            tokens += draft_rows[place].tokens[state.computed : state.computed + length]
        width = -(-max(len(line.state.table) for line in lines) // COLUMNS) * COLUMNS
        rows = Rows(
            np.array(tokens, dtype=np.int32),
            np.array([line.state.computed for line in lines], dtype=np.int64),
            lengths,
            np.concatenate([line.state.row[:width] for line in lines]).reshape(len(lines), -1),
        )
        if not caught_up:
            self._forward.compute(rows)
            return None
        wanted = np.cumsum(lengths) - 1
        if len(caught_up) < len(lines):
            wanted = wanted[[line.most > 0 for line in lines]]
        most = np.array([line.most for line in caught_up], dtype=np.int64)
        return self._forward.draft(rows, wanted, most, self._least_confidence)
