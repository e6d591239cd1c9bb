"""Calibrations of drawn traffic: they keep their promise on what they have not seen, or are refused."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from zlib import crc32

import numpy as np
import pytest

from headrace.response_cache.rules.calibration import Unsupported
from headrace.response_cache.rules.judge import Evidence, Judge
from headrace.response_cache.semantic.calibrate import (
    PAIR_EVIDENCE,
    PlayedStream,
    Question,
    Stream,
    calibrate,
    decide_pairs,
    embed_stream,
    fit_score,
    plot_calibration,
)
from tests.response_cache.semantic.synthetic import Likeness, Traffic, unlike


@pytest.mark.parametrize("seed", range(2))
def test_a_streams_promise_holds_on_the_other_half(seed):
    traffic = Traffic(2000, seed)
    first, second = traffic.stream.halves()
    judge = Judge(calibrate(first, traffic.embed, "drawn", seed).rules(0.05, 0.95))
    decisions = PlayedStream(embed_stream(second, traffic.embed)).play(judge.passes)
    served = [each for each in decisions if each.served]
    assert len(served) > 0.2 * len(decisions), "the test must be able to fail"
    assert sum(not each.right for each in served) <= 0.05 * len(served)


def test_a_small_cache_is_not_trusted_because_a_grown_one_is_right():
    """Among few entries the right neighbour is mostly missing, and the nearest is wrong."""
    traffic = Traffic(1600, seed=5, alike=2.0)
    first, second = traffic.stream.halves()
    rules = calibrate(first, traffic.embed, "drawn").rules(0.05, 0.95)
    assert [rule.entries for rule in rules] == [0, 30, 300]
    proved = next(rule for rule in rules if rule.threshold < math.inf)
    assert proved.entries > 0
    rows = embed_stream(second, traffic.embed)

    def in_small_caches(judge: Judge) -> list[bool]:
        pieces = [PlayedStream(rows.part(start, start + 20)) for start in range(0, 800, 20)]
        return [each.right for piece in pieces for each in piece.play(judge.passes) if each.served]

    assert in_small_caches(Judge(rules)) == []
    naive = in_small_caches(Judge([proved._replace(entries=0)]))
    assert naive.count(False) > 0.05 * len(naive), "the test must be able to fail"


@pytest.mark.parametrize("seed", range(2))
def test_the_promise_of_pairs_holds_on_others(seed):
    drawn, others = Likeness(3000, seed), Likeness(3000, seed + 100)
    calibration = calibrate(drawn.pairs, drawn.embed, "drawn", seed)
    [stratum] = calibration.strata
    assert stratum.entries == 0
    assert {name for name, _ in stratum.score.curves} <= set(PAIR_EVIDENCE)
    judge = Judge(calibration.rules(0.05, 0.95))
    served = [
        each.evidence.cosine
        for each in decide_pairs(others.pairs, others.embed)
        if each.evidence and judge.passes(each.evidence, 0)
    ]
    assert len(served) > 300
    assert sum(map(unlike, served)) <= 0.05 * len(served)


def test_a_score_also_learns_from_the_next_smaller_caches() -> None:
    """Among few subjects, a large cache has hardly an entry that is the only one of its kind; others have many."""
    traffic = Traffic(800, 0)
    rows = embed_stream(traffic.stream.shuffled(0), traffic.embed)
    in_large = [each.evidence for each in PlayedStream(rows).play(lambda evidence, entries: False)]
    grown = calibrate(traffic.stream, traffic.embed, "drawn", 0).strata[-1]
    least = {name: curve.knots[0] for name, curve in grown.score.curves}
    assert least["second"] < min(each.second for each in in_large[300:] if each is not None)


def test_thresholds_are_close_together_where_most_bounds_are_met():
    """What a looser threshold would serve more is lost if it is not tried: at most one row in 66."""
    drawn = Likeness(3000, 0)
    [stratum] = calibrate(drawn.pairs, drawn.embed, "drawn").strata
    served = [tally.served / stratum.fitted_rows for tally in stratum.fitted]
    steps = [after - before for before, after in pairwise(served) if before >= 0.5]
    assert len(steps) > 15
    assert max(steps) <= 0.015


class Knowing:
    """A `response_cache.rules.judge.PairScorer` that knows the labels of most pairs."""

    name, boundary = "knowing@1", 0.5

    def __init__(self, rows) -> None:
        self._same = {(row.first, row.second): row.same for row in rows}

    def score(self, pairs):
        return [0.4 + 0.3 * self._same[pair] if crc32(pair[0].encode()) % 50 else 0.55 for pair in pairs]


def test_a_second_judge_is_certified_together_with_the_score():
    drawn = Likeness(3000, seed=1)
    without = calibrate(drawn.pairs, drawn.embed, "drawn")
    judged = calibrate(drawn.pairs, drawn.embed, "drawn", second=Knowing(drawn.pairs.rows))
    assert (without.judge, judged.judge) == ("", "knowing@1")
    assert judged.strata[0].judge_threshold == pytest.approx(0.7)
    assert (
        sum(tally.wrong for tally in judged.strata[0].held)
        < sum(tally.wrong for tally in without.strata[0].held) / 5
    )
    assert judged.rules(0.02, 0.95)[0].judge_threshold == judged.strata[0].judge_threshold


def test_the_judges_boundary_is_the_least_threshold():
    drawn = Likeness(1000, seed=1)

    class Strict(Knowing):
        boundary = 0.9

    judged = calibrate(drawn.pairs, drawn.embed, "drawn", second=Strict(drawn.pairs.rows))
    assert judged.strata[0].judge_threshold == 0.9
    assert all(tally.served == 0 for tally in judged.strata[0].held)


def test_a_second_judge_of_a_stream():
    traffic = Traffic(1200, seed=2)
    answers = {row.text: row.answer for row in traffic.stream.rows}

    class Right:
        name, boundary = "right@1", 0.5

        def score(self, pairs):
            return [float(answers[one] == answers[other]) for one, other in pairs]

    judged = calibrate(traffic.stream, traffic.embed, "drawn", second=Right())
    assert all(tally.wrong == 0 for stratum in judged.strata for tally in stratum.held)
    assert any(tally.served for stratum in judged.strata for tally in stratum.held)


def test_too_few_rows_prove_nothing():
    traffic = Traffic(300, seed=1)
    calibration = calibrate(traffic.stream, traffic.embed, "drawn")
    with pytest.raises(Unsupported, match="served without an error are needed"):
        calibration.rules(0.01, 0.95)


def test_rows_of_one_outcome_fit_nothing():
    traffic = Traffic(40, seed=1, intents=1)
    with pytest.raises(Unsupported, match="40 rows are too few"):
        calibrate(traffic.stream, traffic.embed, "drawn")


def test_what_is_served_is_not_cached():
    same = np.array([1.0, 0.0], np.float32).tobytes()
    stream = Stream(
        "s", tuple(Question(text, "answer") for text in ("the shoes", "shoes please", "these shoes"))
    )
    played = PlayedStream(embed_stream(stream, lambda texts: [same for _ in texts]))
    evidence = [each.evidence for each in played.play(lambda evidence, entries: True)]
    assert evidence[0] is None
    assert evidence[2] is not None
    assert evidence[2].agreement == 0.1  # one neighbour of ten: the second question was served, not kept
    kept = played.play(lambda evidence, entries: False)[2].evidence
    assert kept is not None
    assert kept.agreement == 0.2


def test_questions_without_a_vector_are_left_out():
    vector = np.array([1.0, 0.0], np.float32).tobytes()
    stream = Stream(
        "s", (Question("red shoes", "a"), Question("far too long", "a"), Question("blue shoes", "a"))
    )
    played = PlayedStream(
        embed_stream(stream, lambda texts: [None if "long" in text else vector for text in texts])
    )
    assert len(played) == 2
    assert list(played.earlier(1)) == [(0, 1.0)]


def test_a_plot(tmp_path):
    pytest.importorskip("matplotlib")
    traffic = Traffic(400, seed=2)
    calibration = calibrate(traffic.stream, traffic.embed, "drawn")
    plot_calibration(calibration, [0.1], 0.95, tmp_path / "new" / "curve.png", "drawn")
    assert (tmp_path / "new" / "curve.png").read_bytes().startswith(b"\x89PNG")


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
