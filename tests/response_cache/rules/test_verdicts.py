"""The served model's verdicts: remembered by what is said, apart for tenants, and bounded."""

from __future__ import annotations

import pytest

from headrace.response_cache.rules.verdicts import Pair, Verdicts, pair_key


def pair(
    asked: str, cached: str = "how do I reset my pin", tenant: str = "t", partition: bytes = b"p"
) -> Pair:
    return Pair(tenant, partition, asked, cached)


def test_a_new_pair_waits_and_is_asked_about_once():
    verdicts = Verdicts()
    new = pair("how do I get a new pin")
    assert verdicts.of(new) is None
    assert verdicts.of(new) is None
    assert verdicts.waiting == 1
    assert verdicts.next() == new
    assert verdicts.next() is None
    verdicts.settle(new, same=True)
    assert verdicts.of(new) is True
    verdicts.settle(new, same=False)
    assert verdicts.of(new) is False
    assert len(verdicts) == 1
    assert verdicts.waiting == 0


def test_a_verdict_holds_for_what_says_the_same():
    verdicts = Verdicts()
    verdicts.settle(pair("how do I get 2 new pins"), same=True)
    assert verdicts.of(pair("Please, how do I get two new pins?")) is True
    assert verdicts.of(Pair("t", b"p", "how do I reset my pin", "how do I get two new pins")) is True
    assert verdicts.of(pair("how do I get 3 new pins")) is None


def test_what_says_the_same_needs_no_verdict():
    verdicts = Verdicts()
    assert verdicts.of(pair("Hi! How do I reset my PIN?")) is True
    assert verdicts.waiting == 0
    assert pair_key(pair("mix 3 eggs with 2 apples", "mix 2 eggs with 3 apples")) is not None


@pytest.mark.parametrize("other", [{"tenant": "u"}, {"partition": b"q"}])
def test_verdicts_of_others_do_not_count(other):
    verdicts = Verdicts()
    verdicts.settle(pair("how do I get a new pin"), same=True)
    assert verdicts.of(pair("how do I get a new pin", **other)) is None


def test_memory_is_bounded_and_the_tenant_with_the_most_loses_its_oldest():
    verdicts = Verdicts(most=10, most_waiting=10)
    verdicts.settle(pair("rare question", tenant="small"), same=True)
    verdicts.of(pair("rare matter", tenant="small"))
    for number in range(100):
        verdicts.settle(pair(f"question {number}"), same=True)
        verdicts.of(pair(f"matter {number}"))
    assert len(verdicts) == 10
    assert verdicts.waiting == 10
    assert verdicts.of(pair("rare question", tenant="small")) is True
    assert verdicts.of(pair("question 99")) is True
    taken = [verdicts.next() for _ in range(10)]
    assert taken[0] is not None
    assert [each.tenant for each in taken if each][:2] == ["small", "t"]  # in turn
    assert verdicts.next() is None
