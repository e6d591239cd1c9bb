from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace

import pytest

from headrace.response_cache.rules.calibration import (
    Calibration,
    LabelledDecision,
    Standing,
    Stratum,
    Tally,
    Unsupported,
    beta_cdf,
    certified_threshold,
    is_promising,
    promising_starts,
    served_to_prove,
    tenant_rules,
    upper_error,
)
from headrace.response_cache.rules.judge import Curve, Score


@pytest.mark.parametrize(
    ("x", "a", "b", "value"),
    [
        (0.3, 1, 1, 0.3),  # uniform
        (0.5, 2, 2, 0.5),  # symmetric
        (0.2, 1, 5, 1 - 0.8**5),
        (0.9, 7, 1, 0.9**7),
        (0.4, 3, 4, sum(math.comb(6, k) * 0.4**k * 0.6 ** (6 - k) for k in range(3, 7))),
        (0.01, 11, 1990, sum(math.comb(2000, k) * 0.01**k * 0.99 ** (2000 - k) for k in range(11, 200))),
        (0.0, 2, 3, 0.0),
        (1.0, 2, 3, 1.0),
    ],
)
def test_the_incomplete_beta_function(x, a, b, value):
    assert beta_cdf(x, a, b) == pytest.approx(value, rel=1e-9, abs=1e-12)


def test_clopper_and_pearson_by_hand():
    assert upper_error(0, 299, 0.95) == pytest.approx(1 - 0.05 ** (1 / 299))  # the rule of three
    assert upper_error(0, 299, 0.95) < 0.01 < upper_error(0, 298, 0.95)
    # The rate at which one or none of ten is seen five times in a hundred: (1-p)^10 + 10 p (1-p)^9 = 0.05.
    rate = upper_error(1, 10, 0.95)
    assert (1 - rate) ** 10 + 10 * rate * (1 - rate) ** 9 == pytest.approx(0.05, abs=1e-9)
    assert rate == pytest.approx(0.3942, abs=1e-4)
    assert upper_error(5, 100, 0.95) == pytest.approx(0.1023, abs=1e-4)  # published tables
    assert upper_error(0, 0, 0.95) == 1.0
    assert upper_error(7, 7, 0.95) == 1.0


def test_counts_that_cannot_be():
    with pytest.raises(ValueError, match="3 wrong of 2"):
        upper_error(3, 2, 0.95)


def test_the_loosest_threshold_that_the_data_support():
    tallies = [Tally(0.9, 500, 0), Tally(0.8, 1000, 2), Tally(0.7, 1500, 12), Tally(0.6, 2000, 60)]
    found = certified_threshold(tallies, [0], 0.01, 0.95)
    assert found is not None
    assert found.tally.threshold == 0.8
    assert found.bound == upper_error(2, 1000, 0.95) < 0.01


def test_nothing_behind_a_failure_is_tested_from_the_same_start():
    tallies = [Tally(0.9, 500, 0), Tally(0.8, 600, 60), Tally(0.7, 5000, 1)]
    found = certified_threshold(tallies, [0], 0.01, 0.95)
    assert found is not None
    assert found.tally.threshold == 0.9
    found = certified_threshold(tallies, [0, 2], 0.01, 0.95)
    assert found is not None
    assert found.tally.threshold == 0.7
    assert certified_threshold([Tally(0.9, 20, 0), Tally(0.8, 2000, 1)], [0], 0.01, 0.95) is None


def test_starts_share_the_doubt():
    assert certified_threshold([Tally(0.9, 310, 0)], [0], 0.01, 0.95) is not None
    assert certified_threshold([Tally(0.9, 310, 0), Tally(0.8, 0, 0)], [0, 1], 0.01, 0.95) is None
    assert certified_threshold([Tally(0.9, 368, 0), Tally(0.8, 0, 0)], [0, 1], 0.01, 0.95) is not None


def test_a_sequence_of_tests_that_reaches_the_next_start_adds_its_level():
    strict, loose = (
        Tally(0.9, 400, 0),
        Tally(0.8, 730, 2),
    )  # one alone would leave a doubt of 0.018 and of 0.023
    assert certified_threshold([strict], [0], 0.01, 0.98) is not None
    assert certified_threshold([loose], [0], 0.01, 0.98) is None
    both = certified_threshold([strict, loose], [0, 1], 0.01, 0.96)
    assert both is not None
    assert both.tally == loose
    assert both.bound == upper_error(2, 730, 0.96)


def test_doubt_is_spent_where_a_threshold_fails():
    tallies = [Tally(0.9, 400, 0), Tally(0.85, 401, 9), Tally(0.8, 730, 2)]
    found = certified_threshold(tallies, [0, 2], 0.01, 0.96)
    assert found is not None
    assert found.tally == tallies[0]


def test_it_begins_where_most_can_be_proved_and_where_half_as_much_is_served():
    other_half = [Tally(0.95, 10, 0), Tally(0.9, 520, 0), Tally(0.8, 1000, 1), Tally(0.7, 1500, 30)]
    assert promising_starts(other_half, 0.01, growth=1.0) == [1, 2]
    assert promising_starts([Tally(0.9, 0, 0), Tally(0.8, 3, 3)], 0.01, growth=2.0) == [0]


def test_what_promises_something():
    assert not is_promising([], 0.01, 0.95, growth=2.0)
    assert not is_promising([Tally(0.9, 20, 0), Tally(0.8, 300, 9)], 0.01, 0.95, growth=2.0)
    assert is_promising([Tally(0.9, 150, 0), Tally(0.8, 300, 9)], 0.01, 0.95, growth=2.0)
    assert not is_promising([Tally(0.9, 149, 0), Tally(0.8, 300, 9)], 0.01, 0.95, growth=2.0)


def test_too_few_answers_certify_nothing():
    assert served_to_prove(0.01, 0.95) == 299
    assert certified_threshold([Tally(0.5, 298, 0)], [0], 0.01, 0.95) is None
    assert certified_threshold([Tally(0.5, 299, 0)], [0], 0.01, 0.95) is not None
    assert certified_threshold([], [], 0.01, 0.95) is None


@pytest.mark.parametrize("max_error", [0.02, 0.05])
def test_the_promise_holds_on_exchangeable_data(max_error):
    """Of 200 data sets at most one in twenty may certify a threshold whose true error is above the promise."""
    draw = random.Random(7)
    thresholds = [0.8, 0.7, 0.6, 0.55, 0.5, 0.45, 0.4, 0.3]

    def error_at(score: float) -> float:
        return 0.6 * (1.0 - score) ** 3

    def true_error(threshold: float) -> float:
        points = [threshold + (1 - threshold) * (i + 0.5) / 500 for i in range(500)]
        return sum(map(error_at, points)) / 500

    def sample() -> list[Tally]:
        counts = [[0, 0] for _ in thresholds]
        for _ in range(1500):
            score = draw.random()
            if score >= thresholds[-1]:
                passed = next(index for index, threshold in enumerate(thresholds) if score >= threshold)
                counts[passed][0] += 1
                counts[passed][1] += draw.random() < error_at(score)
        served, wrong = (list(itertools.accumulate(column)) for column in zip(*counts, strict=True))
        return [Tally(*row) for row in zip(thresholds, served, wrong, strict=True)]

    broken = certified = 0
    for _ in range(200):
        starts = promising_starts(sample(), max_error, growth=1.0)
        found = certified_threshold(sample(), starts, max_error, 0.95)
        certified += found is not None
        broken += found is not None and true_error(found.tally.threshold) > max_error
    assert certified > 100, "the test must be able to fail"
    assert broken <= 10


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


COSINE = Score(0.0, (("cosine", Curve((0.0, 1.0), (0.0, 1.0))),))
COUNTED = (Tally(0.9, 400, 0), Tally(0.8, 800, 0), Tally(0.7, 1200, 90))
COMMON = Calibration(
    "words@1",
    (
        Stratum(0, COSINE, (Tally(0.9, 5, 2),), (Tally(0.9, 9, 4),), 50, 100),
        Stratum(30, COSINE, COUNTED, COUNTED, 2000, 2000),
    ),
)


def labels(score, right, wrong=0, entries=50, least=0.8):
    made = [LabelledDecision(entries, score, least, True)] * right
    return made + [LabelledDecision(entries, score, least, False)] * wrong


def standing(decisions, tests=1):
    """Of the larger size; the smaller one is never served."""
    small, large = tenant_rules(COMMON, decisions, tests, 0.01, 0.95)
    assert small.rule.threshold == math.inf
    return large.standing, large.rule.threshold


def test_a_tenant_without_enough_labels_has_the_common_certificate():
    assert standing([]) == (Standing.COMMON, 0.8)
    assert standing(labels(0.95, 100)) == (Standing.COMMON, 0.8)
    assert standing(labels(0.95, 2000, entries=10)) == (Standing.COMMON, 0.8)  # of another size


def test_a_tenant_with_enough_labels_has_its_own_certificate_and_it_is_never_looser_than_the_common_one():
    assert standing(labels(0.95, 800)) == (Standing.OWN, 0.8)
    assert standing(labels(0.95, 800) + labels(0.75, 800)) == (Standing.OWN, 0.8)
    assert standing(labels(0.95, 800) + labels(0.85, 300, 20)) == (Standing.OWN, 0.9)


def test_labels_that_contradict_the_common_certificate_switch_a_tenant_off():
    assert standing(labels(0.85, 100, 20)) == (Standing.CONTRADICTED, math.inf)
    assert standing(labels(0.85, 100, 1)) == (Standing.COMMON, 0.8)


def test_labels_count_only_where_all_that_is_served_was_recorded():
    """What was recorded from 0.9 on says nothing about what is served from 0.8 on."""
    assert standing(labels(0.95, 2000, least=0.9)) == (Standing.OWN, 0.9)


def test_each_further_import_has_less_of_the_allowed_doubt():
    enough = [standing(labels(0.95, 560), tests)[0] for tests in (1, 2, 3, 30)]
    assert enough == sorted(enough, key=lambda each: each is not Standing.OWN)
    assert (enough[0], enough[-1]) == (Standing.OWN, Standing.COMMON)


@pytest.mark.parametrize("seed", range(3))
def test_tenants_with_too_many_errors_are_seldom_certified(seed):
    draw = random.Random(seed)
    certified = 0
    for _ in range(60):
        wrong = sum(draw.random() < 0.011 for _ in range(1000))
        certified += standing(labels(0.85, 1000 - wrong, wrong))[0] is Standing.OWN
    assert certified <= 6  # 5 % of 60 are 3


def test_what_rows_claim_of_a_threshold_by_hand():
    stratum = replace(COMMON.strata[1], by_hand=(Tally(0.95, 300, 0), Tally(0.9, 500, 5)))
    made = Calibration.from_text(replace(COMMON, strata=(COMMON.strata[0], stratum)).to_text())
    [claim] = made.claims(0.9, 0.95)
    assert (claim.entries, claim.tally) == (30, Tally(0.9, 500, 5))
    assert claim.bound == upper_error(5, 500, 0.975)  # two thresholds were counted
    assert made.claims(0.92, 0.95) == []
    assert COMMON.claims(0.9, 0.95) == []
