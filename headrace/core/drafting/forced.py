"""Drafts of what a grammar forces: where only one continuation is allowed, its tokens are verified in one step.

```
 drawn      { " n
 forced           a m e " : _ "         one step draws them all, and the token after them
 free                           B e r …
```
A forced token is drawn at its place like any other, from the only tokens that its mask allows. So text, tokens and
log-probabilities are those of an answer without drafts. Rows for which nothing is forced get the drafts of another
drafter, if there is one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from headrace.core.drafting.draft_budget import DraftBudget, Offer
from headrace.core.drafting.proposal import DraftAsk, Drafter, Proposal, StepLoad
from headrace.core.request import Request

SOURCE = "grammar"
"""The source of these proposals."""

MARGIN = 2.0
"""A forced token must be worth this multiple of its time. It always comes, so what counts is the time that it saves,
and where that is little, a step is only made longer for the other rows."""

UNTIMED = 32
"""The most tokens of a row before the times of steps are known."""


class ForcedTokens(Protocol):
    """Knows which tokens the grammars of requests force."""

    @property
    def quiet(self) -> bool:
        """Whether nothing is forced now for any request, and is not likely to be after its next token."""
        ...

    def following(self, asks: Sequence[DraftAsk]) -> Sequence[tuple[int, ...]]:
        """The tokens that must follow the known ones of each ask, those in flight first; empty: not known."""
        ...

    def ended(self, request_id: str) -> None:
        """A request left the engine."""
        ...


class ForcedFirst:
    """A `core.drafting.proposal.Drafter` that verifies forced tokens first.

    Args:
        forced: what grammars force.
        others: drafts for all other rows; None: they have none.
    """

    def __init__(self, forced: ForcedTokens, others: Drafter | None = None) -> None:
        self.others = others
        self.seconds: Mapping[str, float] = {}
        """As `Drafter.seconds`."""
        self._forced = forced
        self._budget = DraftBudget(margin=MARGIN)
        self._untimed = DraftBudget(UNTIMED)

    @property
    def idle(self) -> bool:
        """As `Drafter.idle`."""
        return self._forced.quiet and (self.others is None or self.others.idle)

    def asked_from(self, request: Request) -> int:
        """As `Drafter.asked_from`: a grammar may force tokens after any token."""
        if request.params.structured_outputs is not None or self.others is None:
            return 0
        return self.others.asked_from(request)

    def draft(self, asks: Sequence[DraftAsk], load: StepLoad) -> Sequence[Proposal | None]:
        """As `Drafter.draft`."""
        self.seconds = {}
        drafts: list[Proposal | None] = [None] * len(asks)
        if not self._forced.quiet:
            runs = [
                run[: ask.most] if len(run) > ask.ahead else ()
                for ask, run in zip(asks, self._forced.following(asks), strict=True)
            ]
            if any(runs):
                drafts, load = self._verified(asks, runs, load)
        if self.others is not None and not self.others.idle:
            left = [row for row, draft in enumerate(drafts) if draft is None]
            for row, draft in zip(left, self.others.draft([asks[row] for row in left], load), strict=True):
                drafts[row] = draft
            self.seconds = self.others.seconds
        return drafts

    def observed(self, rows: int, drawn: int, seconds: float, drafted: bool) -> None:
        """As `Drafter.observed`."""
        if self.others is not None:
            self.others.observed(rows, drawn, seconds, drafted)

    def verified(self, request_id: str, proposal: Proposal, accepted: int) -> None:
        """As `Drafter.verified`."""
        if self.others is not None and proposal.source != SOURCE:
            self.others.verified(request_id, proposal, accepted)

    def ended(self, request: Request, tokens: list[int]) -> None:
        """As `Drafter.ended`."""
        self._forced.ended(request.id)
        if self.others is not None:
            self.others.ended(request, tokens)

    def _verified(
        self, asks: Sequence[DraftAsk], runs: Sequence[tuple[int, ...]], load: StepLoad
    ) -> tuple[list[Proposal | None], StepLoad]:
        """As much of the ``runs`` as pays, and the load of the step with it."""
        offers = [
            Offer(
                (1.0,) * len(run),
                len(ask.tokens),
                ask.ahead,
                ask.request.slo.tpot_seconds or math.inf,
                math.inf,  # certain tokens are worth a step that is longer for others, once
            )
            for ask, run in zip(asks, runs, strict=True)
        ]
        budget = self._untimed if load.times is None else self._budget
        drafts: list[Proposal | None] = []
        tokens, contexts = load.tokens, load.contexts
        for ask, run, choice in zip(asks, runs, budget.choose(offers, load._replace(paces=())), strict=True):
            count = choice.tokens
            drafts.append(Proposal(run[:count], (1.0,) * count, SOURCE, choice.cut) if run else None)
            verified = max(0, count - ask.ahead)
            tokens += verified
            contexts += verified * len(ask.tokens)
        left = load.budget - (tokens - load.tokens)
        return drafts, load._replace(tokens=tokens, contexts=contexts, budget=left)
