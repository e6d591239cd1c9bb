"""The sampling error of a share, against shares whose error is known."""

from __future__ import annotations

import math
import random

import pytest

from headrace.lab.plan.search import BATCHES, CELL, error_bound, simulated_replicas


def test_small_fleets_are_simulated_whole() -> None:
    assert [simulated_replicas(each) for each in (1, CELL, CELL + 1, 10_000)] == [1, CELL, CELL, CELL]


def test_the_interval_has_the_true_share_as_often_as_it_says() -> None:
    rng = random.Random(1)
    inside = 0
    for _ in range(400):
        met = [rng.random() < 0.9 for _ in range(500)]
        inside += abs(sum(met) / len(met) - 0.9) <= error_bound(met)
    assert 0.92 <= inside / 400 <= 0.98, "95 % of the intervals"


def test_dependent_requests_have_a_wider_interval() -> None:
    rng = random.Random(2)
    alone = [rng.random() < 0.5 for _ in range(1000)]
    runs = [met for met in (rng.random() < 0.5 for _ in range(10)) for _ in range(100)]
    assert error_bound(runs) > 3 * error_bound(alone)


@pytest.mark.parametrize("met", [[], [True] * (BATCHES - 1)])
def test_too_few_requests_have_no_bound(met: list[bool]) -> None:
    assert math.isinf(error_bound(met))


def test_no_difference_is_no_error() -> None:
    assert error_bound([True] * 1000) == 0.0
