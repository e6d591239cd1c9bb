"""Calibration from labelled requests: the score is fitted on one part, and thresholds are evaluated on the other.

Rows are assigned to the parts at random. A stream is simulated once per threshold, because served requests are not
stored; and in pieces of several lengths, to measure small caches as well as large ones. `Calibration` decides which
threshold meets which error bound.
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

_Play = Callable[[Rule], Sequence[Decision]]


def calibrate(data: Pairs | Stream, embed: Embed, encoder: str, seed: int = 0) -> Calibration:
    """Fits scores on a part of ``data``, and counts hits and errors of thresholds on the rest.

    Pairs have no cache size, so they have one stratum, and a score without evidence from neighbours.

    Raises:
        Unsupported: too few rows, or rows of one outcome only.
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
        raise Unsupported(f"{len(data.rows)} rows are too few to fit a score, or all have the same outcome")
    return Calibration(encoder, tuple(strata))


def _pieces(rows: Labelled, entries: float) -> _Play:
    """Simulates the rows in pieces that are long enough for ``entries`` entries, each from an empty cache."""
    count = len(rows.answers)
    length = int(min(count, _PIECE * entries)) or 1
    streams = [PlayedStream(rows.part(start, start + length), start) for start in range(0, count, length)]
    return lambda rule: list(chain.from_iterable(stream.play(rule) for stream in streams))


def _stratum(
    size: int, following: float, play: _Play, parts: Sequence[str], fitted: Sequence[bool]
) -> Stratum:
    """Counts the decisions of caches with ``size`` to ``following`` entries; smaller caches serve nothing."""

    def inside(decisions: Sequence[Decision]) -> list[Decision]:
        return [each for each in decisions if size <= each.entries < following]

    learnt = inside(play(lambda evidence, entries: False))
    fitted_rows = sum(fitted[each.row] for each in learnt)
    known = [(each.evidence, each.right) for each in learnt if each.evidence is not None and fitted[each.row]]
    try:
        score = fit_score([evidence for evidence, _ in known], [right for _, right in known], parts)
    except ValueError:  # no decisions, or all have the same outcome
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
