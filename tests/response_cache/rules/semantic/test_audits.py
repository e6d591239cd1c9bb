"""Bets against a promise: fair while it is kept, quick when it is broken, and each for one alone."""

from __future__ import annotations

import random
from copy import deepcopy

import pytest

from headrace.response_cache.rules.semantic.audits import AuditBound, Audits


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
