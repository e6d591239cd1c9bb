"""Replicas in reserve, against a simulation of losses."""

from __future__ import annotations

import random

import pytest

from headrace.lab.plan.search import CONFIDENCE, ON_DEMAND, Supply


def test_machines_that_never_fail_need_no_reserve() -> None:
    assert [ON_DEMAND.replicas(each) for each in (1, 10_000)] == [1, 10_000]
    assert ON_DEMAND.price == 1.0
    assert ON_DEMAND.away(1000) == 0.0


def test_the_price_is_the_mean_of_both_kinds() -> None:
    assert Supply(spot_share=0.5, spot_price=0.4).price == pytest.approx(0.7)
    assert Supply(spot_share=1.0, spot_price=0.25).price == pytest.approx(0.25)


@pytest.mark.parametrize("needed", [2, 40, 2000])
def test_enough_replicas_are_there_at_almost_all_moments(needed: int) -> None:
    supply = Supply(spot_share=0.5, spot_interruptions=0.2, failures=0.05, recovery_seconds=600.0)
    total = supply.replicas(needed)
    away = supply.away(total) / total
    rng = random.Random(needed)
    moments = 400
    short = sum(sum(rng.random() >= away for _ in range(total)) < needed for _ in range(moments))
    assert short / moments <= 1 - CONFIDENCE + 0.01
    assert needed < total < 1.2 * needed + 4, "the reserve is small for many replicas"


def test_more_losses_need_more_replicas() -> None:
    totals = [
        Supply(failures=each, recovery_seconds=300.0).replicas(100) for each in (0.0, 0.01, 0.1, 1.0, 10.0)
    ]
    assert totals == sorted(set(totals))


def test_slow_recovery_keeps_most_replicas_away() -> None:
    supply = Supply(failures=12.0, recovery_seconds=300.0)
    assert supply.away(100) == pytest.approx(50.0), (
        "lost on average once in the time that it takes to come back"
    )
    assert supply.replicas(100) > 200
