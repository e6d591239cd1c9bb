"""Drafts for a step: calls the proposers, keeps the best proposal of each row, and cuts it to the tokens that pay.

```
 rows ──► compare earlier proposals with the output ──► Acceptance
      ──► free proposers ──► costly ones, where they pay ──► best proposal of each row ──► DraftBudget ──► drafts
```
A proposer is free if its proposals cost next to nothing (a look-up in the text), and costly if they take time on the
device (a draft model). After a proposal that does not help, the proposer backs off from that row. The backoff doubles
each time, up to a length at which all such calls take `PROPOSER_SHARE` of the steps' time. So a proposer is called at
every step of a large model, and rarely at the steps of a small one with many rows. Long backoffs of all rows end at the
same steps, because the first call of a step costs the most, and because few steps should be longer than others.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from statistics import median
from typing import NamedTuple

from headrace.core.drafting.acceptance import Acceptance, compare
from headrace.core.drafting.costly_sources import CostlySource
from headrace.core.drafting.draft_budget import Candidate, Cut, DraftBudget
from headrace.core.drafting.proposal import CostlyProposer, DraftRow, Proposal, Proposer, StepLoad
from headrace.core.prediction.step_times import EDGES
from headrace.core.request import NO_SETTINGS, Request

# Whether drafting pays in reality: measured tokens per second with drafts and without, by number of rows.
#
#  drafts on       d d d d d d d d d d d d d d d d | . . . . . . | d d d d ...     d  step with drafts
#                          tokens / second           trial                        .  step without
#  drafts off      . . . . . . . . . . . . . . . . | d d d d d d | . . . . ...
# `DraftBudget` decides by predicted times, and its model of them can be wrong. So now and then the other mode is tried
# for a few steps, and their tokens per second are compared with those of the steps before. The faster mode is used from
# then on. A trial of the slower mode loses time, so the interval between two trials grows with that loss.

TRIAL_STEPS, WARMUP_STEPS = 12, 2
"""Steps of a trial that are counted, and uncounted steps before them, whose CPU caches are cold."""

MIN_STEPS, CLEARLY_SLOWER = 4, 2.0
"""Minimum number of steps to compare; a trial that is this many times slower after them ends early."""

MIN_INTERVAL, MAX_INTERVAL = 16, 2048
"""Minimum and maximum number of steps between two trials; up to `MAX_RATIO` times more if a trial loses a lot."""

SECOND_TRIAL = 128  # see docs/decisions/speculative-decoding.md#trials-of-realised-speed
"""Maximum number of steps between the first and the second trial, whose result replaces that of the first. Acceptance
rates were still being learned before the first trial, and its loss could delay the second by thousands of steps.
"""

MAX_LOSS = 0.01
"""Share of the time that trials of the slower mode may lose."""

MIN_GAIN = 1.03
"""Drafting is switched on when it is this much faster, and off when it is slower."""

MIN_WEIGHT = 0.4
"""Weight of a new comparison in the mean."""

MAX_RATIO = 3.0
"""A step's duration counts as at most this multiple of the median, because a longer step was interrupted. The interval
before a trial that loses a lot is at most this multiple of `MAX_INTERVAL`."""

WINDOW = 24
"""Number of steps before a trial that it is compared with."""

MAX_SKIP = 16
"""Maximum number of steps without drafts that are announced at once, because the number of rows may change."""


class SpeedTrials:
    """Decides by class of rows whether steps have drafts, from the speed of observed steps."""

    def __init__(self) -> None:
        self._classes: dict[int, _Class] = {}

    def steps_without_drafts(self, rows: int) -> int:
        """How many of the next steps of ``rows`` rows have no drafts; 0: the next one may have some."""
        return min(MAX_SKIP, self._of(rows).steps_without_drafts)

    def prefers_drafts(self, rows: int) -> bool:
        """Whether drafting is faster, as far as known."""
        return self._of(rows).drafts

    def observed(self, rows: int, drawn: int, seconds: float, drafted: bool) -> None:
        """Observe that a step of ``rows`` decode rows drew ``drawn`` tokens in ``seconds``, host work included."""
        if seconds > 0:
            self._of(rows).observed(rows, drawn, seconds, drafted)

    def _of(self, rows: int) -> _Class:
        at = bisect_left(EDGES, rows)
        found = self._classes.get(at)
        if found is None:
            found = self._classes[at] = _Class()
        return found


class _Class:
    """The state of one class of rows."""

    __slots__ = (
        "_in_trial",
        "_interval",
        "_is_first",
        "_ratio",
        "_since_trial",
        "_speeds",
        "_trial_left",
        "drafts",
    )

    def __init__(self) -> None:
        self.drafts = True  # the mode outside trials
        self._speeds = (_Speed(), _Speed())  # of steps without drafts, and with them
        self._in_trial = False
        self._is_first = True  # whether no trial has been compared
        self._trial_left = 0  # steps left of the trial
        self._since_trial = 0  # steps since the last trial
        self._interval = MIN_INTERVAL
        self._ratio: float | None = None  # logarithm of the speed with drafts over that without

    @property
    def steps_without_drafts(self) -> int:
        """The number of next steps without drafts."""
        if self._in_trial:
            return self._trial_left if self.drafts else 0
        return 0 if self.drafts else self._interval - self._since_trial

    def observed(self, rows: int, drawn: int, seconds: float, drafted: bool) -> None:
        if self._in_trial:
            self._trial_left -= 1
            if drafted != self.drafts and self._trial_left < TRIAL_STEPS:
                self._speeds[drafted].add(rows, drawn, seconds)
            if self._trial_left <= 0 or self._is_lost():
                self._compare()
            return
        if drafted != self.drafts:
            return  # nothing was proposed, or the step was planned before the mode changed
        self._since_trial += 1
        self._speeds[drafted].add(rows, drawn, seconds)
        if self._since_trial >= self._interval:
            self._in_trial, self._trial_left = True, TRIAL_STEPS + WARMUP_STEPS
            self._speeds[not drafted].clear()

    def _is_lost(self) -> bool:
        """Whether the first steps of the trial are clearly slower."""
        usual, tried = self._speeds[self.drafts], self._speeds[not self.drafts]
        return tried.steps >= MIN_STEPS and tried.speed * CLEARLY_SLOWER < usual.speed

    def _compare(self) -> None:
        """End the trial, choose the faster mode, and set the interval to the next trial."""
        self._in_trial, self._since_trial = False, 0
        without, drafted = self._speeds
        tried = without if self.drafts else drafted
        if tried.steps < MIN_STEPS:
            return  # too few steps had proposals
        found = math.log(drafted.speed / without.speed)
        known = self._ratio
        ratio = found if known is None else known + MIN_WEIGHT * (found - known)
        changed = ratio < 0 if self.drafts else ratio > math.log(MIN_GAIN)
        if changed:
            self.drafts = not self.drafts
        # What a step of the next trial loses, in steps of the present mode: one with drafts takes the time of several.
        loss = -math.expm1(-ratio) if self.drafts else drafted.tokens * math.expm1(-ratio)
        longer = min(MAX_INTERVAL, MIN_INTERVAL if changed else 2 * self._interval)
        self._interval = int(
            max(longer, min(MAX_RATIO * MAX_INTERVAL, (tried.steps + WARMUP_STEPS) * loss / MAX_LOSS))
        )
        if self._is_first:
            self._is_first, self._interval = False, min(SECOND_TRIAL, self._interval)
        else:
            self._ratio = ratio


class _Speed:
    """The last steps of a mode: tokens per row, and seconds."""

    __slots__ = ("_seconds", "_tokens")

    def __init__(self) -> None:
        self._tokens: deque[float] = deque(maxlen=WINDOW)
        self._seconds: deque[float] = deque(maxlen=WINDOW)

    def clear(self) -> None:
        """Forget all steps."""
        self._tokens.clear()
        self._seconds.clear()

    def add(self, rows: int, drawn: int, seconds: float) -> None:
        """Add a step."""
        self._tokens.append(drawn / rows)
        self._seconds.append(seconds)

    @property
    def steps(self) -> int:
        """The number of steps."""
        return len(self._seconds)

    @property
    def speed(self) -> float:
        """Tokens per row and second."""
        longest = MAX_RATIO * median(self._seconds)
        return sum(self._tokens) / sum([min(longest, each) for each in self._seconds])

    @property
    def tokens(self) -> float:
        """Tokens per row and step."""
        return sum(self._tokens) / self.steps


CALL_SECONDS, ROW_SECONDS = 80e-6, 12e-6
"""Host time of calling proposers at all, and of one free proposer for one row. Both are twice the time measured in a
loop, because code that runs once in dozens of steps finds cold caches.
"""

PROPOSER_SHARE = 0.005
"""Share of the steps' time that calls of proposers that do not help may take."""

MAX_BACKOFF = 511  # see docs/decisions/speculative-decoding.md#backoff-of-proposers
"""Maximum backoff in steps."""

ALIGNED_BACKOFF = 32
"""Backoffs of at least this many steps are lengthened so that they end together with others."""

NOTICEABLE_SHARE, NOTICEABLE_BACKOFF = 0.05, 255
"""If calls take a larger share of a step than the first number, backoffs may be as long as the second number of steps.
Then fewer than 1 % of the steps have such calls, and the 99th percentile of the time between tokens is not affected.
"""

TIMES_UNKNOWN = Proposal((), (), "", Cut.TIMES_UNKNOWN)
"""No drafts because step times are not known yet."""

SLOWER = Proposal((), (), "", Cut.SLOWER)
"""No drafts because steps with drafts were slower than steps without."""

BACKOFF_WINDOW = 16
"""Number of backoffs over which the first backoff of a new request is averaged."""


class ScoredProposal(NamedTuple):
    """A proposal with its ``survivals`` (probability that a token and all before it are accepted) and their sum."""

    proposal: Proposal
    survivals: tuple[float, ...]
    expected: float


class BudgetedDrafter:
    """A `core.drafting.proposal.Drafter` over several proposers.

    Args:
        proposers: free proposers; of equally good proposals, the one of the first proposer wins.
        acceptance: the estimates of the acceptance rate, which the drafter updates.
        budget: chooses how many tokens are verified.
        costly: costly proposers, each with the time of drafting one token for some rows, as a share of the target's
            time for a step of these rows.
    """

    idle = False
    """As `Drafter.idle`: a proposer may have a proposal for any request."""

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
        self._states: dict[str, _RequestState] = {}
        self._mean_backoff = {each.name: 0.0 for each in proposers}  # the mean backoff, by proposer
        self._max_backoff = 0  # the longest backoff at this step
        self._min_max_backoff = 0  # the longest backoff of free proposers, if that is longer
        self._trials = SpeedTrials()
        self._backoff_until = 0  # the first step that may have drafts

    def draft(self, draft_rows: Sequence[DraftRow], load: StepLoad) -> Sequence[Proposal | None]:
        """As `Drafter.draft`. An empty proposal says why no token of a proposal is verified."""
        step = load.step
        # 1. Is it known, or measured, that drafting pays at this number of rows?
        if load.times is None and self._budget.fixed is None:
            # Not even called: that would lengthen the steps that are measured.
            self.seconds = {}
            return [TIMES_UNKNOWN] * len(draft_rows)
        if self._budget.fixed is None and (backoff := self._trials.steps_without_drafts(load.rows)):
            self.seconds = {}
            self._backoff_until = step + backoff
            return [None if self._trials.prefers_drafts(load.rows) else SLOWER] * len(draft_rows)
        # 2. Ask the free proposers, for rows whose last proposals were good enough.
        states = [self._state(draft_row) for draft_row in draft_rows]
        self._max_backoff = self._compute_max_backoff(load)
        self.seconds = {}
        best: list[ScoredProposal | None] = [None] * len(draft_rows)
        for proposer in self._free:
            name = proposer.name
            due = [row for row in self._allowed(draft_rows, states, name) if states[row].due(name, step)]
            self._propose(proposer, due, draft_rows, states, best, step)
        # 3. Ask a draft model only where it can do better than what is proposed already.
        for source in self._costly:
            self._propose_costly(source, draft_rows, states, best, load)
        # 4. Verify as many tokens of each row as pay together in this step.
        return self._apply_budget(draft_rows, states, best, load)

    def next_draft_step(self, request: Request) -> int:
        """As `Drafter.next_draft_step`."""
        state = self._states.get(request.id)
        if state is None:
            return self._backoff_until
        backoffs = state.backoffs
        steps = [backoffs[each.name].until if each.name in backoffs else 0 for each in self.proposers]
        for at, source in enumerate(self._costly, len(self._free)):
            steps[at] = max(steps[at], source.backoff_until)
        return max(self._backoff_until, min(steps, default=0))

    def _propose_costly(
        self,
        source: CostlySource,
        draft_rows: Sequence[DraftRow],
        states: Sequence[_RequestState],
        best: list[ScoredProposal | None],
        load: StepLoad,
    ) -> None:
        """Call a costly proposer for the rows and the number of tokens that pay."""
        name = source.proposer.name
        allowed = self._allowed(draft_rows, states, name)
        if not allowed:
            return
        other = [each.expected if each else 0.0 for each in (best[row] for row in allowed)]
        chosen = source.choose(
            [draft_rows[row] for row in allowed], other, load, self._budget.fixed, self._max_backoff
        )
        cut, rows = list(draft_rows), []
        for row, max_tokens in zip(allowed, chosen, strict=True):
            if max_tokens:
                rows.append(row)
                cut[row] = draft_rows[row]._replace(max_tokens=min(draft_rows[row].max_tokens, max_tokens))
        if not rows:
            return
        before = source.proposer.seconds
        self._propose(source.proposer, rows, cut, states, best, load.step)
        seconds = source.proposer.seconds - before
        source.observe_cost([cut[row] for row in rows], seconds, load.times)
        self._charge([cut[row] for row in rows], seconds)
        for row in rows:
            if (latest := states[row].pending.get(name)) is not None:
                source.observe_confidences(latest[1].confidences)

    def _charge(self, draft_rows: Sequence[DraftRow], seconds: float) -> None:
        """Divide the time of a proposer among the requests that it drafted for, by the number of tokens requested."""
        each = seconds / sum(draft_row.max_tokens for draft_row in draft_rows)
        for draft_row in draft_rows:
            name = draft_row.request.id
            self.seconds[name] = self.seconds.get(name, 0.0) + each * draft_row.max_tokens

    @staticmethod
    def _allowed(draft_rows: Sequence[DraftRow], states: Sequence[_RequestState], method: str) -> list[int]:
        """The rows whose requests allow this method; its backoff never ends for the others."""
        allowed = []
        for row, draft_row in enumerate(draft_rows):
            if draft_row.request.settings is NO_SETTINGS or draft_row.request.settings.may_draft(method):
                allowed.append(row)
            else:
                states[row].backoffs[method] = FORBIDDEN
        return allowed

    def observed(self, rows: int, drawn: int, seconds: float, drafted: bool) -> None:
        """As `Drafter.observed`."""
        if drafted and rows == 1 and any(source.probing for source in self._costly):
            return  # the first tokens of a cold model do not show how fast drafting is
        self._trials.observed(rows, drawn, seconds, drafted)

    def verified(self, request_id: str, proposal: Proposal, accepted: int) -> None:
        """Does nothing: `draft` and `ended` compare every proposal, verified or not, with the output."""

    def ended(self, request: Request, tokens: list[int]) -> None:
        """Learn from the last proposals of a request, and drop its state."""
        state = self._states.pop(request.id, None)
        if state is not None:
            state.learn(request, tokens, self._acceptance)
        self._acceptance.ended(request.id)
        for proposer in self.proposers:
            proposer.ended(request, tokens)

    def _state(self, draft_row: DraftRow) -> _RequestState:
        state = self._states.get(draft_row.request.id)
        if state is None:
            state = self._states[draft_row.request.id] = _RequestState()
        elif state.pending:
            state.learn(draft_row.request, draft_row.tokens, self._acceptance)
        return state

    def _compute_max_backoff(self, load: StepLoad) -> int:
        """The backoff at which calls for all rows take `PROPOSER_SHARE` of the time."""
        if self._budget.fixed is not None:
            return 0
        assert load.times is not None
        step = load.times.verify_times(load.rows, load.contexts, 1)[0]
        calling = CALL_SECONDS + ROW_SECONDS * load.rows * len(self._free)
        self._min_max_backoff = NOTICEABLE_BACKOFF if calling > NOTICEABLE_SHARE * step else 0
        return (
            MAX_BACKOFF
            if calling > MAX_BACKOFF * PROPOSER_SHARE * step
            else int(calling / (PROPOSER_SHARE * step))
        )

    def _propose(
        self,
        proposer: Proposer,
        rows: Sequence[int],
        draft_rows: Sequence[DraftRow],
        states: Sequence[_RequestState],
        best: list[ScoredProposal | None],
        step: int,
    ) -> None:
        """Call ``proposer`` for ``rows``; a proposal with more expected tokens than the best one replaces it."""
        if not rows:
            return
        name = proposer.name
        for row, proposal in zip(rows, proposer.propose([draft_rows[row] for row in rows]), strict=True):
            if proposal is None or not proposal.tokens:
                self._back_off(states[row], name, step)
                continue
            draft_row, request = draft_rows[row], draft_rows[row].request
            estimates = self._acceptance.estimate(name, request.tenant, request.id, proposal.confidences)
            survivals = tuple(accumulate(estimates, mul))
            states[row].pending[name] = (len(draft_row.tokens), proposal)
            expected = sum(survivals[draft_row.in_flight :])
            other = best[row]
            if other is not None and expected <= other.expected:
                self._back_off(states[row], name, step)
                continue
            if other is not None:
                self._back_off(states[row], other.proposal.source, step)
            best[row] = ScoredProposal(Proposal(proposal.tokens, estimates, name), survivals, expected)

    def _apply_budget(
        self,
        draft_rows: Sequence[DraftRow],
        states: Sequence[_RequestState],
        best: Sequence[ScoredProposal | None],
        load: StepLoad,
    ) -> list[Proposal | None]:
        if not any(best):
            return [None] * len(draft_rows)
        candidates = []
        for draft_row, each in zip(draft_rows, best, strict=True):
            target = draft_row.request.slo.tpot_seconds
            survivals = () if each is None else each.survivals
            candidates.append(
                Candidate(
                    survivals,
                    len(draft_row.tokens),
                    draft_row.in_flight,
                    target or float("inf"),
                    draft_row.tokens_per_step,
                )
            )
        drafts: list[Proposal | None] = []
        probing = [source.proposer.name for source in self._costly if source.probing]
        for state, each, choice in zip(states, best, self._budget.choose(candidates, load), strict=True):
            if each is None:
                drafts.append(None)
                continue
            tokens, estimates, source, _ = each.proposal
            count = choice.tokens
            if source in probing and choice.cut is Cut.NOT_WORTH:
                count = len(tokens)
            if count:
                self._reset_backoff(state, source)
            elif choice.cut in (Cut.NOT_WORTH, Cut.OTHERS):
                self._back_off(state, source, load.step)
            drafts.append(Proposal(tokens[:count], estimates[:count], source, choice.cut))
        return drafts

    def _back_off(self, state: _RequestState, source: str, step: int) -> None:
        """Back off after a proposal that did not help: twice as long as last time; the first time, by the mean."""
        mean = self._mean_backoff.get(source)
        if mean is None:  # a costly source backs off for all rows together
            return
        last = state.backoffs.get(source)
        longest = max(self._max_backoff, self._min_max_backoff)
        length = min(longest, int(mean) if last is None else max(0, 2 * last.length + 1))
        end = step + 1 + length
        if length >= ALIGNED_BACKOFF:
            end += -end % (1 << length.bit_length())
        state.backoffs[source] = Backoff(end, length)
        self._mean_backoff[source] = mean + (length - mean) / BACKOFF_WINDOW

    def _reset_backoff(self, state: _RequestState, source: str) -> None:
        if source in self._mean_backoff:
            state.backoffs[source] = NO_BACKOFF
            self._mean_backoff[source] -= self._mean_backoff[source] / BACKOFF_WINDOW


class Backoff(NamedTuple):
    """A source is not called before the step ``until``; the backoff has ``length`` steps."""

    until: int
    length: int


NO_BACKOFF = Backoff(0, -1)
"""After a useful proposal. The backoff after the next useless one has 0 steps, and only then backoffs grow."""


FORBIDDEN = Backoff(sys.maxsize, 0)
"""The request does not allow this source."""


class _RequestState:
    """The drafter's state of one request."""

    __slots__ = ("backoffs", "pending")

    def __init__(self) -> None:
        # By source: the last proposal, and the number of tokens known when it was made.
        self.pending: dict[str, tuple[int, Proposal]] = {}
        self.backoffs: dict[str, Backoff] = {}

    def due(self, source: str, step: int) -> bool:
        """Whether a source is called at this step."""
        backoff = self.backoffs.get(source)
        return backoff is None or backoff.until <= step

    def learn(self, request: Request, tokens: list[int], acceptance: Acceptance) -> None:
        """Compare the last proposal of each source with the output at its positions."""
        count = len(tokens)
        for source, (start, proposal) in tuple(self.pending.items()):
            if count <= start:
                continue
            del self.pending[source]
            drafted = proposal.tokens
            trials = compare(drafted, tokens[start : start + len(drafted)])
            acceptance.learn(source, request.tenant, request.id, proposal.confidences, trials)
