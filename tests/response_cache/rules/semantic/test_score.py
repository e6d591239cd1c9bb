from __future__ import annotations

import json
import math

import pytest

from headrace.response_cache.rules.semantic.score import Curve, Evidence, Score

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
