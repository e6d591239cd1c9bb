from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.tenancy.fairness_index import fair_shares, jain


@pytest.mark.parametrize(
    ("values", "index"),
    [([3.0, 3.0, 3.0], 1.0), ([1.0, 0.0, 0.0, 0.0], 0.25), ([], 1.0), ([0.0, 0.0], 1.0), ([2.0, 1.0], 0.9)],
)
def test_jain(values: list[float], index: float) -> None:
    assert jain(values) == pytest.approx(index)


def test_small_demands_are_met_and_the_rest_is_shared() -> None:
    assert fair_shares({"a": 10.0, "b": 100.0, "c": 100.0}, {"a": 1.0, "b": 1.0, "c": 1.0}, 90.0) == {
        "a": 10.0,
        "b": 40.0,
        "c": 40.0,
    }


def test_weights_divide_what_is_scarce() -> None:
    shares = fair_shares({"a": 100.0, "b": 100.0}, {"a": 3.0, "b": 1.0}, 80.0)
    assert shares == pytest.approx({"a": 60.0, "b": 20.0})


AMOUNTS = st.lists(st.tuples(st.floats(0.0, 1e6), st.floats(0.01, 100.0)), min_size=1, max_size=8)


@given(AMOUNTS, st.floats(0.0, 1e6))
def test_shares_are_max_min(given_: list[tuple[float, float]], capacity: float) -> None:
    demands = {str(i): demand for i, (demand, _) in enumerate(given_)}
    weights = {str(i): weight for i, (_, weight) in enumerate(given_)}
    shares = fair_shares(demands, weights, capacity)
    slack = 1e-6 * max(1.0, capacity)
    total = math.fsum(shares.values())
    assert total == pytest.approx(min(capacity, math.fsum(demands.values())), abs=slack)
    held_back = [name for name in demands if shares[name] < demands[name] - slack]
    for name in held_back:  # nobody has more per weight than one who wants more
        level = shares[name] / weights[name]
        assert all(shares[other] / weights[other] <= level + slack / weights[other] for other in demands)
