"""What is recorded for people to label, and what their labels change."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.response_cache.rules.calibration import Calibration, Standing, Stratum, Tally
from headrace.response_cache.rules.judge import Decline, Doubt, Neighbour, Serve
from headrace.response_cache.semantic.pair_book import Basis, LabelFile, PairBook
from tests.response_cache.semantic.scenes import COSINE

COUNTED = (Tally(0.9, 400, 0), Tally(0.8, 800, 0))
CALIBRATION = Calibration("words@1", (Stratum(0, COSINE, COUNTED, COUNTED, 2000, 2000),))
BASIS = Basis("words@1", CALIBRATION, None, 0.01)
BY_HAND = BASIS._replace(cosine=0.85)


def near(text: str, cosine: float = 0.9) -> Neighbour:
    return Neighbour(1, cosine, 1, text)


def record(book: PairBook, asked: str, tenant: str = "t", cosine: float = 0.9) -> None:
    found = near("shoes red", cosine)
    verdict = book.judge(tenant).decide(asked, [found], 50)
    book.record(tenant, b"p", asked, [found], 50, verdict)


def filled(book: PairBook, count: int, tenant: str = "t") -> None:
    for number in range(count):
        found = near(f"shoes {number} red")
        book.record(tenant, b"p", f"nice shoes {number} red", [found], 50, Serve(found, 0.9))


def test_pairs_that_are_served_and_that_a_guard_keeps_apart_are_recorded_once():
    book = PairBook(BASIS, None)
    for asked in ("shoes red nice", "shoes not red", "shoes red nice"):
        record(book, asked)
    record(book, "shoes red good", cosine=0.75)  # its score is too low
    record(book, "shoes not red", "far", cosine=0.5)
    book.record("t", b"p", "x", [near("y")], 50, Decline(Doubt.JUDGE_REFUSED, near("y"), 0.95))
    seen = {(each.tenant, each.asked): (each.verdict, each.score) for each in book.export()}
    assert seen == {
        ("t", "shoes not red"): ("negation", None),
        ("t", "shoes red nice"): ("serve", 0.9),
        ("t", "x"): ("judge_refused", 0.95),
    }
    assert book.export("another") == []


def test_labels_give_a_tenant_its_own_certificate_also_after_a_restart(tmp_path):
    file = tmp_path / "labels"
    book = PairBook(BASIS, LabelFile(file, BASIS.name), most=3000)
    filled(book, 800)
    filled(book, 60, "bad")
    filled(book, 5, "few")
    assert book.certificate("t", 50) == book.certificate("bad", 50) == "common"
    labelled = [(each, each.tenant != "bad" or n % 2 == 0) for n, each in enumerate(book.export())]
    assert book.label(labelled) == {"stored": 865, "others": 0}
    for again in (book, PairBook(BASIS, LabelFile(file, BASIS.name))):
        assert {name: again.certificate(name, 50) for name in ("t", "bad", "few", "unknown")} == {
            "t": Standing.OWN,
            "bad": Standing.CONTRADICTED,
            "few": Standing.COMMON,
            "unknown": Standing.COMMON,
        }
        assert isinstance(again.judge("t").decide("shoes red nice", [near("shoes red")], 50), Serve)
        assert isinstance(again.judge("bad").decide("shoes red nice", [near("shoes red")], 50), Decline)
        state = again.state()
        assert state["tenants"]["bad"]["sizes"][0]["threshold"] is None
        assert state["threshold"]["sizes"][0]["threshold"] == 0.8
        assert list(again.state("t")["tenants"]) == ["t"]
        again.close()
    other = replace(CALIBRATION, strata=(replace(CALIBRATION.strata[0], held_rows=3000),))
    basis = BASIS._replace(calibration=other)
    fresh = PairBook(basis, LabelFile(file, basis.name))
    assert fresh.state()["tenants"] == {}, "labels hold for one calibration"
    fresh.close()


def test_a_threshold_by_hand_says_what_labels_show_or_that_nothing_is_known(tmp_path):
    unknown = PairBook(BY_HAND._replace(calibration=None), None)
    assert "no error bound" in unknown.lines()[0]
    assert "no labels show" in unknown.lines()[1]
    assert unknown.state()["threshold"]["claims"] == []
    stratum = replace(CALIBRATION.strata[0], by_hand=(Tally(0.85, 500, 5),))
    known = BY_HAND._replace(calibration=replace(CALIBRATION, strata=(stratum,)))
    book = PairBook(known, LabelFile(tmp_path / "labels", known.name))
    assert "5 were wrong: at most 2.09%" in book.lines()[1]
    assert book.state()["threshold"]["claims"] == [
        {"entries": 0, "served": 500, "wrong": 5, "bound": pytest.approx(0.0209, abs=1e-4)}
    ]
    assert isinstance(book.judge("t").decide("shoes red nice", [near("shoes red", 0.86)], 5), Serve)
    assert isinstance(book.judge("t").decide("shoes red nice", [near("shoes red", 0.84)], 5), Decline)
    assert isinstance(book.judge("t").decide("shoes not red", [near("shoes red", 0.99)], 5), Decline)
    filled(book, 100)
    book.label([(each, True) for each in book.export()])
    assert book.certificate("t", 50) == "by_hand"
    shown = book.state()["tenants"]["t"]
    assert (shown["served"], shown["wrong"]) == (100, 0)
    assert 0.029 < shown["bound"] < 0.04
    book.close()
