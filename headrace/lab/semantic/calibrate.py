"""From labelled questions to a calibration: scores fitted on one part, thresholds counted on the other.

The parts are drawn at random row by row. A stream is played once per threshold, because what is served at one
threshold decides what the cache holds afterwards; and in pieces of several lengths, so that there are as many young
caches to learn from as grown ones. Which threshold keeps which promise is `Calibration`'s to say.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np

from headrace.core.cache.semantic.bounds import Tally
from headrace.core.cache.semantic.calibration import Calibration, Stratum, Unsupported
from headrace.core.cache.semantic.score import Evidence, Score
from headrace.lab.semantic.decisions import (
    PAIR_EVIDENCE,
    Decision,
    Embed,
    Labelled,
    PlayedStream,
    Rule,
    decide_pairs,
    embed_stream,
)
from headrace.lab.semantic.fit import fit_score
from headrace.lab.semantic.rows import Pairs, Stream

SIZES = (0, 30, 300)
"""Least entries of a young, a growing and a grown partition."""

_PIECE = 2
"""A piece has so many times as many rows as the size that ends its stratum: some rows are served and never kept."""

_FITTED = 0.3
"""Share of the rows that a score is fitted on; the rest pays for the promise."""

_SHARES = (
    *(0.01, 0.02, 0.035, 0.05, 0.07, 0.1, 0.15),
    *(step / 20 for step in range(4, 11)),
    *(step / 40 for step in range(21, 33)),
)
"""Shares of the fitted rows that would be served, at which thresholds are set."""

_Play = Callable[[Rule], Sequence[Decision]]


def calibrate(data: Pairs | Stream, embed: Embed, encoder: str, seed: int = 0) -> Calibration:
    """Fit scores on a part of ``data`` and count on the rest what thresholds do.

    Pairs say nothing of the size of a cache: they have one stratum, and a score that knows no neighbourhood.

    Raises:
        Unsupported: too few rows of either outcome to fit anything.
    """
    draw = random.Random(seed)
    if isinstance(data, Pairs):
        decided = decide_pairs(data, embed)
        fitted = [draw.random() < _FITTED for _ in decided]

        def serve(rule: Rule) -> list[Decision]:
            return [
                each._replace(served=each.evidence is not None and rule(each.evidence, 0)) for each in decided
            ]

        strata = [_stratum(0, math.inf, serve, PAIR_EVIDENCE, fitted)]
    else:
        rows = embed_stream(data.shuffled(seed), embed)
        fitted = [draw.random() < _FITTED for _ in rows.answers]
        strata = [
            _stratum(size, following, _pieces(rows, following), Evidence._fields, fitted)
            for size, following in zip(SIZES, (*SIZES[1:], math.inf), strict=True)
        ]
    if not any(stratum.held for stratum in strata):
        raise Unsupported(f"too few rows to fit a score: {len(data.rows)}, or all of one kind")
    return Calibration(encoder, tuple(strata))


def _pieces(rows: Labelled, entries: float) -> _Play:
    """Plays the rows in pieces in which a cache reaches ``entries``, each piece from an empty cache."""
    count = len(rows.answers)
    length = int(min(count, _PIECE * entries)) or 1
    streams = [PlayedStream(rows.part(start, start + length), start) for start in range(0, count, length)]
    return lambda rule: list(chain.from_iterable(stream.play(rule) for stream in streams))


def _stratum(
    size: int, following: float, play: _Play, parts: Sequence[str], fitted: Sequence[bool]
) -> Stratum:
    """Decisions of caches with ``size`` entries up to ``following``; smaller ones on the way serve nothing."""

    def inside(decisions: Sequence[Decision]) -> list[Decision]:
        return [each for each in decisions if size <= each.entries < following]

    learnt = inside(play(lambda evidence, entries: False))
    fitted_rows = sum(fitted[each.row] for each in learnt)
    known = [(each.evidence, each.right) for each in learnt if each.evidence is not None and fitted[each.row]]
    try:
        score = fit_score([evidence for evidence, _ in known], [right for _, right in known], parts)
    except ValueError:  # all right, all wrong, or none at all
        return Stratum(size, Score(0.0, ()), (), (), fitted_rows, len(learnt) - fitted_rows)
    scores = np.sort([score(evidence) for evidence, _ in known])[::-1]
    places = sorted({int(share * fitted_rows) for share in _SHARES})
    thresholds = sorted({float(scores[place]) for place in places if place < len(scores)}, reverse=True)
    on_fitted: list[Tally] = []
    on_held: list[Tally] = []
    rows = [fitted_rows, len(learnt) - fitted_rows]
    for threshold in thresholds:

        def passes(evidence: Evidence, entries: int, threshold: float = threshold) -> bool:
            return entries >= size and score(evidence) >= threshold

        decisions = inside(play(passes))
        for index, (tallies, wanted) in enumerate(((on_fitted, True), (on_held, False))):
            own = [each for each in decisions if fitted[each.row] is wanted]
            served = [each for each in own if each.served]
            tallies.append(Tally(threshold, len(served), sum(not each.right for each in served)))
            rows[index] = max(rows[index], len(own))
    return Stratum(size, score, tuple(on_fitted), tuple(on_held), *rows)
