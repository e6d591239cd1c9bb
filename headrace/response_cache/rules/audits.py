"""Audits of the semantic cache: hits that are computed anyway, and compared with the response that would be served.

`same_answer` compares two answers, as far as that is decidable without a model. Answers are compared by their first
words, which state what the rest explains. The vectors must be near, and short answers must not differ in numbers,
names or a "not", as guards detect them. Long ones always differ in some word of that kind, so there the vectors
decide.

`AuditRate` is the share of hits that are audited: more while errors come near the bound.

`Audits` are sequential tests of the bound. Each tenant or partition has its own, so audits of one do not count for
another. A test is a bet against the error bound and may be evaluated after every audit.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from functools import cache

from headrace.response_cache.rules.guards import compare, traits, veto

_NEAR = 0.9
"""The cosine from which differently worded answers may be the same."""

_GIST_WORDS = 120
"""Number of words compared: as many as sentence encoders read well."""

_SHORT_WORDS = 25
"""Up to this length each word may reverse an answer."""

_FORM = re.compile(r"[\W_]+")


def gist(answer: str) -> str:
    """The first words of an answer, which represent it in comparisons."""
    return " ".join(answer.split(maxsplit=_GIST_WORDS)[:_GIST_WORDS])


def same_answer(one: str, other: str, cosine: float | None) -> bool:
    """Whether two gists are equal up to spelling, or near in meaning.

    ``cosine`` is None if one of them has no vector: then only equal gists are the same.
    """
    if _form(one) == _form(other):
        return True
    if cosine is None or cosine < _NEAR:
        return False
    readings = traits(one), traits(other)
    if min(len(reading.words) for reading in readings) > _SHORT_WORDS:
        return True
    return veto(compare(*readings)) is None


def _form(answer: str) -> str:
    return _FORM.sub(" ", answer).strip().casefold() or answer.strip()


SMOOTHING = 200
"""Audits over which errors are smoothed exponentially."""

COOL_DOWN = 50
"""Audits between two changes."""

NEAR, FAR = 0.5, 0.25
"""Shares of the error bound: smoothed errors above the one raise the rate, below the other lower it. Between them
nothing changes (hysteresis)."""

FACTOR = 2.0
LOWEST, HIGHEST = 0.5, 8.0
"""Bounds of the rate, as multiples of the configured one."""


class AuditRate:
    """``share`` of hits (0 to 1) are audited at first; without ``adapts`` that never changes.

    Raising the rate finds an exceeded bound sooner; lowering it saves computing. The test of `audits` stays valid,
    because the rate depends on earlier audits only.
    """

    def __init__(self, share: float, max_error: float, *, adapts: bool) -> None:
        self.share = share
        self._low, self._high = LOWEST * share, min(1.0, HIGHEST * share)
        self._max_error = max_error
        self._adapts = adapts
        self._errors = (NEAR + FAR) / 2 * max_error
        self._since = 0

    def observe(self, wrong: bool) -> str:
        """One hit was audited. Returns why the rate has changed; empty if it has not."""
        if not self._adapts:
            return ""
        self._errors += (wrong - self._errors) / SMOOTHING
        self._since += 1
        if self._since < COOL_DOWN or FAR * self._max_error <= self._errors <= NEAR * self._max_error:
            return ""
        factor = FACTOR if self._errors > NEAR * self._max_error else 1 / FACTOR
        share = min(self._high, max(self._low, self.share * factor))
        if share == self.share:
            return ""
        self.share, self._since = share, 0
        return f"smoothed errors {self._errors:.3g}, error bound {self._max_error:.3g}"


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
