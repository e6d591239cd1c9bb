from __future__ import annotations

import pytest

from headrace.core.classes import CLASSES, ServiceClass
from headrace.core.scheduler.share import CREDIT_TOKENS, SWEEP, Books


def test_a_charge_counts_against_tenant_and_class_by_their_weights():
    books = Books(CLASSES, {"big": 4.0})
    big, small = books.enter("default", "big"), books.enter("default", "small")
    big.charge(400.0)
    small.charge(100.0)
    assert big.virtual == small.virtual == 100.0
    assert big.owner.virtual == 500.0, "alone, a class has all"


def test_classes_that_have_work_share_by_weight():
    books = Books(CLASSES, {})
    first, last = books.enter("priority", "a"), books.enter("flex", "a")
    first.charge(8.0)
    last.charge(1.0)
    assert first.owner.virtual == pytest.approx(last.owner.virtual)
    books.leave(last)
    before = first.owner.virtual
    first.charge(8.0)
    assert first.owner.virtual - before == pytest.approx(8.0), "flex has gone, all is for the other"


def test_no_class_gets_less_than_its_floor():
    books = Books((ServiceClass("a", 0, 1000.0), ServiceClass("b", 1, 1.0, floor=0.25)), {})
    a, b = books.enter("a", ""), books.enter("b", "")
    a.charge(75.0)
    b.charge(25.0)
    assert a.owner.virtual == pytest.approx(b.owner.virtual)


def test_being_away_saves_up_a_bounded_credit_only():
    books = Books(CLASSES, {})
    busy, back = books.enter("default", "busy"), books.enter("default", "back")
    busy.charge(1e6)
    books.serve(busy)
    books.lift(back, alone=False)
    assert back.virtual == 1e6 - CREDIT_TOKENS


def test_a_newcomer_stands_where_the_last_one_served_stood():
    books = Books(CLASSES, {})
    old = books.enter("default", "old")
    old.charge(5000.0)
    books.serve(old)
    assert books.enter("default", "new").virtual == 5000.0


def test_debts_are_kept_and_idle_accounts_are_forgotten():
    books = Books(CLASSES, {})
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
        Books(CLASSES, {}).enter("platinum", "a")
