"""How many drafted tokens each row verifies: those that make the batch's expected tokens per second largest.

```
 survival   row A  0.90  0.81  0.73  0.66      chance that a drafted token and all before it are right
            row B  0.55  0.30  0.17
            row C  -
 in order   A1 A2 A3 A4 B1 B2 B3               by survival for the marginal cost
 seconds    10 10 10 14 14 14 14               of the step with all tokens up to here
 taken      A1 A2 A3 |                         as many as make (rows + survivals) / seconds largest
```
A token adds its survival to the expected output of the step. The seconds are a staircase (`StepTimes.stairs`): a step
with room is filled, and a new stair is not begun for a doubtful token. Under load every token costs time, and nothing
is drafted.
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
"""A token must be worth this multiple of its time: estimates err, and an error should not make a step slower."""

FLOOR = 0.02
"""The least survival that is verified, however little time it seems to take."""

EVEN = 0.1
"""Relative difference of the rows' costs of a token that is ignored."""

SLOWED = 1.1
"""Requests may get their tokens this much slower than without drafts, because others are drafted for."""

SLOWED_SHARE = 0.25
"""Share of the rows that may be slowed down by more: a draft ends for each row at some step."""

TPOT_SHARE = 0.8
"""Share of a TPOT target that a step may take, as at admission."""


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


class Offer(NamedTuple):
    """What a row could verify: ``survivals`` of its drafted tokens, and the known tokens before the first of them.

    ``ahead`` counts the leading tokens that are in flight: they cost and gain nothing, but the rest needs them right.
    ``tpot_seconds`` is the latency target of the row's request (infinite: none); it counts without a draft, too.
    ``pace`` is the number of tokens per step that its request has drawn so far.
    """

    survivals: tuple[float, ...]
    context: int
    ahead: int = 0
    tpot_seconds: float = math.inf
    pace: float = 1.0


class Choice(NamedTuple):
    """The number of tokens of an offer to use, those in flight included, and what bounded it."""

    tokens: int
    cut: Cut


NONE = Choice(0, Cut.NOTHING_PROPOSED)


class DraftBudget:
    """Chooses the drafted tokens of a step.

    Args:
        fixed: tokens a row as long as the step has room; None: as many as pay.
        margin: what a token must be worth, as a multiple of its time.
    """

    def __init__(self, fixed: int | None = None, margin: float = MARGIN) -> None:
        self.fixed = fixed
        self._margin = margin

    def choose(self, offers: Sequence[Offer], load: StepLoad) -> list[Choice]:
        """One choice for each offer."""
        if self.fixed is not None:
            return _fixed(offers, load.budget, self.fixed)
        if not any(offer.survivals for offer in offers):
            return [NONE] * len(offers)
        if load.times is None:
            return [Choice(0, Cut.TIMES_UNKNOWN) if offer.survivals else NONE for offer in offers]
        return _Choosing(offers, load, load.times, self._margin).choices()


def _fixed(offers: Sequence[Offer], budget: int, most: int) -> list[Choice]:
    """Up to ``most`` tokens a row; if the step has too little room, the rows share it equally."""
    wanted = [max(0, min(most, len(offer.survivals) - offer.ahead)) for offer in offers]
    share = most
    while share and sum(min(share, each) for each in wanted) > budget:
        share -= 1
    choices = []
    for offer, each in zip(offers, wanted, strict=True):
        tokens = min(share, each)
        used = offer.ahead + tokens if tokens else 0
        if not offer.survivals:
            choices.append(NONE)
        elif used == len(offer.survivals):
            choices.append(Choice(used, Cut.WHOLE))
        else:
            choices.append(Choice(used, Cut.FIXED if tokens == most else Cut.BUDGET))
    return choices


class _Choosing:
    """The choice of one step while it is made."""

    def __init__(self, offers: Sequence[Offer], load: StepLoad, times: StepTimes, margin: float) -> None:
        self._offers = offers
        self._load = load
        self._margin = margin
        _, _, self._token, self._context = times.coefficients
        most = sum([len(offer.survivals) for offer in offers])
        self._stairs = times.stairs(load.rows, load.contexts, most)
        self._reach = times.reach(load.rows)
        self._scales = self._relative_worth()
        self._bound = Cut.TPOT  # what bounds the tokens that are taken, if anything
        self._ratios: list[float] = []  # tokens per second by the number of drafted tokens
        self._keys: list[float] = []  # of the tokens in their order: the survival times the scale of the row

    def choices(self) -> list[Choice]:
        """The tokens that make the output per second largest, within the budget and the TPOT targets."""
        wanted = 0 if self._is_hopeless() else self._best()
        count = min(wanted, self._load.budget, self._reach)
        kept = self._within_targets(count)
        if kept < count and self._ratios[kept] <= self._ratios[0]:
            kept = 0  # more tokens pay, but so few do not
        taken = self._taken(kept)
        before = self._taken(count) if kept < count else taken
        chosen = []
        for offer, tokens, more in zip(self._offers, taken, before, strict=True):
            used = offer.ahead + tokens if tokens else 0
            cut = Cut.NOT_WORTH if offer.survivals else Cut.NOTHING_PROPOSED
            if used and used == len(offer.survivals):
                cut = Cut.WHOLE
            elif tokens < more:
                cut = self._bound
            elif kept == count < wanted and offer.survivals:
                cut = Cut.BUDGET
            chosen.append(Choice(used, cut))
        return chosen

    def _is_hopeless(self) -> bool:
        """Whether one token costs more than all are worth."""
        rows, stairs = self._load.rows, self._stairs
        every = sum([sum(offer.survivals[offer.ahead :]) for offer in self._offers])
        return (rows + every / self._margin) * stairs[0] <= rows * stairs[1]

    def _relative_worth(self) -> list[float]:
        """By row: what a token is worth relative to one of mean context, at equal survival.

        1 for all rows where their contexts make little difference.
        """
        load = self._load
        usual = load.contexts / load.rows
        contexts = [usual, *(offer.context for offer in self._offers if offer.survivals)]
        mean = self._token + self._context * usual
        if self._context * (max(contexts) - min(contexts)) <= EVEN * mean:
            return [1.0] * len(self._offers)
        return [mean / (self._token + self._context * offer.context) for offer in self._offers]

    def _best(self) -> int:
        """How many tokens make the tokens per second largest, the most worthy ones first."""
        survivals, seconds = self._ordered()
        gains = accumulate(survivals, initial=self._load.rows * self._margin)
        self._ratios = list(map(truediv, gains, seconds) if seconds[0] > 0 else gains)
        return self._ratios.index(max(self._ratios))

    def _ordered(self) -> tuple[list[float], Sequence[float]]:
        """The survivals of all tokens, the most worthy first, and the seconds of a step with so many of them."""
        offers, scales = self._offers, self._scales
        survivals: list[float] = []
        if min(scales) == max(scales):
            for offer in offers:
                survivals += offer.survivals[offer.ahead :]
            survivals.sort(reverse=True)
            while survivals and survivals[-1] < FLOOR:
                survivals.pop()
            self._keys = survivals
            return survivals, self._stairs
        slots = [
            (survival * scale, survival, offer.context)
            for offer, scale in zip(offers, scales, strict=True)
            for survival in offer.survivals[offer.ahead :]
            if survival >= FLOOR
        ]
        slots.sort(key=itemgetter(0), reverse=True)
        self._keys = [key for key, _, _ in slots]
        mean = self._load.contexts / self._load.rows
        excess = accumulate([self._context * (context - mean) for _, _, context in slots], initial=0.0)
        seconds = accumulate(map(add, self._stairs, excess), max)
        return [survival for _, survival, _ in slots], list(seconds)

    def _taken(self, count: int) -> list[int]:
        """By row: how many tokens it has of the first ``count``."""
        if not count:
            return [0] * len(self._offers)
        least = self._keys[count - 1]
        taken, ties = [], count
        for offer, scale in zip(self._offers, self._scales, strict=True):
            tokens = 0
            for survival in offer.survivals[offer.ahead :]:
                if survival < FLOOR or survival * scale <= least:
                    break
                tokens += 1
            taken.append(tokens)
            ties -= tokens
        for row, (offer, scale) in enumerate(zip(self._offers, self._scales, strict=True)):
            if not ties:
                break
            for survival in offer.survivals[offer.ahead + taken[row] :]:
                if not ties or survival < FLOOR or survival * scale < least:
                    break
                taken[row] += 1
                ties -= 1
        return taken

    def _within_targets(self, count: int) -> int:
        """As many of ``count`` tokens as no TPOT target is missed by, and few requests are slowed down by.

        A target that is missed without drafts bounds nothing.
        """
        base = self._stairs[0]
        bounds = {
            row: TPOT_SHARE * offer.tpot_seconds
            for row, offer in enumerate(self._offers)
            if base <= TPOT_SHARE * offer.tpot_seconds < math.inf
        }
        if self._meets(bounds, count):
            return count
        if self._meets(bounds, count, slowed=math.inf):
            self._bound = Cut.OTHERS
        low, high = 0, count  # it is met with ``low`` tokens and missed with ``high``
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._meets(bounds, middle) else (low, middle)
        return low

    def _meets(self, bounds: Mapping[int, float], count: int, slowed: float = SLOWED) -> bool:
        """Whether a step with ``count`` tokens meets the targets, and few rows are slowed down by more than ``slowed``.

        A row with more tokens at a step may wait longer for it, and so may one that drafts have helped before.
        """
        taken, seconds = self._taken(count), self._stairs[count]
        paces = list(self._load.paces)
        for row, offer in enumerate(self._offers):
            gained = 1 + sum(offer.survivals[offer.ahead : offer.ahead + taken[row]])
            if row in bounds and seconds > bounds[row] * gained:
                return False
            paces.append(max(gained, offer.pace))
        paces.sort()
        return seconds <= slowed * self._stairs[0] * paces[int(SLOWED_SHARE * len(paces))]
