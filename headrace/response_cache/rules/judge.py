"""The judge of the semantic cache: vetoes first, then a certified threshold on a score, then a second judge.

The score is the log-odds that two requests have the same answer, monotone in the evidence. Each part of the evidence
passes through its own rising, piecewise linear curve; the sum is the log-odds. Such a score can be inspected part by
part, takes microseconds, and cannot learn that a nearer neighbour is worse. `response_cache.semantic.calibrate` fits
the curves; this file evaluates them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from headrace.response_cache.rules.guards import Difference, Veto, compare, traits, veto

NO_NEIGHBOUR = 0.2
"""The cosine of unrelated questions: a substitute for entries that a small cache does not have yet."""


class Evidence(NamedTuple):
    """Evidence that two questions have the same answer; in every part more is better.

    Cosines: ``cosine`` to the question whose response would be served, ``margin`` of the answer's nearest question
    over the nearest one with another answer, ``second`` of the answer's second question. Shares: ``agreement`` of the
    ten nearest with the answer; ``shared`` content words, ``kept`` (not substituted) ones, their ``order``,
    similarity of ``length`` in words. ``posterior`` is the log-odds of the answer among all neighbours, weighted by
    nearness. ``complete`` is 0 if a question refers to something outside of it.
    """

    cosine: float
    margin: float
    agreement: float
    posterior: float
    second: float
    shared: float
    kept: float
    order: float
    length: float
    complete: float


@dataclass(frozen=True, slots=True)
class Curve:
    """A rising, piecewise linear function: ``values`` at ``knots``, constant outside of them."""

    knots: tuple[float, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(a <= b for a, b in zip(self.values, self.values[1:], strict=False))
        apart = all(a < b for a, b in zip(self.knots, self.knots[1:], strict=False))
        if len(self.knots) != len(self.values) or len(self.knots) < 2 or not rising or not apart:
            raise ValueError("a curve needs two or more ascending knots, and as many values that do not fall")
        if not all(map(math.isfinite, (*self.knots, *self.values))):
            raise ValueError("a curve's knots and values must be finite")

    def __call__(self, x: float) -> float:
        place = bisect_right(self.knots, x)
        if place == 0:
            return self.values[0]
        if place == len(self.knots):
            return self.values[-1]
        left, right = self.knots[place - 1], self.knots[place]
        low, high = self.values[place - 1], self.values[place]
        return low + (high - low) * (x - left) / (right - left)


@dataclass(frozen=True, slots=True)
class Score:
    """Log-odds of the same answer: ``intercept`` plus the curves of the parts of the evidence that count."""

    intercept: float
    curves: tuple[tuple[str, Curve], ...]

    def __post_init__(self) -> None:
        unknown = {name for name, _ in self.curves} - set(Evidence._fields)
        if unknown:
            raise ValueError(f"unknown evidence: {', '.join(sorted(unknown))}")

    def __call__(self, evidence: Evidence) -> float:
        return self.intercept + sum(curve(getattr(evidence, name)) for name, curve in self.curves)

    def to_json(self) -> dict[str, Any]:
        """As plain lists and numbers; `from_json` reads it back."""
        curves = {name: {"knots": curve.knots, "values": curve.values} for name, curve in self.curves}
        return {"intercept": self.intercept, "curves": curves}

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> Score:
        """Read what `to_json` wrote.

        Raises:
            ValueError: a part is missing or invalid.
        """
        try:
            curves = tuple(
                (name, Curve(tuple(map(float, curve["knots"])), tuple(map(float, curve["values"]))))
                for name, curve in content["curves"].items()
            )
            return Score(float(content["intercept"]), curves)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a score: {error!r}") from error


# -- the decision ----------------------------------------------------------------------------------


NEIGHBOURS = 32
"""The number of nearest entries examined."""

_VOTERS = 10
_MAX_TRIED = 8
"""The number of entries with the answer that are tried before the guards' veto applies."""
_TEMPERATURE = 0.05
"""Temperature of the cosines when they are weighted as votes."""
_ODDS_CAP = 1e-3


class PairScorer(Protocol):
    """Scores of pairs of texts, larger for pairs that mean the same; None for a pair that is too long.

    Scores of scorers with equal ``name`` are comparable. From ``boundary`` on, the model itself calls a pair the same.
    It serves one thread at a time.
    """

    name: str
    boundary: float

    def score(self, pairs: Sequence[tuple[str, str]]) -> Sequence[float | None]: ...


class Neighbour(NamedTuple):
    """A similar entry: its row, the cosine of the vectors, the class of its answer, and its question."""

    row: int
    cosine: float
    answer: int
    text: str


class Doubt(StrEnum):
    """Why no response is served although no guard forbids it."""

    TIMELY = "timely"
    NO_NEIGHBOUR = "no_neighbour"
    TOO_LONG = "too_long"
    LOW_SCORE = "low_score"
    UNPROVED = "unproved"
    JUDGE_REFUSED = "judge_refused"
    JUDGE_PENDING = "judge_pending"


class Candidate(NamedTuple):
    """The entry whose response could be served, and the evidence for it."""

    neighbour: Neighbour
    evidence: Evidence


class Serve(NamedTuple):
    """Serve the response of ``neighbour``."""

    neighbour: Neighbour
    score: float


class Decline(NamedTuple):
    """Compute the answer. ``neighbour`` and ``score`` are set if a candidate's score was too low."""

    why: Doubt | Veto
    neighbour: Neighbour | None = None
    score: float | None = None


def differ(asked: str, cached: str) -> Difference:
    """What differs between two questions."""
    return compare(traits(asked), traits(cached))


def weigh(
    question: str, neighbours: Sequence[Neighbour], differ: Callable[[str, str], Difference] = differ
) -> Candidate | Veto | Doubt:
    """The best candidate among ``neighbours`` (nearest first), or why there is none."""
    asked = traits(question)
    if asked.timely:
        return Doubt.TIMELY
    if not neighbours:
        return Doubt.NO_NEIGHBOUR
    votes: dict[int, float] = {}
    for near in neighbours:
        weight = math.exp((near.cosine - neighbours[0].cosine) / _TEMPERATURE)
        votes[near.answer] = votes.get(near.answer, 0.0) + weight
    answer = max(votes, key=votes.__getitem__)
    alike = [near for near in neighbours if near.answer == answer]
    forbidden: Veto | None = None
    for near in alike[:_MAX_TRIED]:
        difference = differ(question, near.text)
        reason = veto(difference)
        if reason is None:
            break
        forbidden = forbidden or reason
    else:
        assert forbidden is not None
        return forbidden
    other = next((n.cosine for n in neighbours if n.answer != answer), None)
    if other is None:  # no other answer is near: assume the last entry examined, or unrelated questions
        full = len(neighbours) >= NEIGHBOURS
        other = neighbours[-1].cosine if full else min(neighbours[-1].cosine, NO_NEIGHBOUR)
    share = votes[answer] / sum(votes.values())
    return Candidate(
        near,
        Evidence(
            cosine=near.cosine,
            margin=alike[0].cosine - other,
            agreement=sum(n.answer == answer for n in neighbours[:_VOTERS]) / _VOTERS,
            posterior=math.log((share + _ODDS_CAP) / (1.0 - share + _ODDS_CAP)),
            second=alike[1].cosine if len(alike) > 1 else NO_NEIGHBOUR,
            shared=1.0 - difference.unshared,
            kept=1.0 - difference.substituted,
            order=1.0 - difference.moved,
            length=1.0 - difference.length,
            complete=float(not asked.pointing),
        ),
    )


class Rule(NamedTuple):
    """For partitions of ``entries`` or more, up to the next rule: serve from ``threshold`` on (infinite: never).

    With a second judge, its score of the two questions must reach ``judge_threshold`` too.
    """

    entries: int
    score: Score
    threshold: float
    judge_threshold: float | None = None


class Judge:
    """Applies the rule for the partition's size; ``rules`` are ordered by size, smallest first.

    ``second`` is the second judge that the rules were certified with.
    """

    def __init__(self, rules: Sequence[Rule], second: PairScorer | None = None) -> None:
        if any((rule.judge_threshold is None) is not (second is None) for rule in rules):
            raise ValueError("rules need the second judge that they were certified with, and no other")
        self._second = second
        self._rules = tuple(rules)
        self._sizes = tuple(rule.entries for rule in rules)

    def decide(self, question: str, neighbours: Sequence[Neighbour], entries: int) -> Serve | Decline:
        """The decision for a question, given the nearest (nearest first) of the ``entries`` entries of its
        partition.
        """
        found = weigh(question, neighbours)
        if not isinstance(found, Candidate):
            return Decline(found)
        rule = self._rule(entries)
        if rule is None:
            return Decline(Doubt.UNPROVED, found.neighbour)
        score = rule.score(found.evidence)
        if score < rule.threshold:
            return Decline(Doubt.LOW_SCORE, found.neighbour, score)
        if self._second is not None:
            assert rule.judge_threshold is not None  # checked above for all rules
            if not agrees(self._second, rule.judge_threshold, found.neighbour.text, question):
                return Decline(Doubt.JUDGE_REFUSED, found.neighbour, score)
        return Serve(found.neighbour, score)

    def passes(self, evidence: Evidence, entries: int) -> bool:
        """Whether a candidate with this evidence is served, if the second judge agrees."""
        rule = self._rule(entries)
        return rule is not None and rule.score(evidence) >= rule.threshold

    def _rule(self, entries: int) -> Rule | None:
        place = bisect_right(self._sizes, entries) - 1
        return None if place < 0 or math.isinf(self._rules[place].threshold) else self._rules[place]


def agrees(second: PairScorer, threshold: float, cached: str, asked: str) -> bool:
    """Whether the second judge calls two questions the same; one that it cannot read, it does not."""
    score = second.score([(cached, asked)])[0]
    return score is not None and score >= threshold


class Nearest(Judge):
    """Chooses the nearest entry from ``cosine`` on, for drafts: a wrong one costs a little time and changes nothing."""

    def __init__(self, cosine: float) -> None:
        super().__init__(())
        self._cosine = cosine

    def decide(self, question: str, neighbours: Sequence[Neighbour], entries: int) -> Serve | Decline:
        """As `Judge.decide`; no guard forbids anything."""
        if not neighbours:
            return Decline(Doubt.NO_NEIGHBOUR)
        nearest = neighbours[0]
        if nearest.cosine < self._cosine:
            return Decline(Doubt.LOW_SCORE, nearest, nearest.cosine)
        return Serve(nearest, nearest.cosine)
