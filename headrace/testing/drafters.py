"""A faulty drafter: some of its drafts are right, others are wrong, too long, impossible, or continue after the end.

Drafts must not change outputs. So an engine with this drafter must output the same as without drafts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from headrace.core.capacity import NO_WINDOWS, WindowGroups
from headrace.core.drafting.proposal import DraftRow, Proposal, StepLoad
from headrace.core.request import Request
from headrace.testing.hashing_runner import expected_tokens, grammar_of, seed_of, seen

Truth = Callable[[DraftRow, int], Sequence[int]]
"""Returns the right tokens after those of an ask, as far as they are known, and at most the given number."""

MOST = 8
IMPOSSIBLE = (-1, -2, -3, 1 << 40)
"""Token ids that no vocabulary has."""


def hashed_truth(draft_row: DraftRow, count: int, windows: WindowGroups = NO_WINDOWS) -> Sequence[int]:
    """The next tokens of a `HashingRunner`, ignoring the end of the output."""
    request, params = draft_row.request, draft_row.request.params
    done = len(draft_row.tokens) - len(request.tokens)
    seed, grammar = seed_of(params, request.seed), grammar_of(params)
    prompt = seen(request.tokens, request.images)
    return expected_tokens(prompt, seed, done + count, frozenset(), grammar, windows)[done:]


class LyingDrafter:
    """A `core.drafting.proposal.Drafter` that proposes the ``truth`` at random times, chosen by ``seed``.

    ``drafted`` and ``accepted`` count the verified tokens. It raises at the ``fails``-th ask. It reports
    ``draft_seconds`` for each ask of a step.
    """

    idle = False

    def __init__(
        self, truth: Truth, seed: int, vocab_size: int, fails: int | None = None, draft_seconds: float = 0.0
    ) -> None:
        self.drafted = 0
        self.accepted = 0
        self.ends: list[str] = []
        self.seconds: dict[str, float] = {}
        self._truth = truth
        self._rng = random.Random(seed)
        self._vocab_size = vocab_size
        self._left = fails
        self._draft_seconds = draft_seconds

    def draft(self, draft_rows: Sequence[DraftRow], load: StepLoad) -> Sequence[Proposal | None]:
        """See `Drafter.draft`; a proposal may be longer than asked for."""
        if self._left is not None:
            self._left -= len(draft_rows)
            if self._left <= 0:
                raise RuntimeError("the drafter is out of order")
        assert all(draft_row.max_tokens > 0 for draft_row in draft_rows), (
            "the drafter was asked for a draft of no tokens"
        )
        self.seconds = (
            {draft_row.request.id: self._draft_seconds for draft_row in draft_rows}
            if self._draft_seconds
            else {}
        )
        return [self._propose(draft_row) for draft_row in draft_rows]

    def _propose(self, draft_row: DraftRow) -> Proposal | None:
        rng, way = self._rng, self._rng.random()
        if way < 0.15:
            return None
        if way < 0.3:
            tokens = [rng.randrange(self._vocab_size) for _ in range(rng.randint(0, MOST))]
        else:
            tokens = list(
                self._truth(draft_row, rng.randint(1, MOST if way < 0.85 else draft_row.max_tokens + MOST))
            )
        if 0.4 < way < 0.65 and tokens:  # one wrong token among right ones
            tokens[rng.randrange(len(tokens))] = rng.randrange(self._vocab_size)
        elif 0.65 < way < 0.7 and tokens:
            tokens[rng.randrange(len(tokens))] = rng.choice(IMPOSSIBLE)
        return Proposal(tuple(tokens), (0.5,) * len(tokens), "lies")

    def next_draft_step(self, request: Request) -> int:
        """See `Drafter.next_draft_step`: it may be asked at every step."""
        return 0

    def observed(self, rows: int, drawn: int, seconds: float, drafted: bool) -> None:
        """See `Drafter.observed`."""
        assert 0 < rows <= drawn

    def verified(self, request_id: str, proposal: Proposal, accepted: int) -> None:
        """See `Drafter.verified`."""
        assert 0 <= accepted <= len(proposal.tokens) == len(proposal.confidences)
        self.drafted += len(proposal.tokens)
        self.accepted += accepted

    def ended(self, request: Request, tokens: list[int]) -> None:
        """See `Drafter.ended`."""
        self.ends.append(request.id)
