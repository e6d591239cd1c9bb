"""Each check fails for a policy that breaks its rule, and says which."""

from __future__ import annotations

import math
import random

import pytest

from headrace.core.memory.eviction import LeastRecentlyUsed
from headrace.core.queueing.order import FirstComeFirstServed
from headrace.core.scheduler.admission import Continuous
from headrace.core.scheduler.victims import LastRanked
from headrace.testing import check_admission, check_eviction, check_order, check_victims


class SameRank:
    def rank(self, request, number):
        return (1.0,)


class LatestFirst:
    def rank(self, request, number):
        return (-number, number)


class RandomOrder:
    def rank(self, request, number):
        return (random.random(), number)


class AdmitsTooMany(Continuous):
    def admit(self, queue, now):
        return queue.waiting + 1


class NeverReady(Continuous):
    def admit(self, queue, now):
        return 0


class FirstCandidate:
    def choose(self, candidates, now):
        return candidates[0]


class Stranger:
    def choose(self, candidates, now):
        return None


class NotANumber:
    def priority(self, block):
        return math.nan


class RandomPriority:
    def priority(self, block):
        return random.random()


def test_good_policies_pass():
    check_order(FirstComeFirstServed)
    check_admission(Continuous)
    check_victims(LastRanked)
    check_eviction(LeastRecentlyUsed)


@pytest.mark.parametrize(
    ("check", "policy", "error", "reported"),
    [
        (check_order, SameRank, ValueError, r"\(1.0,\) is not a tuple of numbers that ends in 0"),
        (check_order, LatestFirst, AssertionError, "ranks of equal requests, by arrival"),
        (check_order, RandomOrder, AssertionError, "gives the same requests other ranks"),
        (check_admission, AdmitsTooMany, AssertionError, "2 admitted of 1 waiting requests"),
        (check_admission, NeverReady, AssertionError, "no request is admitted at 0.0"),
        (check_victims, FirstCandidate, AssertionError, "the first of several candidates must make progress"),
        (check_victims, Stranger, AssertionError, "None is not one of the candidates"),
        (check_eviction, NotANumber, AssertionError, "the priority is NaN"),
        (check_eviction, RandomPriority, AssertionError, "another priority in a second call"),
    ],
)
def test_bad_policies_fail(check, policy, error, reported):
    with pytest.raises(error, match=reported):
        check(policy)
