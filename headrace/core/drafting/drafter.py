"""Drafts for a step: asks the proposers, keeps the most promising proposal of each row, and cuts it to what pays.

```
 asks ──► compare earlier proposals with what came ──► Acceptance
      ──► free proposers ──► costly ones, where they promise more ──► best of each row ──► DraftBudget ──► drafts
```
A proposer is free if its proposals cost next to nothing (a look-up in the text), and costly if they take time on the
device (a draft model). A proposer that does not help a row rests: twice as long each time, up to a length at which all
such questions together take `ASK_SHARE` of the steps' time. So it is asked at every step of a large model, and hardly
ever at the steps of a small one with many rows. Long rests of all rows end at the same steps, because the first
question of a step costs the most, and because few steps should be longer than others.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from headrace.core.drafting.acceptance import Acceptance, compared
from headrace.core.drafting.costly_sources import CostlySource
from headrace.core.drafting.draft_budget import Cut, DraftBudget, Offer
from headrace.core.drafting.pace_trials import PaceTrials
from headrace.core.drafting.proposal import CostlyProposer, DraftAsk, Proposal, Proposer, StepLoad
from headrace.core.request import Request
from headrace.core.request_settings import NO_SETTINGS

CALL_SECONDS, ASK_SECONDS = 80e-6, 12e-6
"""Time of the host to ask at all, and to ask one free proposer for one row and to judge its proposal. Code that runs
once in dozens of steps finds cold caches, so both are twice what they are in a loop.
"""

ASK_SHARE = 0.005
"""Share of the steps' time that may be spent on proposers that do not help."""

LONGEST_REST = 511
"""The most steps for which a proposer rests."""

LONG = 32
"""The shortest rest that is lengthened, so that it ends together with others."""

NOTICED, SELDOM = 0.05, 255
"""Questions that take a larger share of a step than the first number are asked at one step in so many: the 99th
percentile of the time between tokens should not be that of such steps.
"""

UNKNOWN = Proposal((), (), "", Cut.TIMES_UNKNOWN)
"""Says that step times are not known."""

SLOWER = Proposal((), (), "", Cut.SLOWER)
"""Says that steps with drafts have been slower than steps without."""

USUAL_MEMORY = 16
"""Answers of a proposer over which the rest that a new request begins with is averaged."""


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
        self._usual = {each.name: 0.0 for each in proposers}  # the mean length of rests
        self._longest = 0  # the longest rest at this step
        self._seldom = 0  # the longest rest of free proposers, if it is longer
        self._trials = PaceTrials()
        self._resting_until = 0  # the first step at which drafts may be faster than none

    def draft(self, asks: Sequence[DraftAsk], load: StepLoad) -> Sequence[Proposal | None]:
        """As `Drafter.draft`. An empty proposal says why nothing is verified of what was proposed."""
        step = load.step
        if (
            load.times is None and self._budget.fixed is None
        ):  # not even asked: that would lengthen what is measured
            self.seconds = {}
            return [UNKNOWN] * len(asks)
        if self._budget.fixed is None and (rest := self._trials.rest(load.rows)):
            self.seconds = {}
            self._resting_until = step + rest
            return [None if self._trials.drafts_usually(load.rows) else SLOWER] * len(asks)
        lives = [self._life(ask) for ask in asks]
        self._longest = self._longest_rest(load)
        self.seconds = {}
        best: list[Estimated | None] = [None] * len(asks)
        for proposer in self._free:
            name = proposer.name
            due = [row for row in self._allowed(asks, lives, name) if lives[row].due(name, step)]
            self._propose(proposer, due, asks, lives, best, step)
        for source in self._costly:
            self._draft_costly(source, asks, lives, best, load)
        return self._cut(asks, lives, best, load)

    def asked_from(self, request: Request) -> int:
        """As `Drafter.asked_from`."""
        life = self._lives.get(request.id)
        if life is None:
            return self._resting_until
        rests = life.rests
        steps = [rests[each.name].until if each.name in rests else 0 for each in self.proposers]
        for at, source in enumerate(self._costly, len(self._free)):
            steps[at] = max(steps[at], source.resting_until)
        return max(self._resting_until, min(steps, default=0))

    def _draft_costly(
        self,
        source: CostlySource,
        asks: Sequence[DraftAsk],
        lives: Sequence[_Life],
        best: list[Estimated | None],
        load: StepLoad,
    ) -> None:
        """Ask a costly proposer for the rows, and as many tokens, as are worth its time."""
        name = source.proposer.name
        allowed = self._allowed(asks, lives, name)
        if not allowed:
            return
        held = [each.expected if each else 0.0 for each in (best[row] for row in allowed)]
        chosen = source.worth([asks[row] for row in allowed], held, load, self._budget.fixed, self._longest)
        cut, rows = list(asks), []
        for row, most in zip(allowed, chosen, strict=True):
            if most:
                rows.append(row)
                cut[row] = asks[row]._replace(most=min(asks[row].most, most))
        if not rows:
            return
        before = source.proposer.seconds
        self._propose(source.proposer, rows, cut, lives, best, load.step)
        spent = source.proposer.seconds - before
        source.spent([cut[row] for row in rows], spent, load.times)
        self._charge([cut[row] for row in rows], spent)
        for row in rows:
            if (told := lives[row].open.get(name)) is not None:
                source.proposed(told[1].confidences)

    def _charge(self, asks: Sequence[DraftAsk], seconds: float) -> None:
        """Divide the time of a proposer among the requests that it drafted for, by the tokens that were asked for."""
        each = seconds / sum(ask.most for ask in asks)
        for ask in asks:
            name = ask.request.id
            self.seconds[name] = self.seconds.get(name, 0.0) + each * ask.most

    @staticmethod
    def _allowed(asks: Sequence[DraftAsk], lives: Sequence[_Life], method: str) -> list[int]:
        """The rows whose requests may be drafted for by this method; it rests for ever for the others."""
        allowed = []
        for row, ask in enumerate(asks):
            if ask.request.settings is NO_SETTINGS or ask.request.settings.may_draft(method):
                allowed.append(row)
            else:
                lives[row].rests[method] = FORBIDDEN
        return allowed

    def observed(self, rows: int, drawn: int, seconds: float, drafted: bool) -> None:
        """As `Drafter.observed`."""
        if drafted and rows == 1 and any(source.probing for source in self._costly):
            return  # a few tokens of a cold model say nothing about the pace of drafting
        self._trials.observed(rows, drawn, seconds, drafted)

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

    def _longest_rest(self, load: StepLoad) -> int:
        """The rest of all rows at which asking takes `ASK_SHARE` of the time."""
        if self._budget.fixed is not None:
            return 0
        assert load.times is not None
        step = load.times.stairs(load.rows, load.contexts, 1)[0]
        asking = CALL_SECONDS + ASK_SECONDS * load.rows * len(self._free)
        self._seldom = SELDOM if asking > NOTICED * step else 0
        return LONGEST_REST if asking > LONGEST_REST * ASK_SHARE * step else int(asking / (ASK_SHARE * step))

    def _propose(
        self,
        proposer: Proposer,
        rows: Sequence[int],
        asks: Sequence[DraftAsk],
        lives: Sequence[_Life],
        best: list[Estimated | None],
        step: int,
    ) -> None:
        """Ask ``proposer`` for ``rows``; a proposal that promises more tokens than the best one replaces it."""
        if not rows:
            return
        name = proposer.name
        for row, proposal in zip(rows, proposer.propose([asks[row] for row in rows]), strict=True):
            if proposal is None or not proposal.tokens:
                self._rest(lives[row], name, step)
                continue
            ask, request = asks[row], asks[row].request
            estimates = self._acceptance.estimate(name, request.tenant, request.id, proposal.confidences)
            survivals = tuple(accumulate(estimates, mul))
            lives[row].open[name] = (len(ask.tokens), proposal)
            expected = sum(survivals[ask.ahead :])
            held = best[row]
            if held is not None and expected <= held.expected:
                self._rest(lives[row], name, step)
                continue
            if held is not None:
                self._rest(lives[row], held.proposal.source, step)
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
            offers.append(Offer(survivals, len(ask.tokens), ask.ahead, target or float("inf"), ask.pace))
        drafts: list[Proposal | None] = []
        probing = [source.proposer.name for source in self._costly if source.probing]
        for life, each, choice in zip(lives, best, self._budget.choose(offers, load), strict=True):
            if each is None:
                drafts.append(None)
                continue
            tokens, estimates, source, _ = each.proposal
            count = choice.tokens
            if source in probing and choice.cut is Cut.NOT_WORTH:
                count = len(tokens)
            if count:
                self._helped(life, source)
            elif choice.cut in (Cut.NOT_WORTH, Cut.OTHERS):
                self._rest(life, source, load.step)
            drafts.append(Proposal(tokens[:count], estimates[:count], source, choice.cut))
        return drafts

    def _rest(self, life: _Life, source: str, step: int) -> None:
        """A source did not help: it rests for twice as long as the last time, or as is usual at the first time."""
        usual = self._usual.get(source)
        if usual is None:  # a costly one rests for all rows together
            return
        last = life.rests.get(source)
        longest = max(self._longest, self._seldom)
        length = min(longest, int(usual) if last is None else max(0, 2 * last.length + 1))
        end = step + 1 + length
        if length >= LONG:
            end += -end % (1 << length.bit_length())
        life.rests[source] = Rest(end, length)
        self._usual[source] = usual + (length - usual) / USUAL_MEMORY

    def _helped(self, life: _Life, source: str) -> None:
        if source in self._usual:
            life.rests[source] = HELPED
            self._usual[source] -= self._usual[source] / USUAL_MEMORY


class Rest(NamedTuple):
    """A source is not asked before the step ``until``, after a rest of ``length`` steps."""

    until: int
    length: int


HELPED = Rest(0, -1)
"""After a useful proposal: the next one that does not help is followed by no rest, and only then rests grow."""


FORBIDDEN = Rest(sys.maxsize, 0)
"""The request may not be drafted for by the source."""


class _Life:
    """A request while it is drafted for."""

    __slots__ = ("open", "rests")

    def __init__(self) -> None:
        # By source: known tokens at its last proposal, and that.
        self.open: dict[str, tuple[int, Proposal]] = {}
        self.rests: dict[str, Rest] = {}

    def due(self, source: str, step: int) -> bool:
        """Whether a source is asked at this step."""
        rest = self.rests.get(source)
        return rest is None or rest.until <= step

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
