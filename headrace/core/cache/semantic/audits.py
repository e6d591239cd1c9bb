"""Watching a promise through audits: served answers that were computed all the same, and compared.

Everybody whom the promise is made to has a bound of his own, so that nobody's audits count for another. A bound is a
bet against the promise that may be looked at after every audit. Pure arithmetic: knows neither texts nor scores, nor
whom it watches.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache

_WORSE = (1.5, 2.0, 4.0, 8.0, 16.0)
"""So many times the promised rate are bet on: a slight breach and a gross one are both found."""


class AuditBound:
    """The bet that more than ``max_error`` of the served answers are wrong, from some audit on.

    Its ``wealth`` is one at first and is expected never to grow as long as each answer, whatever came before, is
    wrong with a probability of at most ``max_error``. So it ever reaches 1 / (1 - confidence), where ``violated``
    becomes true, with a probability of at most 1 - confidence (Ville's inequality; Howard et al., arXiv:1810.08240).
    Of the stake 1 / (t (t + 1)) is kept for a bet that begins with audit t: answers that were right long ago are no
    credit for answers that are wrong today, as they would be for one bet from the beginning.
    """

    __slots__ = ("_audited", "_bets", "_gains", "_limit", "wealth")

    def __init__(self, max_error: float, confidence: float) -> None:
        self._gains = _gains(max_error)
        self._limit = 1.0 / (1.0 - confidence)
        self._audited = 0
        self._bets = [0.0] * len(_WORSE)
        self.wealth = 1.0

    @property
    def violated(self) -> bool:
        """Whether the promise is refuted: for good."""
        return self.wealth >= self._limit

    def observe(self, wrong: bool) -> None:
        """One served answer was audited."""
        if self.violated:
            return
        self._audited += 1
        new = 1.0 / (self._audited * (self._audited + 1))
        self._bets = [(bet + new) * gain for bet, gain in zip(self._bets, self._gains[wrong], strict=True)]
        self.wealth = sum(self._bets) / len(self._bets) + 1.0 / (self._audited + 1)


class Audits:
    """A bound for each of those who are watched, ``most`` at a time.

    Beyond that the oldest bound goes that speaks for its owner, and if there is none, the one that says least against
    him: some credit is lost, but who was wrong is remembered, however many others there are. Of those to whom the
    promise is refuted the last ``most`` stay known.
    """

    def __init__(self, max_error: float, confidence: float, most: int) -> None:
        self._max_error = max_error
        self._confidence = confidence
        self._most = most
        self._standing: dict[Hashable, AuditBound] = {}
        self._refuted: dict[Hashable, None] = {}  # oldest first

    def refuted(self, whose: Hashable) -> bool:
        """Whether the promise is broken to ``whose``."""
        return whose in self._refuted

    def observe(self, whose: Hashable, wrong: bool) -> bool:
        """An answer of ``whose`` was audited; whether just this one has refuted the promise."""
        if whose in self._refuted:
            return False
        bound = self._standing.get(whose) or AuditBound(self._max_error, self._confidence)
        self._standing[whose] = bound
        bound.observe(wrong)
        if bound.violated:
            del self._standing[whose]
            self._refuted[whose] = None
            if len(self._refuted) > self._most:
                del self._refuted[next(iter(self._refuted))]
            return True
        if len(self._standing) > self._most:
            del self._standing[self._least_suspected()]
        return False

    def _least_suspected(self) -> Hashable:
        for whose, bound in self._standing.items():
            if bound.wealth < 1.0:
                return whose
        return min(self._standing, key=lambda whose: self._standing[whose].wealth)


@cache
def _gains(max_error: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """What each bet is multiplied by after a right answer, and after a wrong one."""
    certain = 1.0 - (1.0 - max_error) / 10.0  # a rate is below one, and above the promised one
    rates = [min(certain, max_error * times) for times in _WORSE]
    return (
        tuple((1.0 - rate) / (1.0 - max_error) for rate in rates),
        tuple(rate / max_error for rate in rates),
    )
