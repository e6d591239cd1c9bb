"""Drafts for a step: asks the proposers, keeps the most promising proposal of each row, and cuts it to what pays.

```
 asks ──► compare earlier proposals with what came ──► Acceptance
      ──► free proposers ──► costly ones, where they promise more ──► best of each row ──► DraftBudget ──► drafts
```
A proposer is free if its proposals cost next to nothing (a look-up in the text), and costly if they take time on the
device (a draft model). A proposer that does not help a row is asked for it less often, above all with many rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from headrace.core.drafting.acceptance import Acceptance, compared
from headrace.core.drafting.costly_sources import CostlySource
from headrace.core.drafting.draft_budget import Cut, DraftBudget, Offer
from headrace.core.drafting.proposal import CostlyProposer, DraftAsk, Proposal, Proposer, StepLoad
from headrace.core.request import Request
from headrace.core.request_settings import NO_SETTINGS

FEW_ROWS = 4
"""With more rows, proposers that do not help rest longer: asking them for every row would take the host's time."""


class Rest(NamedTuple):
    """The most steps for which a proposer rests that did not help a row, with few rows and with many."""

    few: int
    many: int


NOTHING = Rest(0, 3)
"""It proposed nothing: the next token may change that."""

BEHIND = Rest(1, 7)
"""Another proposal was better."""

NOT_WORTH = Rest(3, 15)
"""Its proposal was not worth the time."""


class Estimated(NamedTuple):
    """A proposal with its ``survivals`` (the chance that a token and all before it are right) and their sum."""

    proposal: Proposal
    survivals: tuple[float, ...]
    expected: float


class BudgetedDrafter:
    """A `core.drafting.proposal.Drafter` over several proposers.

    Args:
        proposers: free ones, in the order in which equals are preferred.
        acceptance: the estimates, learned here.
        budget: chooses how much is verified.
        costly: costly ones; each with the time of drafting one token for some rows, as a share of the target's time for
            a step of these rows.
    """

    idle = False
    """As `Drafter.idle`: a proposer may have something for any request."""

    def __init__(
        self,
        proposers: Sequence[Proposer],
        acceptance: Acceptance,
        budget: DraftBudget,
        costly: Sequence[tuple[CostlyProposer, float]] = (),
    ) -> None:
        self.proposers: tuple[Proposer, ...] = (*proposers, *(each for each, _ in costly))
        self._free = tuple(proposers)
        self._costly = [CostlySource(each, share, acceptance) for each, share in costly]
        self._acceptance = acceptance
        self._budget = budget
        self.seconds: dict[str, float] = {}
        """Time that the last `draft` has spent in costly proposers, by request."""
        self._lives: dict[str, _Life] = {}
        self._few = True

    def draft(self, asks: Sequence[DraftAsk], load: StepLoad) -> Sequence[Proposal | None]:
        """As `Drafter.draft`. An empty proposal says why nothing is verified of what was proposed."""
        lives = [self._life(ask) for ask in asks]
        self._few = len(asks) <= FEW_ROWS
        self.seconds = {}
        best: list[Estimated | None] = [None] * len(asks)
        for proposer in self._free:
            name = proposer.name
            due = [row for row in _allowed(asks, name) if lives[row].due(name)]
            self._propose(proposer, due, asks, lives, best)
        for source in self._costly:
            self._draft_costly(source, asks, lives, best, load)
        return self._cut(asks, lives, best, load)

    def _draft_costly(
        self,
        source: CostlySource,
        asks: Sequence[DraftAsk],
        lives: Sequence[_Life],
        best: list[Estimated | None],
        load: StepLoad,
    ) -> None:
        """Ask a costly proposer for the rows, and as many tokens, as are worth its time."""
        allowed = _allowed(asks, source.proposer.name)
        if not allowed:
            return
        held = [each.expected if each else 0.0 for each in (best[row] for row in allowed)]
        chosen = source.worth([asks[row] for row in allowed], held, load, self._budget.fixed)
        cut, rows = list(asks), []
        for row, most in zip(allowed, chosen, strict=True):
            if most:
                rows.append(row)
                cut[row] = asks[row]._replace(most=min(asks[row].most, most))
        if rows:
            before = source.proposer.seconds
            self._propose(source.proposer, rows, cut, lives, best)
            spent = source.proposer.seconds - before
            source.spent([cut[row] for row in rows], spent, load.times)
            self._charge([cut[row] for row in rows], spent)

    def _charge(self, asks: Sequence[DraftAsk], seconds: float) -> None:
        """Divide the time of a proposer among the requests that it drafted for, by the tokens that were asked for."""
        each = seconds / sum(ask.most for ask in asks)
        for ask in asks:
            name = ask.request.id
            self.seconds[name] = self.seconds.get(name, 0.0) + each * ask.most

    def verified(self, request_id: str, proposal: Proposal, accepted: int) -> None:
        """Nothing: `draft` and `ended` compare every proposal, verified or not, with the tokens that came."""

    def ended(self, request: Request, tokens: list[int]) -> None:
        """Learn from the last proposals of a request, and drop its state."""
        life = self._lives.pop(request.id, None)
        if life is not None:
            life.settle(request, tokens, self._acceptance)
        self._acceptance.ended(request.id)
        for proposer in self.proposers:
            proposer.ended(request, tokens)

    def _life(self, ask: DraftAsk) -> _Life:
        life = self._lives.get(ask.request.id)
        if life is None:
            life = self._lives[ask.request.id] = _Life()
        elif life.open:
            life.settle(ask.request, ask.tokens, self._acceptance)
        return life

    def _propose(
        self,
        proposer: Proposer,
        rows: Sequence[int],
        asks: Sequence[DraftAsk],
        lives: Sequence[_Life],
        best: list[Estimated | None],
    ) -> None:
        """Ask ``proposer`` for ``rows``; a proposal that promises more tokens than the best one replaces it."""
        if not rows:
            return
        name = proposer.name
        for row, proposal in zip(rows, proposer.propose([asks[row] for row in rows]), strict=True):
            if proposal is None or not proposal.tokens:
                self._rest(lives[row], name, NOTHING)
                continue
            ask, request = asks[row], asks[row].request
            estimates = self._acceptance.estimate(name, request.tenant, request.id, proposal.confidences)
            survivals = tuple(accumulate(estimates, mul))
            lives[row].open[name] = (len(ask.tokens), proposal)
            expected = sum(survivals[ask.ahead :])
            held = best[row]
            if held is not None and expected <= held.expected:
                self._rest(lives[row], name, BEHIND)
                continue
            if held is not None:
                self._rest(lives[row], held.proposal.source, BEHIND)
            best[row] = Estimated(Proposal(proposal.tokens, estimates, name), survivals, expected)

    def _cut(
        self,
        asks: Sequence[DraftAsk],
        lives: Sequence[_Life],
        best: Sequence[Estimated | None],
        load: StepLoad,
    ) -> list[Proposal | None]:
        if not any(best):
            return [None] * len(asks)
        offers = []
        for ask, each in zip(asks, best, strict=True):
            target = ask.request.slo.tpot_seconds
            survivals = () if each is None else each.survivals
            offers.append(Offer(survivals, len(ask.tokens), ask.ahead, target or float("inf")))
        drafts: list[Proposal | None] = []
        for life, each, choice in zip(lives, best, self._budget.choose(offers, load), strict=True):
            if each is None:
                drafts.append(None)
                continue
            tokens, estimates, source, _ = each.proposal
            count = choice.tokens
            if count:
                life.rests.pop(source, None)
            elif choice.cut is Cut.NOT_WORTH:
                self._rest(life, source, NOT_WORTH)
            drafts.append(Proposal(tokens[:count], estimates[:count], source, choice.cut))
        return drafts

    def _rest(self, life: _Life, source: str, rest: Rest) -> None:
        life.rest(source, rest.few if self._few else rest.many)


def _allowed(asks: Sequence[DraftAsk], method: str) -> list[int]:
    """The rows whose requests may be drafted for by this method."""
    return [
        row
        for row, ask in enumerate(asks)
        if ask.request.settings is NO_SETTINGS or ask.request.settings.may_draft(method)
    ]


class _Life:
    """A request while it is drafted for."""

    __slots__ = ("open", "rests")

    def __init__(self) -> None:
        self.open: dict[
            str, tuple[int, Proposal]
        ] = {}  # by source: known tokens at its last proposal, and that
        self.rests: dict[str, tuple[int, int]] = {}  # by source: steps left, and the length of this rest

    def due(self, source: str) -> bool:
        """Whether a source is asked at this step; counts the step."""
        left, length = self.rests.get(source, (0, 0))
        if left:
            self.rests[source] = (left - 1, length)
        return not left

    def rest(self, source: str, longest: int) -> None:
        """A source did not help: it rests for twice as long as the last time."""
        length = min(longest, 2 * self.rests.get(source, (0, 0))[1] + 1)
        self.rests[source] = (length, length)

    def settle(self, request: Request, tokens: list[int], acceptance: Acceptance) -> None:
        """Compare the last proposal of each source with the tokens that came in its place."""
        count = len(tokens)
        for source, (start, proposal) in tuple(self.open.items()):
            if count <= start:
                continue
            del self.open[source]
            drafted = proposal.tokens
            trials = compared(drafted, tokens[start : start + len(drafted)])
            acceptance.learn(source, request.tenant, request.id, proposal.confidences, trials)
