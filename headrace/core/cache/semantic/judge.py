"""Whether a near question's answer may be served: vetoes first, then a certified threshold on the evidence.

`weigh` looks at the neighbourhood of a question inside its partition: which answer most of it has, which entry with
that answer no guard forbids, and what speaks for it. `Judge` compares its score with the threshold that `certify`
allowed for partitions of that size. A neighbour's ``answer`` is a class: entries whose answers mean the same share it.
Pure; stores, vectors and the reading of texts are elsewhere.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from headrace.core.cache.semantic.guards import Veto, compare, traits, veto
from headrace.core.cache.semantic.score import NO_NEIGHBOUR, Evidence, Score

NEIGHBOURS = 32
"""How many of the nearest entries are looked at."""

_VOTERS = 10
_DONORS = 8
"""How many entries with the answer are tried before the guards' veto stands."""
_TEMPERATURE = 0.05
"""Of cosines, when they are weighed as votes."""
_ODDS_CAP = 1e-3


class Neighbour(NamedTuple):
    """An entry near the question: its row, the cosine of their vectors, the class of its answer, what it asked."""

    row: int
    cosine: float
    answer: int
    text: str


class Doubt(StrEnum):
    """Why no answer is served, where no guard forbids it."""

    TIMELY = "timely"
    NO_NEIGHBOUR = "no_neighbour"
    TOO_LONG = "too_long"
    LOW_SCORE = "low_score"
    UNPROVED = "unproved"


class Candidate(NamedTuple):
    """The entry whose answer could be served, and what speaks for it."""

    neighbour: Neighbour
    evidence: Evidence


class Serve(NamedTuple):
    """Serve ``neighbour``'s answer."""

    neighbour: Neighbour
    score: float


class Decline(NamedTuple):
    """Compute. ``neighbour`` and ``score`` where one came into question and its score was too low."""

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
    for near in alike[:_DONORS]:
        difference = compare(asked, traits(near.text))
        reason = veto(difference)
        if reason is None:
            break
        forbidden = forbidden or reason
    else:
        assert forbidden is not None
        return forbidden
    other = next((n.cosine for n in neighbours if n.answer != answer), None)
    if (
        other is None
    ):  # nothing else is near: as far off as the last one looked at, or as unrelated questions are
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
    """For partitions of ``entries`` or more, up to the next rule: serve from ``threshold`` on; infinite, never."""

    entries: int
    score: Score
    threshold: float


class Judge:
    """Serves by the rule for the partition's size; ``rules`` begin with the smallest."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = tuple(rules)
        self._sizes = tuple(rule.entries for rule in rules)

    def decide(self, question: str, neighbours: Sequence[Neighbour], entries: int) -> Serve | Decline:
        """What to do with a question whose nearest of ``entries`` entries are ``neighbours``, nearest first."""
        found = weigh(question, neighbours)
        if not isinstance(found, Candidate):
            return Decline(found)
        rule = self._rule(entries)
        if rule is None:
            return Decline(Doubt.UNPROVED, found.neighbour)
        score = rule.score(found.evidence)
        if score < rule.threshold:
            return Decline(Doubt.LOW_SCORE, found.neighbour, score)
        return Serve(found.neighbour, score)

    def passes(self, evidence: Evidence, entries: int) -> bool:
        """Whether a candidate with this evidence is served."""
        rule = self._rule(entries)
        return rule is not None and rule.score(evidence) >= rule.threshold

    def _rule(self, entries: int) -> Rule | None:
        place = bisect_right(self._sizes, entries) - 1
        return None if place < 0 or math.isinf(self._rules[place].threshold) else self._rules[place]
