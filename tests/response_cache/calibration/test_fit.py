from __future__ import annotations

import random

import pytest

from headrace.response_cache.calibration.fit import fit_score
from headrace.response_cache.rules.semantic.score import Evidence


def evidence(**parts: float) -> Evidence:
    return Evidence(**{name: parts.get(name, 0.0) for name in Evidence._fields})


def test_it_learns_what_counts_and_how_much() -> None:
    draw = random.Random(5)
    rows = [evidence(cosine=draw.uniform(0.5, 1.0), margin=draw.uniform(-0.2, 0.4)) for _ in range(3000)]
    right = [draw.random() < (0.95 if row.margin > 0.1 else 0.05 + 0.5 * (row.cosine - 0.5)) for row in rows]
    score = fit_score(rows, right)
    assert {name for name, _ in score.curves} <= {"cosine", "margin"}
    assert score(evidence(cosine=0.8, margin=0.3)) > 1.5 > 0 > score(evidence(cosine=0.8, margin=-0.1))


def test_it_never_learns_that_nearer_is_worse() -> None:
    draw = random.Random(6)
    rows = [evidence(cosine=draw.uniform(0.5, 1.0), second=draw.random()) for _ in range(1000)]
    right = [draw.random() < 1.4 - row.cosine for row in rows]  # backwards
    score = fit_score(rows, right)
    assert score(evidence(cosine=1.0, second=0.5)) >= score(evidence(cosine=0.5, second=0.5))


def test_parts_that_are_not_asked_for_do_not_count() -> None:
    draw = random.Random(7)
    rows = [evidence(cosine=draw.random(), margin=draw.random()) for _ in range(500)]
    score = fit_score(rows, [row.margin > 0.5 for row in rows], parts=("cosine",))
    assert all(name == "cosine" for name, _ in score.curves)


def test_one_outcome_alone_teaches_nothing() -> None:
    with pytest.raises(ValueError, match="both right and wrong"):
        fit_score([evidence(cosine=0.5), evidence(cosine=0.6)], [True, True])
