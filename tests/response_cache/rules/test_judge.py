"""What the judge makes of neighbourhoods written by hand."""

from __future__ import annotations

import json
import math

import pytest

from headrace.response_cache.rules.guards import Veto
from headrace.response_cache.rules.judge import (
    NEIGHBOURS,
    NO_NEIGHBOUR,
    Candidate,
    Curve,
    Decline,
    Doubt,
    Evidence,
    Judge,
    Nearest,
    Neighbour,
    Rule,
    Score,
    Serve,
    weigh,
)

NOTHING = Evidence(*[0.0] * len(Evidence._fields))


def test_a_curve_is_flat_outside_and_straight_between():
    curve = Curve((0.0, 1.0, 3.0), (0.0, 2.0, 3.0))
    assert [curve(x) for x in (-5.0, 0.0, 0.25, 1.0, 2.0, 3.0, 9.0)] == [0.0, 0.0, 0.5, 2.0, 2.5, 3.0, 3.0]


@pytest.mark.parametrize(
    ("knots", "values"),
    [
        ((0.0,), (1.0,)),
        ((0.0, 1.0), (1.0, 0.5)),
        ((1.0, 1.0), (0.0, 1.0)),
        ((0.0, 1.0), (0.0,)),
        ((0.0, 1.0), (0.0, math.nan)),
        ((0.0, 1.0), (0.0, math.inf)),
    ],
)
def test_curves_that_are_none(knots, values):
    with pytest.raises(ValueError, match=r"curve"):
        Curve(knots, values)


def test_a_score_adds_its_curves_and_survives_json():
    score = Score(
        -1.5, (("cosine", Curve((0.5, 1.0), (0.0, 4.0))), ("margin", Curve((0.0, 0.2), (0.0, 1.0))))
    )
    evidence = NOTHING._replace(cosine=0.75, margin=0.1)
    assert score(evidence) == pytest.approx(-1.5 + 2.0 + 0.5)
    again = Score.from_json(json.loads(json.dumps(score.to_json())))
    assert again == score


@pytest.mark.parametrize(
    "content",
    [
        {"intercept": 0.0},
        {"intercept": 0.0, "curves": {"charm": {"knots": [0, 1], "values": [0, 1]}}},
        {"intercept": 0.0, "curves": {"cosine": {"knots": [0, 1]}}},
        {"intercept": 0.0, "curves": []},
        {"intercept": 0.0, "curves": {"cosine": {"knots": [0, 1], "values": [1, 0]}}},
    ],
)
def test_what_is_no_score(content):
    with pytest.raises(ValueError, match=r"score|evidence|curve"):
        Score.from_json(content)


COSINE = Score(0.0, (("cosine", Curve((0.0, 1.0), (0.0, 1.0))),))


def near(cosine: float, answer: int, text: str = "how do I reset my pin") -> Neighbour:
    return Neighbour(0, cosine, answer, text)


def weighed(question: str, *neighbours: Neighbour) -> Candidate:
    found = weigh(question, neighbours)
    assert isinstance(found, Candidate)
    return found


def test_the_evidence_of_a_neighbourhood():
    neighbours = [near(0.9, 1), near(0.8, 1), near(0.7, 2), near(0.6, 1)]
    evidence = weighed("how can I reset the pin", *neighbours).evidence
    assert evidence.cosine == 0.9
    assert evidence.margin == pytest.approx(0.2)
    assert evidence.agreement == pytest.approx(0.3)
    assert evidence.second == 0.8
    votes = [math.exp((cosine - 0.9) / 0.05) for cosine in (0.9, 0.8, 0.7, 0.6)]
    share = (sum(votes) - votes[2]) / sum(votes)
    assert evidence.posterior == pytest.approx(math.log((share + 1e-3) / (1 - share + 1e-3)))
    assert evidence[5:] == (1.0, 1.0, 1.0, 1.0, 1.0)


def test_many_near_ones_outvote_the_nearest():
    neighbours = [near(0.80, 1), near(0.79, 2), near(0.79, 2), near(0.78, 2)]
    found = weighed("how do I reset my pin", *neighbours)
    assert found.neighbour is neighbours[1]
    assert found.evidence.margin == pytest.approx(-0.01)


def test_a_forbidden_entry_may_be_replaced_by_another_with_the_same_answer():
    neighbours = [near(0.95, 1, "transfer 20 euros"), near(0.9, 1, "transfer euros"), near(0.2, 2)]
    found = weighed("transfer some euros", *neighbours)
    assert found.neighbour is neighbours[1]
    assert found.evidence.cosine == 0.9
    assert found.evidence.margin == pytest.approx(0.75)  # of the answer, not of the entry


def test_vetoes_doubts_and_scores():
    judge = Judge([Rule(0, COSINE, 0.85)])
    assert judge.decide("turn it off", [near(0.99, 1, "turn it on")], 1) == Decline(Veto.OPPOSITE)
    assert judge.decide("who won today", [near(1.0, 1, "who won today")], 1) == Decline(Doubt.TIMELY)
    assert judge.decide("hello", [], 0) == Decline(Doubt.NO_NEIGHBOUR)
    low = near(0.8, 1)
    assert judge.decide(low.text, [low], 1) == Decline(Doubt.LOW_SCORE, low, 0.8)
    high = near(0.85, 1)
    assert judge.decide(high.text, [high], 1) == Serve(high, 0.85)


def test_each_size_of_a_partition_has_its_own_rule():
    judge = Judge([Rule(10, COSINE, math.inf), Rule(30, COSINE, 0.9), Rule(300, COSINE, 0.8)])
    one = near(0.85, 1)
    evidence = weighed(one.text, one).evidence
    expected = {
        0: Doubt.UNPROVED,
        10: Doubt.UNPROVED,
        29: Doubt.UNPROVED,
        30: Doubt.LOW_SCORE,
        299: Doubt.LOW_SCORE,
    }
    for entries, why in expected.items():
        verdict = judge.decide(one.text, [one], entries)
        assert isinstance(verdict, Decline)
        assert verdict.why is why
        assert not judge.passes(evidence, entries)
    assert judge.decide(one.text, [one], 300) == Serve(one, 0.85)
    assert judge.passes(evidence, 5000)


class Second:
    """A `response_cache.rules.judge.PairScorer` with one score; None: the pair is too long."""

    name, boundary = "second@1", 0.5

    def __init__(self, score: float | None) -> None:
        self._score = score
        self.asked: list[tuple[str, str]] = []

    def score(self, pairs):
        self.asked += pairs
        return [self._score for _ in pairs]


@pytest.mark.parametrize(("score", "served"), [(0.7, True), (0.69, False), (None, False)])
def test_the_second_judge_must_agree(score, served):
    second = Second(score)
    judge = Judge([Rule(0, COSINE, 0.85, 0.7)], second)
    one = near(0.9, 1, "reset my pin")
    expected = Serve(one, 0.9) if served else Decline(Doubt.JUDGE_REFUSED, one, 0.9)
    assert judge.decide("reset the pin", [one], 1) == expected
    assert second.asked == [("reset my pin", "reset the pin")]


def test_the_second_judge_is_asked_only_about_what_would_be_served():
    second = Second(1.0)
    judge = Judge([Rule(0, COSINE, 0.85, 0.7)], second)
    assert judge.decide("turn it off", [near(0.99, 1, "turn it on")], 1) == Decline(Veto.OPPOSITE)
    low = near(0.8, 1)
    assert judge.decide(low.text, [low], 1) == Decline(Doubt.LOW_SCORE, low, 0.8)
    assert second.asked == []


@pytest.mark.parametrize(("threshold", "second"), [(0.7, None), (None, Second(1.0))])
def test_rules_need_the_judge_that_they_were_certified_with(threshold, second):
    with pytest.raises(ValueError, match="second judge"):
        Judge([Rule(0, COSINE, 0.85, threshold)], second)


def test_a_young_cache_is_not_sure_because_it_knows_nothing_else():
    alone = weighed("how do I reset my pin", near(0.9, 1))
    assert alone.evidence.margin == pytest.approx(0.9 - NO_NEIGHBOUR)
    assert alone.evidence.second == NO_NEIGHBOUR
    assert alone.evidence.agreement == pytest.approx(0.1)
    crowd = weighed("how do I reset my pin", *[near(0.9, 1) for _ in range(NEIGHBOURS)])
    assert crowd.evidence.margin == 0.0


def test_a_question_that_points_elsewhere_is_incomplete():
    assert (
        weighed("how does this circuit work", near(0.9, 1, "how does this circuit work")).evidence.complete
        == 0.0
    )


def test_the_nearest_is_a_draft_whatever_its_words():
    nearest = Nearest(0.7)
    asked = "how do I not reset my pin today"
    assert nearest.decide(asked, [near(0.8, 1), near(0.75, 2)], 2) == Serve(near(0.8, 1), 0.8)
    assert nearest.decide(asked, [near(0.6, 1)], 1) == Decline(Doubt.LOW_SCORE, near(0.6, 1), 0.6)
    assert nearest.decide(asked, [], 0) == Decline(Doubt.NO_NEIGHBOUR)
