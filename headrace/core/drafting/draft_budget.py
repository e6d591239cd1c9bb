"""How many drafted tokens each row verifies: those that make the batch's expected tokens per second largest.

```
 survival   row A  0.90  0.81  0.73  0.66      chance that a drafted token and all before it are right
            row B  0.55  0.30  0.17
            row C  -
 in order   A1 A2 A3 A4 B1 B2 B3               by survival for the marginal cost
 seconds    10 10 10 14 14 14 14               of the step with all tokens up to here
 taken      A1 A2 A3 |                         as many as make (rows + survivals) / seconds largest
```
A token adds its survival to the expected output of the step. The seconds are a staircase (`StepTimes.drafted`): a step
with room is filled, and a new stair is not begun for a doubtful token. Under load every token costs time, and nothing
is drafted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from operator import itemgetter
from typing import NamedTuple

from headrace.core.drafting.proposal import StepLoad
from headrace.core.prediction.step_times import StepTimes

MARGIN = 1.05
"""A token must be worth this multiple of its time: estimates err, and an error should not make a step slower."""

FLOOR = 0.02
"""The least survival that is verified, however little time it seems to take."""

TPOT_SHARE = 0.8
"""Share of a TPOT target that a step may take, as at admission."""


class Cut(StrEnum):
    """Why a row verifies no more of its proposal."""

    WHOLE = "whole"
    FIXED = "fixed"
    NOT_WORTH = "not_worth"
    BUDGET = "budget"
    TPOT = "tpot"
    TIMES_UNKNOWN = "times_unknown"
    NOTHING_PROPOSED = "nothing_proposed"


class Offer(NamedTuple):
    """What a row could verify: ``survivals`` of its drafted tokens, and the known tokens before the first of them.

    ``ahead`` counts the leading tokens that are in flight: they cost and gain nothing, but the rest needs them right.
    ``tpot_seconds`` is the latency target of the row's request (infinite: none); it counts without a draft, too.
    """

    survivals: tuple[float, ...]
    context: int
    ahead: int = 0
    tpot_seconds: float = math.inf


class Choice(NamedTuple):
    """The number of tokens of an offer to use, those in flight included, and what bounded it."""

    tokens: int
    cut: Cut


NONE = Choice(0, Cut.NOTHING_PROPOSED)


class DraftBudget:
    """Chooses the drafted tokens of a step; with ``fixed``, that many a row as long as the step has room."""

    def __init__(self, fixed: int | None = None) -> None:
        self.fixed = fixed

    def choose(self, offers: Sequence[Offer], load: StepLoad) -> list[Choice]:
        """One choice for each offer."""
        if self.fixed is not None:
            return _fixed(offers, load.budget, self.fixed)
        if not any(offer.survivals for offer in offers):
            return [NONE] * len(offers)
        if load.times is None:
            return [Choice(0, Cut.TIMES_UNKNOWN) if offer.survivals else NONE for offer in offers]
        choosing = _Choosing(offers, load, load.times)
        choosing.take_best()
        return choosing.choices()


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

    def __init__(self, offers: Sequence[Offer], load: StepLoad, times: StepTimes) -> None:
        self._offers = offers
        self._load = load
        self._times = times
        self._seconds = times.decodes(load.rows, load.contexts)
        self._contexts = load.contexts
        self._gain = float(load.rows)
        self._order: list[int] = []  # the rows of the tokens taken
        self._taken = [0] * len(offers)
        self._cuts = [Cut.NOT_WORTH if offer.survivals else Cut.NOTHING_PROPOSED for offer in offers]
        # A target that the step misses even without drafts bounds nothing.
        targets = [TPOT_SHARE * offer.tpot_seconds for offer in offers]
        self._limits = [target if target >= self._seconds else math.inf for target in targets]
        self._limit = min(self._limits)

    def take_best(self) -> None:
        """Take tokens in the order of their worth, and keep as many as make the tokens per second largest."""
        if self._is_hopeless():
            return
        slots = self._ordered()
        left = sum(survival for _, _, _, survival in slots) / MARGIN
        best, count = self._gain / self._seconds if self._seconds > 0 else math.inf, 0
        for _, row, position, survival in slots:
            if self._seconds > 0 and (self._gain + left) / self._seconds <= best:
                break  # even if the rest took no time
            left -= survival / MARGIN
            if position == self._offers[row].ahead + self._taken[row]:  # else an earlier one did not fit
                self._take(row, position, survival)
                ratio = self._gain / self._seconds if self._seconds > 0 else math.inf
                if ratio > best or ratio == math.inf:
                    best, count = ratio, len(self._order)
        for row in self._order[count:]:
            self._taken[row] -= 1

    def choices(self) -> list[Choice]:
        """What has been taken."""
        chosen = []
        for offer, taken, cut in zip(self._offers, self._taken, self._cuts, strict=True):
            used = offer.ahead + taken if taken else 0
            chosen.append(Choice(used, Cut.WHOLE if used and used == len(offer.survivals) else cut))
        return chosen

    def _is_hopeless(self) -> bool:
        """Whether one token costs more than all are worth."""
        load = self._load
        one = self._times.drafted(load.rows, load.tokens + 1, load.contexts)
        every = sum([sum(offer.survivals[offer.ahead :]) for offer in self._offers])
        return (load.rows + every / MARGIN) * self._seconds <= load.rows * one

    def _ordered(self) -> list[tuple[float, int, int, float]]:
        """Tokens by survival for their linear cost, the best first; those of one row in their order."""
        _, _, token, context = self._times.coefficients
        slots = []
        for row, offer in enumerate(self._offers):
            for position in range(offer.ahead, len(offer.survivals)):
                survival = offer.survivals[position]
                if survival < FLOOR:
                    break
                cost = token + context * (offer.context + position)
                slots.append((survival / cost if cost > 0 else survival, row, position, survival))
        slots.sort(key=itemgetter(0), reverse=True)  # stable: equal ones of a row keep their order
        return slots

    def _take(self, row: int, position: int, survival: float) -> None:
        offer, load = self._offers[row], self._load
        if len(self._order) >= load.budget:
            self._cuts[row] = Cut.BUDGET
            return
        contexts = self._contexts + offer.context + position
        tokens = load.tokens + len(self._order) + 1
        seconds = max(self._seconds, self._times.drafted(load.rows, tokens, contexts))
        if seconds > self._limit and not self._allows(row, survival, seconds):
            self._cuts[row] = Cut.TPOT
            return
        self._contexts = contexts
        self._seconds = seconds
        self._gain += survival / MARGIN
        self._order.append(row)
        self._taken[row] += 1
        if self._limits[row] < math.inf:  # with more tokens at a step, its steps may take longer
            self._limits[row] += TPOT_SHARE * offer.tpot_seconds * survival
            self._limit = min(self._limits)

    def _allows(self, row: int, survival: float, seconds: float) -> bool:
        """Whether a step of ``seconds`` meets all targets if the row takes one more token."""
        own = self._limits[row] + TPOT_SHARE * self._offers[row].tpot_seconds * survival
        others = (limit for other, limit in enumerate(self._limits) if other != row)
        return seconds <= min(own, min(others, default=math.inf))
