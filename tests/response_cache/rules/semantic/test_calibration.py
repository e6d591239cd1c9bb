from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from headrace.response_cache.rules.semantic.bounds import Tally
from headrace.response_cache.rules.semantic.calibration import Calibration, Stratum, Unsupported
from headrace.response_cache.rules.semantic.score import Curve, Score

SCORE = Score(0.5, (("cosine", Curve((0.0, 1.0), (0.0, 3.0))),))
FITTED = (Tally(3.0, 300, 0), Tally(2.0, 600, 1), Tally(1.0, 900, 40))
HELD = (Tally(3.0, 610, 0), Tally(2.0, 1200, 3), Tally(1.0, 1800, 90))
GROWN = Stratum(30, SCORE, FITTED, HELD, fitted_rows=1000, held_rows=2000)
YOUNG = Stratum(0, Score(0.0, ()), (Tally(1.0, 10, 1),), (Tally(1.0, 30, 4),), 100, 300)
CALIBRATION = Calibration("encoder@1", (YOUNG, GROWN))


def test_the_threshold_follows_the_promise():
    certificate = GROWN.certificate(0.01, 0.95)
    assert certificate.tally == HELD[1]
    assert 3 / 1200 < certificate.bound <= 0.01
    assert GROWN.certificate(0.07, 0.95).tally == HELD[2]


def test_a_promise_that_the_rows_cannot_prove():
    with pytest.raises(Unsupported, match=r"0\.001 of the served .* 2995 served without an error"):
        GROWN.certificate(0.001, 0.95)
    with pytest.raises(Unsupported, match="no rows are usable"):
        Stratum(0, SCORE, (), (), 0, 0).certificate(0.01, 0.95)
    with pytest.raises(Unsupported, match="cannot prove"):
        CALIBRATION.rules(0.0001, 0.95)


def test_what_one_size_proves_says_nothing_of_another():
    young, grown = CALIBRATION.rules(0.01, 0.95)
    assert (young.entries, young.threshold) == (0, math.inf)
    assert (grown.entries, grown.threshold) == (30, 2.0)
    refused, certificate = CALIBRATION.certificates(0.01, 0.95)
    assert isinstance(refused, Unsupported)
    assert certificate == GROWN.certificate(0.01, 0.95)  # the young one's doubt would be spent in vain


def test_sizes_that_promise_something_share_the_doubt():
    growing = Stratum(10, SCORE, FITTED, HELD, fitted_rows=1000, held_rows=2000)
    strata = Calibration("encoder@1", (YOUNG, growing, GROWN)).certificates(0.01, 0.95)
    assert isinstance(strata[0], Unsupported)
    assert strata[1:] == [growing.certificate(0.01, 0.99), GROWN.certificate(0.01, 0.96)]
    hopeless = Calibration("encoder@1", (YOUNG, YOUNG)).certificates(0.01, 0.95)
    assert all(isinstance(each, Unsupported) for each in hopeless)


def test_json_there_and_back():
    assert Calibration.from_text(CALIBRATION.to_text()) == CALIBRATION


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"held": [[3.0, 5, 9], [2.0, 1200, 3], [1.0, 1800, 90]]}, "more rows are wrong than served"),
        ({"held_rows": 10}, "or served than counted"),
        ({"held": [[1.0, 610, 0], [2.0, 1200, 3], [3.0, 1800, 90]]}, "from strict to loose"),
        ({"held": [[3.0, 610]]}, "not enough values|not a calibration"),
        ({"score": {}}, "not a score"),
        ({"entries": 0}, "partition sizes are not ascending"),
    ],
)
def test_what_is_no_calibration(change, message):
    content = json.loads(CALIBRATION.to_text())
    content["strata"][1] |= change
    with pytest.raises(ValueError, match=message):
        Calibration.from_text(json.dumps(content))


def test_a_judge_is_part_of_the_calibration():
    judged = Calibration("encoder@1", (replace(GROWN, judge_threshold=0.7),), "judge@1")
    assert Calibration.from_text(judged.to_text()) == judged
    [rule] = judged.rules(0.01, 0.95)
    assert rule.judge_threshold == 0.7
    assert json.loads(judged.to_text())["format"] != json.loads(CALIBRATION.to_text())["format"]


@pytest.mark.parametrize("change", [{"judge": ""}, {"judge": None}])
def test_a_judge_without_a_name(change):
    judged = Calibration("encoder@1", (replace(GROWN, judge_threshold=0.7),), "judge@1")
    content = json.loads(judged.to_text()) | change
    if content["judge"] is None:
        del content["judge"]
    with pytest.raises(ValueError, match="not a calibration"):
        Calibration.from_text(json.dumps(content))


@pytest.mark.parametrize("threshold", [None, "x", math.inf])
def test_thresholds_of_a_judge_that_are_none(threshold):
    content = json.loads(
        Calibration("encoder@1", (replace(GROWN, judge_threshold=0.7),), "judge@1").to_text()
    )
    content["strata"][0]["judge_threshold"] = threshold
    with pytest.raises(ValueError, match=r"not a calibration|could not convert"):
        Calibration.from_text(json.dumps(content))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "headrace semantic calibration 2"}'])
def test_texts_that_are_no_calibration(text):
    with pytest.raises(ValueError, match=r"Expecting|not a calibration"):
        Calibration.from_text(text)
