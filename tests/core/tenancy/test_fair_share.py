""""""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.tenancy.fair_share import CREDIT_TOKENS, SWEEP, ShareLedger, fair_shares, jain
from headrace.core.tenancy.tenants import CLASSES, ClassShare, ServiceClass


def test_a_charge_counts_against_tenant_and_class_by_their_weights():
    books = ShareLedger(CLASSES, {"big": 4.0})
    big, small = books.enter("default", "big"), books.enter("default", "small")
    big.charge(400.0)
    small.charge(100.0)
    assert big.virtual == small.virtual == 100.0
    assert big.owner.virtual == 500.0, "alone, a class has all"


def test_classes_that_have_work_share_by_weight():
    books = ShareLedger(CLASSES, {})
    first, last = books.enter("priority", "a"), books.enter("flex", "a")
    first.charge(8.0)
    last.charge(1.0)
    assert first.owner.virtual == pytest.approx(last.owner.virtual)
    books.leave(last)
    before = first.owner.virtual
    first.charge(8.0)
    assert first.owner.virtual - before == pytest.approx(8.0), "flex has gone, all is for the other"


def test_no_class_gets_less_than_its_floor():
    books = ShareLedger((ServiceClass("a", 0, 1000.0), ServiceClass("b", 1, 1.0, floor=0.25)), {})
    a, b = books.enter("a", ""), books.enter("b", "")
    a.charge(75.0)
    b.charge(25.0)
    assert a.owner.virtual == pytest.approx(b.owner.virtual)


def test_shares_of_classes_may_change_while_they_have_work():
    books = ShareLedger((ServiceClass("a", 0, 1.0), ServiceClass("b", 1, 1.0)), {})
    a, b = books.enter("a", ""), books.enter("b", "")
    a.charge(10.0)
    b.charge(10.0)
    assert a.owner.virtual == pytest.approx(b.owner.virtual)
    books.set_class_shares({"a": ClassShare(3.0, 0.0), "b": ClassShare(1.0, 0.1)})
    a.charge(30.0)
    b.charge(10.0)
    assert a.owner.virtual == pytest.approx(b.owner.virtual), "what was served before stays charged"
    books.set_class_shares({"b": ClassShare(1.0, 0.5)})
    a.charge(20.0)
    b.charge(20.0)
    assert a.owner.virtual == pytest.approx(b.owner.virtual)


def test_being_away_saves_up_a_bounded_credit_only():
    books = ShareLedger(CLASSES, {})
    busy, back = books.enter("default", "busy"), books.enter("default", "back")
    busy.charge(1e6)
    books.serve(busy)
    books.lift(back, alone=False)
    assert back.virtual == 1e6 - CREDIT_TOKENS


def test_a_newcomer_stands_where_the_last_one_served_stood():
    books = ShareLedger(CLASSES, {})
    old = books.enter("default", "old")
    old.charge(5000.0)
    books.serve(old)
    assert books.enter("default", "new").virtual == 5000.0


def test_debts_are_kept_and_idle_accounts_are_forgotten():
    books = ShareLedger(CLASSES, {})
    stays = books.enter("default", "stays")
    debtor = books.enter("default", "debtor")
    debtor.charge(100.0)
    books.leave(debtor)
    assert books.enter("default", "debtor") is debtor, "leaving does not wipe the slate"
    for i in range(10 * SWEEP):
        books.leave(books.enter("default", f"t{i}"))
    assert len(stays.owner.tenants) <= 2 * stays.owner.live + SWEEP


def test_an_unknown_class_is_an_error():
    with pytest.raises(KeyError):
        ShareLedger(CLASSES, {}).enter("platinum", "a")


def test_tenants_with_one_request_do_not_grow_the_ledger():
    books = ShareLedger(CLASSES, {})
    always = [books.enter("default", f"always{i}") for i in range(10)]
    owner = always[0].owner
    debtor = books.enter("default", "debtor")
    debtor.charge(1e9)
    books.leave(debtor)
    for i in range(1000):
        account = books.enter("default", f"once{i}")
        books.lift(account, alone=False)
        books.serve(account)
        account.charge(1e4)
        books.leave(account)
        assert len(owner.tenants) <= 2 * owner.live + SWEEP + 1
    assert "debtor" in owner.tenants, "those who owe least are forgiven first"


def test_the_weight_of_a_class_is_that_of_its_tenants_with_requests():
    books = ShareLedger(CLASSES, {"big": 4.0})
    big, small = books.enter("default", "big"), books.enter("default", "small")
    books.enter("default", "big")
    assert big.owner.weight == 5.0
    books.leave(big)
    books.leave(small)
    assert big.owner.weight == 4.0
    books.leave(big)
    assert big.owner.weight == 0.0


def test_the_clock_advances_as_if_all_tenants_with_requests_were_served_equally():
    books = ShareLedger(CLASSES, {"big": 3.0})
    big, small = books.enter("default", "big"), books.enter("default", "small")
    big.charge(300.0)
    small.charge(100.0)
    assert books.enter("default", "new").virtual == 100.0 == small.virtual == big.virtual


def test_a_newcomer_stands_no_further_behind_the_one_served_last_than_a_credit():
    books = ShareLedger(CLASSES, {})
    ahead, behind = books.enter("default", "ahead"), books.enter("default", "behind")
    ahead.charge(1e6)
    books.serve(ahead)
    assert books.enter("default", "first").virtual == 1e6
    behind.charge(5.0)
    books.serve(behind)
    assert books.enter("default", "second").virtual == 5.0 + CREDIT_TOKENS


def test_new_weights_count_from_the_next_charge_on():
    books = ShareLedger(CLASSES, {"a": 1.0})
    a, b = books.enter("default", "a"), books.enter("default", "b")
    a.charge(100.0)
    books.set_weights({"a": 4.0})
    a.charge(400.0)
    b.charge(100.0)
    assert (a.virtual, b.virtual) == (200.0, 100.0)
    assert a.owner.weight == 5.0
    assert books.enter("flex", "a").rate == 0.25
    books.leave(a)
    assert a.owner.weight == 1.0


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
