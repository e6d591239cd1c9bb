"""The judge of the semantic cache: vetoes first, then a certified threshold on the evidence, then a second judge.

`weigh` examines the nearest entries of a request in its partition: the answer that most of them have, the entry with
that answer that no guard forbids, and the evidence for it. `Judge` compares its score with the threshold certified
for partitions of that size, and asks the second judge, a cross-encoder, if there is one. A neighbour's ``answer`` is a
class: entries whose answers mean the same share it. Pure; stores, vectors and text analysis are elsewhere.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from headrace.response_cache.rules.semantic.guards import Veto, compare, traits, veto
from headrace.response_cache.rules.semantic.score import NO_NEIGHBOUR, Evidence, Score

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


def weigh(question: str, neighbours: Sequence[Neighbour]) -> Candidate | Veto | Doubt:
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
        difference = compare(asked, traits(near.text))
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
