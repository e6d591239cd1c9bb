"""Drafts of forced tokens: where a grammar allows only one continuation, its tokens are verified in one step.

```
 drawn      { " n
 forced           a m e " : _ "         one step draws them all, and the token after them
 not forced                     B e r …
```
A forced token is sampled at its position like any other, from the tokens that its mask allows. So text, tokens and
log-probabilities are the same as without drafts. Rows without forced tokens get the drafts of another drafter, if there
is one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from headrace.core.drafting.draft_budget import Candidate, DraftBudget
from headrace.core.drafting.proposal import Drafter, DraftRow, Proposal, StepLoad
from headrace.core.request import Request

SOURCE = "grammar"
"""The source of these proposals."""

MARGIN = 2.0  # see docs/decisions/speculative-decoding.md#forced-tokens-as-drafts
"""The gain of a forced token must exceed its cost by this factor. The token is certain, so the gain is the time that it
saves. Where that is little, the draft would mainly lengthen the step for the other rows."""

MAX_UNTIMED = 32
"""Maximum number of forced tokens per row while step times are not known."""


class ForcedTokens(Protocol):
    """Finds the tokens that the grammars of requests force."""

    @property
    def idle(self) -> bool:
        """Whether no request has forced tokens now, nor is likely to have any after its next token."""
        ...

    def forced_tokens(self, draft_rows: Sequence[DraftRow]) -> Sequence[tuple[int, ...]]:
        """The tokens that must follow the known ones of each row, those in flight first; empty if not known."""
        ...

    def ended(self, request_id: str) -> None:
        """A request left the engine."""
        ...


class ForcedTokenDrafter:
    """A `core.drafting.proposal.Drafter` that proposes forced tokens first.

    Args:
        forced: finds the forced tokens.
        fallback: the drafter of all other rows; None: they get no drafts.
    """

    def __init__(self, forced: ForcedTokens, fallback: Drafter | None = None) -> None:
        self.fallback = fallback
        self.seconds: Mapping[str, float] = {}
        """As `Drafter.seconds`."""
        self._forced = forced
        self._budget = DraftBudget(margin=MARGIN)
        self._untimed_budget = DraftBudget(MAX_UNTIMED)

    @property
    def idle(self) -> bool:
        """As `Drafter.idle`."""
        return self._forced.idle and (self.fallback is None or self.fallback.idle)

    def next_draft_step(self, request: Request) -> int:
        """As `Drafter.next_draft_step`: a grammar may force tokens after any token."""
        if request.params.structured_outputs is not None or self.fallback is None:
            return 0
        return self.fallback.next_draft_step(request)

    def draft(self, draft_rows: Sequence[DraftRow], load: StepLoad) -> Sequence[Proposal | None]:
        """As `Drafter.draft`."""
        self.seconds = {}
        drafts: list[Proposal | None] = [None] * len(draft_rows)
        if not self._forced.idle:
            runs = [
                run[: draft_row.max_tokens] if len(run) > draft_row.in_flight else ()
                for draft_row, run in zip(draft_rows, self._forced.forced_tokens(draft_rows), strict=True)
            ]
            if any(runs):
                drafts, load = self._cut_runs(draft_rows, runs, load)
        if self.fallback is not None and not self.fallback.idle:
            left = [row for row, draft in enumerate(drafts) if draft is None]
            for row, draft in zip(
                left, self.fallback.draft([draft_rows[row] for row in left], load), strict=True
            ):
                drafts[row] = draft
            self.seconds = self.fallback.seconds
        return drafts

    def observed(self, rows: int, drawn: int, seconds: float, drafted: bool) -> None:
        """As `Drafter.observed`."""
        if self.fallback is not None:
            self.fallback.observed(rows, drawn, seconds, drafted)

    def verified(self, request_id: str, proposal: Proposal, accepted: int) -> None:
        """As `Drafter.verified`."""
        if self.fallback is not None and proposal.source != SOURCE:
            self.fallback.verified(request_id, proposal, accepted)

    def ended(self, request: Request, tokens: list[int]) -> None:
        """As `Drafter.ended`."""
        self._forced.ended(request.id)
        if self.fallback is not None:
            self.fallback.ended(request, tokens)

    def _cut_runs(
        self, draft_rows: Sequence[DraftRow], runs: Sequence[tuple[int, ...]], load: StepLoad
    ) -> tuple[list[Proposal | None], StepLoad]:
        """Drafts of the forced ``runs``, cut to the tokens that pay, and the load of the step with them."""
        candidates = [
            Candidate(
                (1.0,) * len(run),
                len(draft_row.tokens),
                draft_row.in_flight,
                draft_row.request.slo.tpot_seconds or math.inf,
                math.inf,  # certain tokens may lengthen the step of other rows, because it happens once
            )
            for draft_row, run in zip(draft_rows, runs, strict=True)
        ]
        budget = self._untimed_budget if load.times is None else self._budget
        drafts: list[Proposal | None] = []
        tokens, contexts = load.tokens, load.contexts
        for draft_row, run, choice in zip(
            draft_rows, runs, budget.choose(candidates, load._replace(other_tokens_per_step=())), strict=True
        ):
            count = choice.tokens
            drafts.append(Proposal(run[:count], (1.0,) * count, SOURCE, choice.cut) if run else None)
            verified = max(0, count - draft_row.in_flight)
            tokens += verified
            contexts += verified * len(draft_row.tokens)
        left = load.budget - (tokens - load.tokens)
        return drafts, load._replace(tokens=tokens, contexts=contexts, budget=left)
