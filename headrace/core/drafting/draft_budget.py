"""How many drafted tokens of each row to verify: as many as make the expected tokens per second of the batch largest.

```
 survival   row A  0.90  0.81  0.73  0.66      probability that a drafted token and all before it are accepted
            row B  0.55  0.30  0.17
            row C  -
 in order   A1 A2 A3 A4 B1 B2 B3               by survival for the marginal cost
 seconds    10 10 10 14 14 14 14               of the step with all tokens up to here
 taken      A1 A2 A3 |                         as many as make (rows + survivals) / seconds largest
```
A token adds its survival to the expected output of the step. The seconds rise in stairs (`StepTimes.verify_times`), so
a stair is filled with tokens, and a new one is not begun for an unlikely token. Under load every token costs time, and
nothing is drafted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import accumulate
from operator import add, itemgetter, truediv
from typing import NamedTuple

from headrace.core.drafting.proposal import StepLoad
from headrace.core.prediction.step_times import StepTimes

MARGIN = 1.05
"""The gain of a token must exceed its cost by this factor, so that an estimation error does not slow the step down."""

MIN_SURVIVAL = 0.02
"""Minimum survival of a verified token, even if verifying it seems to cost nothing."""

EQUAL_COST = 0.1
"""If the cost of a token differs by less than this share between rows, the difference is ignored."""

MAX_SLOWDOWN = 1.1  # see docs/decisions/speculative-decoding.md#slowing-others
"""How much the time between tokens of a request may grow because other rows are drafted for."""

SLOWED_SHARE = 0.25
"""Share of the rows that may be slowed down by more; a row is one of them only at some steps."""

TPOT_SHARE = 0.8
"""Share of a TPOT target that a step may take, the same as at admission."""


class Cut(StrEnum):
    """Why a row verifies no more of its proposal."""

    WHOLE = "whole"
    FIXED = "fixed"
    NOT_WORTH = "not_worth"
    BUDGET = "budget"
    OTHERS = "others"
    TPOT = "tpot"
    SLOWER = "slower"
    TIMES_UNKNOWN = "times_unknown"
    NOTHING_PROPOSED = "nothing_proposed"


class Candidate(NamedTuple):
    """A row with a proposal: the ``survivals`` of its tokens, and the known tokens before them (``context``).

    The first ``in_flight`` tokens have been drawn already. They cost and gain nothing, but the rest is only accepted if
    they match. ``tpot_seconds`` is the latency target of the row's request (infinite: none); it counts without a draft,
    too. ``tokens_per_step`` is the mean number of tokens per step that the request has drawn so far.
    """

    survivals: tuple[float, ...]
    context: int
    in_flight: int = 0
    tpot_seconds: float = math.inf
    tokens_per_step: float = 1.0


class DraftChoice(NamedTuple):
    """The number of tokens of a candidate to verify, those in flight included, and what bounded it."""

    tokens: int
    cut: Cut


NO_CHOICE = DraftChoice(0, Cut.NOTHING_PROPOSED)


class DraftBudget:
    """Chooses the drafted tokens of a step.

    Args:
        fixed: drafted tokens per row, as long as the step's budget allows them; None: as many as pay.
        margin: the factor by which a token's gain must exceed its cost.
    """

    def __init__(self, fixed: int | None = None, margin: float = MARGIN) -> None:
        self.fixed = fixed
        self._margin = margin

    def choose(self, candidates: Sequence[Candidate], load: StepLoad) -> list[DraftChoice]:
        """One choice for each candidate."""
        if self.fixed is not None:
            return _fixed(candidates, load.budget, self.fixed)
        if not any(candidate.survivals for candidate in candidates):
            return [NO_CHOICE] * len(candidates)
        if load.times is None:
            return [
                DraftChoice(0, Cut.TIMES_UNKNOWN) if candidate.survivals else NO_CHOICE
                for candidate in candidates
            ]
        return _StepChoice(candidates, load, load.times, self._margin).choices()


def _fixed(candidates: Sequence[Candidate], budget: int, max_tokens: int) -> list[DraftChoice]:
    """Up to ``max_tokens`` tokens per row; if that exceeds the step's budget, the rows share it equally."""
    wanted = [
        max(0, min(max_tokens, len(candidate.survivals) - candidate.in_flight)) for candidate in candidates
    ]
    share = max_tokens
    while share and sum(min(share, each) for each in wanted) > budget:
        share -= 1
    choices = []
    for candidate, each in zip(candidates, wanted, strict=True):
        tokens = min(share, each)
        used = candidate.in_flight + tokens if tokens else 0
        if not candidate.survivals:
            choices.append(NO_CHOICE)
        elif used == len(candidate.survivals):
            choices.append(DraftChoice(used, Cut.WHOLE))
        else:
            choices.append(DraftChoice(used, Cut.FIXED if tokens == max_tokens else Cut.BUDGET))
    return choices


class _StepChoice:
    """Computes the choices of one step."""

    def __init__(
        self, candidates: Sequence[Candidate], load: StepLoad, times: StepTimes, margin: float
    ) -> None:
        self._offers = candidates
        self._load = load
        self._margin = margin
        _, _, self._token, self._context = times.coefficients
        max_tokens = sum([len(candidate.survivals) for candidate in candidates])
        self._seconds = times.verify_times(load.rows, load.contexts, max_tokens)
        self._reach = times.max_drafted(load.rows)
        self._scales = self._relative_worth()
        self._bound = Cut.TPOT  # what bounds the number of tokens, if anything does
        self._ratios: list[float] = []  # tokens per second by the number of drafted tokens
        self._keys: list[float] = []  # by rank of the tokens: the survival times the scale of the row

    def choices(self) -> list[DraftChoice]:
        """The tokens that make the output per second largest, within the budget and the TPOT targets."""
        wanted = 0 if self._none_pays() else self._best()
        count = min(wanted, self._load.budget, self._reach)
        kept = self._within_targets(count)
        if kept < count and self._ratios[kept] <= self._ratios[0]:
            kept = 0  # more tokens would pay, but so few do not
        taken = self._by_row(kept)
        before = self._by_row(count) if kept < count else taken
        chosen = []
        for candidate, tokens, more in zip(self._offers, taken, before, strict=True):
            used = candidate.in_flight + tokens if tokens else 0
            cut = Cut.NOT_WORTH if candidate.survivals else Cut.NOTHING_PROPOSED
            if used and used == len(candidate.survivals):
                cut = Cut.WHOLE
            elif tokens < more:
                cut = self._bound
            elif kept == count < wanted and candidate.survivals:
                cut = Cut.BUDGET
            chosen.append(DraftChoice(used, cut))
        return chosen

    def _none_pays(self) -> bool:
        """Whether one token, of the row where it costs least, costs more than all tokens together gain."""
        rows, seconds = self._load.rows, self._seconds
        every = sum([sum(candidate.survivals[candidate.in_flight :]) for candidate in self._offers])
        least = seconds[0] + (seconds[1] - seconds[0]) / max(self._scales)
        return (rows + every / self._margin) * seconds[0] <= rows * least

    def _relative_worth(self) -> list[float]:
        """By row: the value of a token relative to one of mean context, at equal survival.

        1 for all rows if their contexts make little difference.
        """
        load = self._load
        usual = load.contexts / load.rows
        contexts = [usual, *(candidate.context for candidate in self._offers if candidate.survivals)]
        mean = self._token + self._context * usual
        if self._context * (max(contexts) - min(contexts)) <= EQUAL_COST * mean:
            return [1.0] * len(self._offers)
        return [mean / (self._token + self._context * candidate.context) for candidate in self._offers]

    def _best(self) -> int:
        """The number of tokens, taken in order of value, that makes the tokens per second largest."""
        survivals, seconds = self._ordered()
        gains = accumulate(survivals, initial=self._load.rows * self._margin)
        self._ratios = list(map(truediv, gains, seconds) if seconds[0] > 0 else gains)
        return self._ratios.index(max(self._ratios))

    def _ordered(self) -> tuple[list[float], Sequence[float]]:
        """The survivals of all tokens in order of value, and the seconds of a step by the number of tokens."""
        candidates, scales = self._offers, self._scales
        survivals: list[float] = []
        if min(scales) == max(scales):
            for candidate in candidates:
                survivals += candidate.survivals[candidate.in_flight :]
            survivals.sort(reverse=True)
            while survivals and survivals[-1] < MIN_SURVIVAL:
                survivals.pop()
            self._keys = survivals
            return survivals, self._seconds
        slots = [
            (survival * scale, survival, candidate.context)
            for candidate, scale in zip(candidates, scales, strict=True)
            for survival in candidate.survivals[candidate.in_flight :]
            if survival >= MIN_SURVIVAL
        ]
        slots.sort(key=itemgetter(0), reverse=True)
        self._keys = [key for key, _, _ in slots]
        mean = self._load.contexts / self._load.rows
        excess = accumulate([self._context * (context - mean) for _, _, context in slots], initial=0.0)
        seconds = accumulate(map(add, self._seconds, excess), max)
        return [survival for _, survival, _ in slots], list(seconds)

    def _by_row(self, count: int) -> list[int]:
        """How many of the first ``count`` tokens in order of value belong to each row."""
        if not count:
            return [0] * len(self._offers)
        least = self._keys[count - 1]
        taken, ties = [], count
        for candidate, scale in zip(self._offers, self._scales, strict=True):
            tokens = 0
            for survival in candidate.survivals[candidate.in_flight :]:
                if survival < MIN_SURVIVAL or survival * scale <= least:
                    break
                tokens += 1
            taken.append(tokens)
            ties -= tokens
        for row, (candidate, scale) in enumerate(zip(self._offers, self._scales, strict=True)):
            if not ties:
                break
            for survival in candidate.survivals[candidate.in_flight + taken[row] :]:
                if not ties or survival < MIN_SURVIVAL or survival * scale < least:
                    break
                taken[row] += 1
                ties -= 1
        return taken

    def _within_targets(self, count: int) -> int:
        """The most of ``count`` tokens with which all TPOT targets are met and few requests are slowed down.

        A target that is missed even without drafts is ignored.
        """
        base = self._seconds[0]
        bounds = {
            row: TPOT_SHARE * candidate.tpot_seconds
            for row, candidate in enumerate(self._offers)
            if base <= TPOT_SHARE * candidate.tpot_seconds < math.inf
        }
        if self._meets(bounds, count):
            return count
        if self._meets(bounds, count, max_slowdown=math.inf):
            self._bound = Cut.OTHERS
        low, high = 0, count  # targets are met with ``low`` tokens and missed with ``high``
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._meets(bounds, middle) else (low, middle)
        return low

    def _meets(self, bounds: Mapping[int, float], count: int, max_slowdown: float = MAX_SLOWDOWN) -> bool:
        """Whether a step with ``count`` tokens meets the targets and slows few rows down by more than ``max_slowdown``.

        A row that gets more tokens from a step may wait longer for it, and so may a row that drafts have helped before.
        """
        taken, seconds = self._by_row(count), self._seconds[count]
        tokens_per_step = list(self._load.other_tokens_per_step)
        for row, candidate in enumerate(self._offers):
            gained = 1 + sum(candidate.survivals[candidate.in_flight : candidate.in_flight + taken[row]])
            if row in bounds and seconds > bounds[row] * gained:
                return False
            tokens_per_step.append(max(gained, candidate.tokens_per_step))
        tokens_per_step.sort()
        return (
            seconds
            <= max_slowdown * self._seconds[0] * tokens_per_step[int(SLOWED_SHARE * len(tokens_per_step))]
        )
