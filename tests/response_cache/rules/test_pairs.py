"""Lines of pairs: what is exported can be imported, and everything else is refused by name."""

from __future__ import annotations

import json

import pytest

from headrace.response_cache.rules.pairs import (
    BadLine,
    Pair,
    SeenPair,
    Verdicts,
    pair_id,
    pair_key,
    read_pair,
)

PAIR = SeenPair("i", "t", "red shoes", "shoes, red", 0.9, "serve", 5, 1.5, 1.0, "b")


def line(**changes):
    return json.dumps({**PAIR.to_json(), "label": "same", **changes})


def test_what_is_exported_can_be_labelled_and_read():
    assert read_pair(line()) == (PAIR, True)
    assert read_pair(line(label="different")) == (PAIR, False)
    assert read_pair(json.dumps(PAIR.to_json())) is None


def test_a_pair_has_one_id_for_each_tenant_and_partition():
    ids = {pair_id(tenant, part, "a", "b") for tenant in ("t", "u") for part in (b"p", b"q")}
    assert len(ids | {pair_id("t", b"p", "b", "a")}) == 5


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        ("{", "not JSON"),
        ("[1]", "expected an object"),
        (line(label="yes"), "label: expected same or different"),
        (line(label=["same"]), "label: expected same or different"),
        (line(more=1), "more: unknown field"),
        (json.dumps({"label": "same"}), "asked: missing"),
        (line(tenant=3), "tenant: expected text"),
        (line(entries=-1), "entries: "),
        (line(entries=True), "entries: "),
        (line(least=float("nan")), "least: expected a finite number"),
        (line(similarity="0.9"), "similarity: "),
        (line(score="1"), "score: "),
        (line(score=None), "score: "),
        (line(score=0.5), "score: "),
    ],
)
def test_a_line_that_is_no_labelled_pair_is_refused_by_its_field(raw, why):
    with pytest.raises(BadLine, match=why):
        read_pair(raw)


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
