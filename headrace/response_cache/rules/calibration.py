"""The calibration of the semantic cache: error counts by threshold, and the thresholds that they certify.

The bound is P(wrong | served) <= max_error with a given confidence. It is proved with labelled decisions that the
score was not fitted on. `certified_threshold` tests thresholds with the exact binomial bound, in a way that tests
several without spending the confidence twice (Learn then Test, arXiv:2110.01052). `audits` monitors the bound
afterwards. `Calibration` is the result as a value with a JSON form; it knows no texts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

from headrace.response_cache.rules.judge import Rule, Score

CONFIDENCE = 0.95
"""The confidence of certificates, rejections and audits."""

_ITERATIONS = 300
_TINY = 1e-300
_PRECISION = 1e-15


def beta_cdf(x: float, a: float, b: float) -> float:
    """The regularized incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22)."""
    if x <= 0.0:
        return 0.0
    if x >= 1.0:
        return 1.0
    if x > (a + 1.0) / (a + b + 2.0):
        return 1.0 - beta_cdf(1.0 - x, b, a)  # where the fraction converges quickly
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    c, d = 1.0, 1.0 / _away_from_zero(1.0 - (a + b) * x / (a + 1.0))
    fraction = d
    for m in range(1, _ITERATIONS):
        for step in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 / _away_from_zero(1.0 + step * d)
            c = _away_from_zero(1.0 + step / c)
            fraction *= c * d
        if abs(c * d - 1.0) < _PRECISION:
            break
    return front * fraction / a


def upper_error(wrong: int, served: int, confidence: float) -> float:
    """The largest error rate that ``wrong`` of ``served`` does not reject (Clopper and Pearson, 1934).

    One-sided: for independent trials the true rate is above it with probability at most 1 - confidence.
    """
    if not 0 <= wrong <= served:
        raise ValueError(f"{wrong} wrong of {served} served")
    if wrong == served:
        return 1.0
    if wrong == 0:
        return -math.expm1(math.log1p(-confidence) / served)
    low, high = wrong / served, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if _chance_of_so_few(wrong, served, middle) > 1.0 - confidence:
            low = middle
        else:
            high = middle
    return high


class Tally(NamedTuple):
    """The result of serving at ``threshold`` and above on labelled decisions."""

    threshold: float
    served: int
    wrong: int


class Certificate(NamedTuple):
    """A threshold whose error rate among served responses is at most ``bound``, with the given confidence."""

    tally: Tally
    bound: float


class Claim(NamedTuple):
    """At most ``bound`` of the responses are wrong that partitions of ``entries`` or more serve from a threshold on."""

    entries: int
    tally: Tally
    bound: float


def certified_threshold(
    tallies: Sequence[Tally], starts: Sequence[int], max_error: float, confidence: float
) -> Certificate | None:
    """The loosest threshold that the data support, or None if they support none.

    ``tallies`` go from strict to loose, ``starts`` are indices among them. The allowed error probability, 1 -
    confidence, is split among the starts. From each start thresholds are tested in order at the same level until one
    fails, which ends that level. A sequence of tests that reaches the next start adds that start's level to its own
    (the fallback procedure: Wiens and Dmitrienko, 2005). Thresholds and starts must have been chosen without the data
    that ``tallies`` count; `promising_starts` does that on other data. Starting at the strictest threshold would fail
    at once: too little is served there to prove anything.
    """
    found: Certificate | None = None
    doubt = 0.0
    for index, tally in enumerate(tallies):
        if index in starts:
            doubt += (1.0 - confidence) / len(starts)
        if doubt and tally.served and _chance_of_so_few(tally.wrong, tally.served, max_error) <= doubt:
            found = Certificate(tally, upper_error(tally.wrong, tally.served, 1.0 - doubt))
        else:
            doubt = 0.0
    return found


def promising_starts(tallies: Sequence[Tally], max_error: float, growth: float) -> list[int]:
    """The starts for `certified_threshold` on ``growth`` times as much data, chosen without that data.

    One start is where most can be proved; half an error is added to each count, because zero errors in a few rows
    prove nothing. The other is where half as much is served, in case these tallies were lucky: a score errs least on
    the rows that it was fitted on.
    """
    best = min(range(len(tallies)), key=lambda index: _expected_doubt(tallies[index], 0.5, max_error, growth))
    half = min(range(best + 1), key=lambda index: abs(tallies[index].served - tallies[best].served / 2))
    return sorted({half, best})


def is_promising(tallies: Sequence[Tally], max_error: float, confidence: float, growth: float) -> bool:
    """Whether some threshold would pass on ``growth`` times as much data with the same error rates."""
    return any(_expected_doubt(tally, 0.0, max_error, growth) <= 1.0 - confidence for tally in tallies)


def served_to_prove(max_error: float, confidence: float) -> int:
    """The number of served responses without an error that `certified_threshold` needs from one start."""
    return math.ceil(math.log1p(-confidence) / math.log1p(-max_error))


def _expected_doubt(tally: Tally, more: float, max_error: float, growth: float) -> float:
    """The error probability on ``growth`` times as much data, with ``more`` errors than ``tally`` has."""
    served = round(tally.served * growth)
    wrong = math.ceil((tally.wrong + more) * growth)
    return _chance_of_so_few(min(wrong, served), served, max_error)


def _chance_of_so_few(wrong: int, served: int, rate: float) -> float:
    """P(X <= wrong) for X binomial with ``served`` trials at ``rate``."""
    return 1.0 if wrong >= served else 1.0 - beta_cdf(rate, wrong + 1, served - wrong)


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY


_FORMAT = "headrace semantic calibration 2"
_JUDGED_FORMAT = "headrace semantic calibration 3"
"""With a second judge: a server that does not know it must not read such a calibration."""

_OTHERS_DOUBT = 0.2
"""Share of the allowed error probability (1 - confidence) that each size but the last may use; the last, where most
is served, gets the rest.

Only sizes that could pass get a share, judged by the rows that scores were fitted on: the shares of the others would
be wasted."""


class Unsupported(ValueError):
    """The data cannot prove the requested error bound; the message says what they show."""


@dataclass(frozen=True, slots=True)
class Stratum:
    """The result for partitions of ``entries`` entries or more, up to the next stratum's.

    ``fitted`` and ``held`` count the outcomes of thresholds (the same in both, strict to loose) on the rows used to
    fit the score and on held-out rows. ``fitted_rows`` and ``held_rows`` are the numbers of rows of each kind. With a
    second judge, only pairs count as served that it scored ``judge_threshold`` or more. ``by_hand`` counts the outcomes
    of serving by the cosine alone, from thresholds that were given by hand, on all rows.
    """

    entries: int
    score: Score
    fitted: tuple[Tally, ...]
    held: tuple[Tally, ...]
    fitted_rows: int
    held_rows: int
    judge_threshold: float | None = None
    by_hand: tuple[Tally, ...] = ()

    def is_promising(self, max_error: float, confidence: float) -> bool:
        """Whether the rows used for fitting suggest that a certificate will be found."""
        growth = self.held_rows / max(1, self.fitted_rows)
        return is_promising(self.fitted, max_error, confidence, growth)

    def certificate(self, max_error: float, confidence: float) -> Certificate:
        """The loosest threshold with at most ``max_error`` wrong among served responses.

        Raises:
            Unsupported: the rows prove none.
        """
        starts = self._starts(max_error)
        found = certified_threshold(self.held, starts, max_error, confidence) if starts else None
        if found is None:
            raise self.refusal(max_error, confidence)
        return found

    def refusal(self, max_error: float, confidence: float) -> Unsupported:
        """The error that there is no certificate, with what the rows show."""
        starts = self._starts(max_error)
        shown = "no rows are usable"
        if starts:
            tried = self.held[starts[-1]]
            shown = f"at the most promising threshold {tried.wrong} of {tried.served} were wrong"
        return Unsupported(
            f"the labelled rows cannot prove that at most {max_error:.3g} of the served responses are wrong "
            f"with {confidence:.3g} confidence: {shown}; at least {served_to_prove(max_error, confidence)} served "
            "without an error are needed"
        )

    def _starts(self, max_error: float) -> list[int]:
        if not (self.held_rows and self.fitted_rows and self.held):
            return []
        return promising_starts(self.fitted, max_error, self.held_rows / self.fitted_rows)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Scores by size of the partition, smallest first, valid for vectors of ``encoder`` and scores of ``judge``.

    ``judge`` names the second judge; empty if there is none.
    """

    encoder: str
    strata: tuple[Stratum, ...]
    judge: str = ""

    def certificates(self, max_error: float, confidence: float) -> list[Certificate | Unsupported]:
        """The certificate of each stratum, or why there is none; all of them together hold with ``confidence``."""
        found: list[Certificate | Unsupported] = []
        all_strata = range(len(self.strata))
        promising = [index for index in all_strata if self.strata[index].is_promising(max_error, confidence)]
        sharing = promising or all_strata
        for index, stratum in enumerate(self.strata):
            if index not in sharing:
                found.append(stratum.refusal(max_error, confidence))
                continue
            last = index == sharing[-1]
            share = 1.0 - _OTHERS_DOUBT * (len(sharing) - 1) if last else _OTHERS_DOUBT
            try:
                found.append(stratum.certificate(max_error, 1.0 - share * (1.0 - confidence)))
            except Unsupported as error:
                found.append(error)
        return found

    def claims(self, cosine: float, confidence: float) -> list[Claim]:
        """What the labelled rows show about serving from a ``cosine`` on; empty if they were not counted for it.

        All claims hold together with ``confidence``: for all sizes, and for all thresholds that were counted.
        """
        sizes = [stratum for stratum in self.strata if stratum.by_hand]
        tests = sum(len(stratum.by_hand) for stratum in sizes)
        return [
            Claim(
                stratum.entries, tally, upper_error(tally.wrong, tally.served, 1 - (1 - confidence) / tests)
            )
            for stratum in sizes
            for tally in stratum.by_hand
            if tally.threshold == cosine
        ]

    def rules(self, max_error: float, confidence: float) -> list[Rule]:
        """The rule of each stratum: serve from its certified threshold on, or never.

        Raises:
            Unsupported: no stratum's rows prove the error bound.
        """
        found = self.certificates(max_error, confidence)
        reasons = [each for each in found if isinstance(each, Unsupported)]
        if len(reasons) == len(found):
            raise reasons[-1]
        return [
            Rule(
                stratum.entries,
                stratum.score,
                math.inf if isinstance(each, Unsupported) else each.tally.threshold,
                stratum.judge_threshold,
            )
            for stratum, each in zip(self.strata, found, strict=True)
        ]

    def to_text(self) -> str:
        """JSON that `from_text` reads."""
        strata = [
            {
                "entries": stratum.entries,
                "fitted_rows": stratum.fitted_rows,
                "held_rows": stratum.held_rows,
                "fitted": stratum.fitted,
                "held": stratum.held,
                "score": stratum.score.to_json(),
            }
            | ({"judge_threshold": stratum.judge_threshold} if self.judge else {})
            | ({"by_hand": stratum.by_hand} if stratum.by_hand else {})
            for stratum in self.strata
        ]
        content = {"format": _JUDGED_FORMAT if self.judge else _FORMAT, "encoder": self.encoder}
        content |= {"judge": self.judge} if self.judge else {}
        return json.dumps(content | {"strata": strata}, indent=1) + "\n"

    @staticmethod
    def from_text(text: str) -> Calibration:
        """Read what `to_text` wrote.

        Raises:
            ValueError: the text is not such JSON, or its numbers are inconsistent.
        """
        content: Any = json.loads(text)
        if not isinstance(content, dict) or content.get("format") not in (_FORMAT, _JUDGED_FORMAT):
            raise ValueError(f"not a calibration: 'format' is neither '{_FORMAT}' nor '{_JUDGED_FORMAT}'")
        judged = content["format"] == _JUDGED_FORMAT
        try:
            strata = tuple(_read_stratum(each, judged) for each in content["strata"])
            encoder, judge = str(content["encoder"]), str(content["judge"]) if judged else ""
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a calibration: {error!r}") from error
        sizes = [stratum.entries for stratum in strata]
        if not sizes or sizes != sorted(set(sizes)):
            raise ValueError("not a calibration: its partition sizes are not ascending")
        if judged and not judge:
            raise ValueError("not a calibration: its judge has no name")
        return Calibration(encoder, strata, judge)


class LabelledDecision(NamedTuple):
    """A candidate of a tenant that a person has labelled ``right`` or not.

    It reached ``score`` among ``entries`` entries, while everything from ``least`` on was recorded.
    """

    entries: int
    score: float
    least: float
    right: bool


class Standing(StrEnum):
    """Which certificate holds for a tenant, for one size of its partitions.

    ``COMMON``: its own labels prove no threshold, and do not contradict the common one. ``OWN``: they prove one.
    ``CONTRADICTED``: they show that the common one errs too often, so nothing is served.
    """

    COMMON = "common"
    OWN = "own"
    CONTRADICTED = "contradicted"


class TenantRule(NamedTuple):
    """The rule of a tenant for one size, why it holds, and what its labels count at its threshold."""

    rule: Rule
    standing: Standing
    tally: Tally


def count(decisions: Sequence[LabelledDecision], threshold: float) -> Tally:
    """The labelled decisions that a threshold serves, of those that were recorded from it on or from a looser one."""
    served = [each.right for each in decisions if each.score >= threshold >= each.least]
    return Tally(threshold, len(served), served.count(False))


def doubt_of_test(number: int, confidence: float) -> float:
    """The part of the allowed error probability that test ``number`` of a tenant's labels gets; all sum up to it."""
    return (1.0 - confidence) / (number * (number + 1))


def tenant_rules(
    calibration: Calibration,
    decisions: Sequence[LabelledDecision],
    tests: int,
    max_error: float,
    confidence: float,
) -> list[TenantRule]:
    """The rules of a tenant with labelled ``decisions`` of its own; none is looser than the common one.

    The thresholds tested and their starts are chosen without these labels. ``tests`` says how often the tenant's labels
    have been tested, with these: test number k gets 1 / (k (k + 1)) of the allowed error probability, so that importing
    labels again and again does not prove anything by chance.
    """
    doubt = doubt_of_test(tests, confidence)
    common = calibration.rules(max_error, confidence)
    own = _recounted(calibration, decisions, common)
    found = own.certificates(max_error, 1.0 - doubt)
    rules = []
    for stratum, rule, each in zip(own.strata, common, found, strict=True):
        if isinstance(each, Certificate):
            rules.append(TenantRule(rule._replace(threshold=each.tally.threshold), Standing.OWN, each.tally))
            continue
        tally = stratum.held[-1] if stratum.held else Tally(rule.threshold, 0, 0)
        # How likely so many errors are, if the common threshold keeps the bound.
        chance = 1.0 - _chance_of_so_few(tally.wrong - 1, tally.served, max_error) if tally.wrong else 1.0
        if chance <= doubt / len(own.strata):
            rules.append(TenantRule(rule._replace(threshold=math.inf), Standing.CONTRADICTED, tally))
        else:
            rules.append(TenantRule(rule, Standing.COMMON, tally))
    return rules


def _recounted(
    calibration: Calibration, decisions: Sequence[LabelledDecision], common: Sequence[Rule]
) -> Calibration:
    """The thresholds that are no looser than the common ones, with outcomes counted on other decisions.

    The number of rows is set so that the starts are chosen for as many served responses as there are.
    """
    strata = []
    ends = [*(rule.entries for rule in common[1:]), math.inf]
    for stratum, rule, end in zip(calibration.strata, common, ends, strict=True):
        inside = [each for each in decisions if stratum.entries <= each.entries < end]
        fitted = tuple(tally for tally in stratum.fitted if tally.threshold >= rule.threshold)
        held = tuple(count(inside, tally.threshold) for tally in fitted)
        before = sum(tally.served for tally in fitted)
        growth = sum(tally.served for tally in held) / before if before else 0.0
        rows = max(len(inside), round(growth * stratum.fitted_rows))
        strata.append(replace(stratum, fitted=fitted, held=held, held_rows=rows))
    return replace(calibration, strata=tuple(strata))


def _read_stratum(content: Any, judged: bool) -> Stratum:
    fitted, held, by_hand = (
        tuple(Tally(float(threshold), int(served), int(wrong)) for threshold, served, wrong in counts)
        for counts in (content["fitted"], content["held"], content.get("by_hand", ()))
    )
    found = Stratum(
        entries=int(content["entries"]),
        score=Score.from_json(content["score"]),
        fitted=fitted,
        held=held,
        fitted_rows=int(content["fitted_rows"]),
        held_rows=int(content["held_rows"]),
        judge_threshold=float(content["judge_threshold"]) if judged else None,
        by_hand=by_hand,
    )
    if judged and not math.isfinite(found.judge_threshold or 0.0):
        raise ValueError("not a calibration: a threshold of its judge is not finite")
    for tallies, rows in ((fitted, found.fitted_rows), (held, found.held_rows), (by_hand, math.inf)):
        if not all(0 <= wrong <= served <= rows for _, served, wrong in tallies):
            raise ValueError("not a calibration: more rows are wrong than served, or served than counted")
    thresholds = [tally.threshold for tally in held]
    if thresholds != [tally.threshold for tally in fitted] or thresholds != sorted(thresholds, reverse=True):
        raise ValueError("not a calibration: its thresholds are not ordered from strict to loose")
    return found
