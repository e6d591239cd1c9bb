"""Bets against a promise: fair while it is kept, quick when it is broken, and each for one alone."""

from __future__ import annotations

import random
from copy import deepcopy

import pytest

from headrace.response_cache.rules.audits import COOL_DOWN, AuditBound, AuditRate, Audits, gist, same_answer


@pytest.mark.parametrize(
    ("one", "other", "cosine", "same"),
    [
        ("Yes.", "yes", None, True),
        ("It takes  two days", "it takes two days!", 0.1, True),
        ("It takes two days.", "Two days are needed.", 0.95, True),
        ("It takes two days.", "Two days are needed.", 0.85, False),
        ("It takes two days.", "It takes three days.", 0.99, False),
        ("You can.", "You can not.", 0.99, False),
        ("A long answer", "Another long answer", None, False),
        ("+", "-", None, False),
        ("", "", None, True),
    ],
)
def test_when_two_answers_say_the_same(one, other, cosine, same):
    assert same_answer(one, other, cosine) is same
    assert same_answer(other, one, cosine) is same


def test_long_answers_are_near_where_short_ones_may_not_be():
    common = "the card is sent by post and comes in a plain envelope with a letter that tells how to use it at home "
    one, other = common * 2 + "within 5 days", common * 2 + "within 6 days"
    assert same_answer(one, other, 0.95)
    assert not same_answer("within 5 days", "within 6 days", 0.95)


def test_a_gist_is_the_beginning():
    assert gist("  One \n two\tthree ") == "One two three"
    assert gist("word " * 500) == " ".join(["word"] * 120)
    assert gist("") == ""


def audit(rate, errors, count, seed=0):
    """Audits of which a share is wrong; the reasons of all changes."""
    rng = random.Random(seed)
    return [why for _ in range(count) if (why := rate.observe(rng.random() < errors))]


def test_errors_near_the_bound_raise_the_rate_up_to_its_limit():
    rate = AuditRate(0.02, 0.02, adapts=True)
    changes = audit(rate, 0.03, 4000)
    assert rate.share == 0.16
    assert len(changes) == 3
    assert "error bound 0.02" in changes[0]
    whole = AuditRate(0.5, 0.02, adapts=True)
    audit(whole, 0.03, 4000)
    assert whole.share == 1.0


def test_few_errors_lower_it_to_half_and_no_further():
    rate = AuditRate(0.02, 0.02, adapts=True)
    audit(rate, 0.0, 2000)
    assert rate.share == 0.01


def test_errors_between_the_bounds_change_little():
    changes = audit(AuditRate(0.02, 0.2, adapts=True), 0.075, 4000)
    assert len(changes) <= 6, "noise of the smoothed errors, damped by hysteresis and cool-down"


def test_it_does_not_change_within_the_cool_down_or_if_it_does_not_adapt():
    rate = AuditRate(0.02, 0.02, adapts=True)
    assert audit(rate, 1.0, COOL_DOWN - 1) == []
    assert len(audit(rate, 1.0, COOL_DOWN)) == 1
    fixed = AuditRate(0.02, 0.02, adapts=False)
    assert audit(fixed, 1.0, 1000) == []
    assert fixed.share == 0.02


@pytest.mark.parametrize("max_error", [0.001, 0.01, 0.2, 0.95])
def test_a_promise_that_is_just_kept_leaves_the_wealth_as_it_is_on_average(max_error):
    draw = random.Random(3)
    bound = AuditBound(max_error, 0.99999)
    for _ in range(200):
        right, wrong = deepcopy(bound), deepcopy(bound)
        right.observe(False)
        wrong.observe(True)
        assert right.wealth < bound.wealth < wrong.wealth
        expected = max_error * wrong.wealth + (1.0 - max_error) * right.wealth
        assert expected == pytest.approx(bound.wealth)
        bound.observe(draw.random() < max_error)


def test_a_kept_promise_is_rarely_refuted_however_often_one_looks():
    draw = random.Random(11)
    alarms = 0
    for _ in range(300):
        bound = AuditBound(0.02, 0.95)
        for _ in range(2000):
            bound.observe(draw.random() < 0.02)
        alarms += bound.violated
    assert 0 < alarms <= 15


@pytest.mark.parametrize("good", [0, 10_000])
def test_a_broken_promise_is_refuted_whatever_was_right_before_and_for_good(good):
    draw = random.Random(13)
    bound = AuditBound(0.01, 0.95)
    for _ in range(good):
        bound.observe(False)
    needed = 0
    while not bound.violated:
        bound.observe(draw.random() < 0.1)
        needed += 1
    assert needed < 300
    for _ in range(5000):
        bound.observe(False)
    assert bound.violated


def test_audits_count_for_their_own_alone():
    audits = Audits(0.01, 0.95, most=10)
    for _ in range(1000):
        assert not audits.observe("b", wrong=False)
    reported = [audits.observe("a", wrong=True) for _ in range(10)]
    assert reported.count(True) == 1, "it is told once"
    assert audits.refuted("a")
    assert not audits.refuted("b")
    assert reported == [audits.observe("c", wrong=True) for _ in range(10)]


def test_a_key_with_errors_is_kept_among_many_others():
    alone = Audits(0.01, 0.95, most=10)
    needed = 1
    while not alone.observe("a", wrong=True):
        needed += 1
    crowded = Audits(0.01, 0.95, most=10)
    for number in range(needed):
        assert not crowded.refuted("a")
        crowded.observe("a", wrong=True)
        for other in range(50):
            crowded.observe((number, other), wrong=False)
    assert crowded.refuted("a")


def test_where_all_are_suspected_the_least_suspected_is_forgotten():
    crowded = Audits(0.1, 0.95, most=2)
    for whose, wrongs in (("much", 2), ("little", 1), ("new", 2)):
        for _ in range(wrongs):
            crowded.observe(whose, wrong=True)
    # At a promise of 0.1 three wrong ones in a row refute: who is still remembered needs one more.
    assert [crowded.observe(whose, wrong=True) for whose in ("much", "new", "little")] == [True, True, False]


def test_there_is_room_for_so_many_and_newcomers_are_watched():
    audits = Audits(0.01, 0.95, most=10)
    for number in range(100):
        while not audits.observe(number, wrong=True):
            assert not audits.refuted(number)
    assert [audits.refuted(number) for number in (0, 89, 90, 99)] == [False, False, True, True]
    for number in range(100, 200):
        audits.observe(number, wrong=False)
    assert len(audits._tests) == len(audits._refuted) == 10
