"""Audits: sequential tests of an error bound on served responses that were also computed and compared.

Each tenant or partition has its own test, so audits of one do not count for another. A test is a bet against the
error bound and may be evaluated after every audit. Pure arithmetic: it knows no texts or scores, and not what its
keys stand for.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache

_WORSE = (1.5, 2.0, 4.0, 8.0, 16.0)
"""Error rates, as multiples of the bound, that the bets assume, so that small and large breaches are both detected."""


class AuditBound:
    """A sequential test of whether more than ``max_error`` of the served responses are wrong, from some audit on.

    Its ``wealth`` starts at one. It does not grow in expectation while each response is wrong with probability at
    most ``max_error``, whatever came before. So it reaches 1 / (1 - confidence), where ``violated`` becomes true,
    with probability at most 1 - confidence (Ville's inequality; Howard et al., arXiv:1810.08240). The fraction 1 / (t
    (t + 1)) of the stake is reserved for a bet that begins with audit t. So responses that were right long ago do not
    outweigh responses that are wrong today, as they would with one bet from the beginning.
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
        """Whether the audits have exceeded the error bound; it stays true."""
        return self.wealth >= self._limit

    def observe(self, wrong: bool) -> None:
        """One served response was audited."""
        if self.violated:
            return
        self._audited += 1
        new = 1.0 / (self._audited * (self._audited + 1))
        self._bets = [(bet + new) * gain for bet, gain in zip(self._bets, self._gains[wrong], strict=True)]
        self.wealth = sum(self._bets) / len(self._bets) + 1.0 / (self._audited + 1)


class Audits:
    """One test per key (tenant or partition), at most ``most`` at a time.

    Above that, the oldest test that speaks for its key is dropped, or if there is none, the one with the least
    evidence. Some favourable evidence is lost, but errors are remembered, however many other keys there are. Of the
    keys whose bound was exceeded, the last ``most`` are remembered.
    """

    def __init__(self, max_error: float, confidence: float, most: int) -> None:
        self._max_error = max_error
        self._confidence = confidence
        self._most = most
        self._tests: dict[Hashable, AuditBound] = {}
        self._refuted: dict[Hashable, None] = {}  # oldest first

    def refuted(self, key: Hashable) -> bool:
        """Whether the error bound of key ``key`` was exceeded."""
        return key in self._refuted

    def observe(self, key: Hashable, wrong: bool) -> bool:
        """A response of key ``key`` was audited; whether this audit exceeded its error bound."""
        if key in self._refuted:
            return False
        bound = self._tests.get(key) or AuditBound(self._max_error, self._confidence)
        self._tests[key] = bound
        bound.observe(wrong)
        if bound.violated:
            del self._tests[key]
            self._refuted[key] = None
            if len(self._refuted) > self._most:
                del self._refuted[next(iter(self._refuted))]
            return True
        if len(self._tests) > self._most:
            del self._tests[self._least_suspected()]
        return False

    def _least_suspected(self) -> Hashable:
        for key, bound in self._tests.items():
            if bound.wealth < 1.0:
                return key
        return min(self._tests, key=lambda key: self._tests[key].wealth)


@cache
def _gains(max_error: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The factor of each bet after a right response, and after a wrong one."""
    certain = 1.0 - (1.0 - max_error) / 10.0  # rates are below one and above the bound
    rates = [min(certain, max_error * times) for times in _WORSE]
    return (
        tuple((1.0 - rate) / (1.0 - max_error) for rate in rates),
        tuple(rate / max_error for rate in rates),
    )
