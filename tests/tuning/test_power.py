import math
import random
from dataclasses import replace

import pytest

from headrace.tuning.evidence import Evidence, units
from headrace.tuning.spec import POWER, Spec, forecast, smallest_change, to_json, units_for

UNITS = units(0.5)
BY_TIME = Spec("x", 1, 2, "itl_p99_seconds", max_seconds=7000.0)
BY_REQUEST = Spec("x", 1, 2, "e2e_mean_seconds", unit="request")
SHARES = Spec("x", 1, 2, "cached_share", unit="request")


@pytest.mark.parametrize("spec", [BY_TIME, BY_REQUEST, SHARES])
def test_the_number_that_finds_a_change_and_the_change_that_it_finds_agree(spec):
    needed = units_for(0.05, 0.3, spec)
    assert smallest_change(needed, 0.3, spec) <= 0.05 < smallest_change(needed - 1, 0.3, spec)
    assert units_for(0.05, 0.6, spec) > needed
    assert smallest_change(3, 0.3, spec) is None
    assert units_for(1e-6, 10.0, spec) is None
    assert smallest_change(8, math.inf, spec) is None, "a report is JSON, which has no infinity"


def test_a_change_is_found_as_often_as_announced():
    rng, needed = random.Random(1), units_for(0.1, 1.0, SHARES)
    found = 0
    for _ in range(100):
        mean = Evidence(UNITS)
        for count in range(1, needed + 1):
            mean.add(rng.gauss(0.1, 1.0))
            if count >= UNITS.least and count % 25 == 0 and mean.e_value >= 20.0:
                found += 1
                break
    assert found / 100 >= POWER - 0.08


def test_unequal_arms_need_more_units():
    unequal = replace(BY_REQUEST, share=0.1)
    assert units_for(0.05, 0.3, unequal) / units_for(0.05, 0.3, BY_REQUEST) == pytest.approx(
        1 / 0.36, rel=0.2
    )
    assert smallest_change(400, 0.3, unequal) is None, "the smaller arm has 40 units"


def test_the_forecast_has_times():
    by_pair = {each.change: each for each in forecast(BY_TIME, 0.07)}
    assert by_pair[0.05].seconds == by_pair[0.05].needed * 70.0
    assert by_pair[0.2].needed < by_pair[0.05].needed
    assert all(each.seconds is None for each in forecast(BY_REQUEST, 0.5))
    reported = to_json(BY_REQUEST, 0.5, 10.0)
    assert reported["most"] == 72_000
    assert reported["changes"][2]["seconds"] == pytest.approx(reported["changes"][2]["needed"] / 10.0)
