"""Calibration from labelled requests: the score is fitted on one part, and thresholds are evaluated on the other.

Rows are assigned to the parts at random. A stream is simulated once per threshold, because served requests are not
stored; and in pieces of several lengths, to measure small caches as well as large ones. `Calibration` decides which
threshold meets which error bound. The threshold of a second judge is chosen on the fitted rows; what is counted is what
both would serve.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np

from headrace.response_cache.calibration.decisions import (
    PAIR_EVIDENCE,
    Agrees,
    Decision,
    Embed,
    Labelled,
    PairScores,
    PlayedStream,
    Rule,
    agrees_always,
    decide_pairs,
    embed_stream,
)
from headrace.response_cache.calibration.fit import fit_score
from headrace.response_cache.calibration.rows import Pairs, Stream
from headrace.response_cache.rules.semantic.bounds import Tally
from headrace.response_cache.rules.semantic.calibration import Calibration, Stratum, Unsupported
from headrace.response_cache.rules.semantic.judge import PairScorer
from headrace.response_cache.rules.semantic.score import Evidence, Score

SIZES = (0, 30, 300)
"""Minimum number of entries of a small, a medium and a large partition."""

_PIECE = 2
"""Rows of a piece per entry of the stratum's maximum size; served rows are not stored."""

_FITTED = 0.3
"""Share of the rows for fitting the score; the rest certifies the error bound."""

_SHARES = (
    *(0.01, 0.02, 0.035, 0.05, 0.07, 0.1, 0.15),
    *(step / 20 for step in range(4, 11)),
    *(step / 40 for step in range(21, 33)),
)
"""Hit rates on the fitted rows at which thresholds are set."""

_Play = Callable[[Rule, Agrees], Sequence[Decision]]


def calibrate(
    data: Pairs | Stream, embed: Embed, encoder: str, seed: int = 0, second: PairScorer | None = None
) -> Calibration:
    """Fits scores on a part of ``data``, and counts hits and errors of thresholds on the rest.

    With a ``second`` judge, only what it calls the same is served. Pairs have no cache size, so they have one stratum,
    and a score without evidence from neighbours.

    Raises:
        Unsupported: too few rows, or rows of one outcome only.
    """
    draw = random.Random(seed)
    scores = None if second is None else PairScores(second)
    least = 0.0 if second is None else second.boundary
    if isinstance(data, Pairs):
        decided = decide_pairs(data, embed)
        fitted = [draw.random() < _FITTED for _ in decided]

        def serve(rule: Rule, agrees: Agrees) -> list[Decision]:
            return [
                each._replace(
                    served=each.evidence is not None and rule(each.evidence, 0) and agrees(*each.texts)
                )
                for each in decided
            ]

        strata = [_stratum(0, math.inf, serve, PAIR_EVIDENCE, fitted, scores, least)]
    else:
        rows = embed_stream(data.shuffled(seed), embed)
        fitted = [draw.random() < _FITTED for _ in rows.answers]
        strata = [
            _stratum(size, following, _pieces(rows, following), Evidence._fields, fitted, scores, least)
            for size, following in zip(SIZES, (*SIZES[1:], math.inf), strict=True)
        ]
    if not any(stratum.held for stratum in strata):
        raise Unsupported(f"{len(data.rows)} rows are too few to fit a score, or all have the same outcome")
    return Calibration(encoder, tuple(strata), "" if second is None else second.name)


def _pieces(rows: Labelled, entries: float) -> _Play:
    """Simulates the rows in pieces that are long enough for ``entries`` entries, each from an empty cache."""
    count = len(rows.answers)
    length = int(min(count, _PIECE * entries)) or 1
    streams = [PlayedStream(rows.part(start, start + length), start) for start in range(0, count, length)]
    return lambda rule, agrees: list(chain.from_iterable(stream.play(rule, agrees) for stream in streams))


def _stratum(
    size: int,
    following: float,
    play: _Play,
    parts: Sequence[str],
    fitted: Sequence[bool],
    judge: PairScores | None,
    least: float,
) -> Stratum:
    """Counts the decisions of caches with ``size`` to ``following`` entries; smaller caches serve nothing.

    The threshold of the second judge is at least ``least``.
    """

    def inside(decisions: Sequence[Decision]) -> list[Decision]:
        return [each for each in decisions if size <= each.entries < following]

    learnt = inside(play(lambda evidence, entries: False, agrees_always))
    fitted_rows = sum(fitted[each.row] for each in learnt)
    candidates = [each for each in learnt if each.evidence is not None and fitted[each.row]]
    known = [(each.evidence, each.right) for each in candidates if each.evidence is not None]
    judge_threshold: float | None = None
    agrees: Agrees = agrees_always
    if judge is not None:
        judge_threshold = _judge_threshold(judge, candidates, least)
        agrees = judge.agrees(judge_threshold)
    try:
        score = fit_score([evidence for evidence, _ in known], [right for _, right in known], parts)
    except ValueError:  # no decisions, or all have the same outcome
        return Stratum(size, Score(0.0, ()), (), (), fitted_rows, len(learnt) - fitted_rows, judge_threshold)
    scores = np.sort([score(evidence) for evidence, _ in known])[::-1]
    places = sorted({int(share * fitted_rows) for share in _SHARES})
    thresholds = sorted({float(scores[place]) for place in places if place < len(scores)}, reverse=True)
    on_fitted: list[Tally] = []
    on_held: list[Tally] = []
    rows = [fitted_rows, len(learnt) - fitted_rows]
    for threshold in thresholds:

        def passes(evidence: Evidence, entries: int, threshold: float = threshold) -> bool:
            return entries >= size and score(evidence) >= threshold

        decisions = inside(play(passes, agrees))
        for index, (tallies, wanted) in enumerate(((on_fitted, True), (on_held, False))):
            own = [each for each in decisions if fitted[each.row] is wanted]
            served = [each for each in own if each.served]
            tallies.append(Tally(threshold, len(served), sum(not each.right for each in served)))
            rows[index] = max(rows[index], len(own))
    fitted_count, held_count = rows
    return Stratum(size, score, tuple(on_fitted), tuple(on_held), fitted_count, held_count, judge_threshold)


def _judge_threshold(judge: PairScores, candidates: Sequence[Decision], least: float) -> float:
    """The threshold that separates right from wrong candidates best, and at least ``least``.

    Best is the largest difference between the shares of both that reach it (Youden, 1950), which does not depend on how
    many there are of each. Labels by intent call pairs the same that a strict judge tells apart. The judge's own
    boundary is therefore the least.
    """
    scores = judge.of([each.texts for each in candidates])
    known = [(score, each.right) for score, each in zip(scores, candidates, strict=True) if score is not None]
    of_right = sorted(score for score, right in known if right)
    of_wrong = sorted(score for score, right in known if not right)
    if not of_right or not of_wrong:
        return least

    def separates(threshold: float) -> float:
        return bisect_left(of_wrong, threshold) / len(of_wrong) - bisect_left(of_right, threshold) / len(
            of_right
        )

    return max(least, max((score for score, _ in known), key=separates))
