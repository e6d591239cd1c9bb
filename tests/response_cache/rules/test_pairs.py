"""Lines of pairs: what is exported can be imported, and everything else is refused by name."""

from __future__ import annotations

import json

import pytest

from headrace.response_cache.rules.pairs import BadLine, SeenPair, pair_id, read_pair

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
