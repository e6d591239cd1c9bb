"""From labelled questions to a calibration: a score fitted on one part, thresholds counted on the other.

The parts are drawn at random row by row. A stream is played once per threshold, because what is served at one
threshold decides what the cache holds afterwards. Which threshold keeps which promise is `Calibration`'s to say.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np

from headrace.core.cache.calibration import Calibration, Unsupported
from headrace.core.cache.certify import Tally
from headrace.core.cache.score import Evidence
from headrace.lab.semantic.decisions import PAIR_EVIDENCE, Decision, Embed, PlayedStream, decide_pairs
from headrace.lab.semantic.fit import fit_score
from headrace.lab.semantic.rows import Pairs, Stream

_FITTED = 0.3
"""Share of the rows that the score is fitted on; the rest pays for the promise."""

_SHARES = (
    *(0.01, 0.02, 0.035, 0.05, 0.07, 0.1, 0.15),
    *(step / 20 for step in range(4, 11)),
    *(step / 40 for step in range(21, 33)),
)
"""Shares of the fitted rows that would be served, at which thresholds are set."""

Play = Callable[[Callable[[Evidence], bool]], Sequence[Decision]]


def calibrate(data: Pairs | Stream, embed: Embed, encoder: str, seed: int = 0) -> Calibration:
    """Fit a score on a part of ``data`` and count on the rest what thresholds do.

    Raises:
        Unsupported: too few rows of either outcome to fit anything.
    """
    if isinstance(data, Stream):
        played = PlayedStream(data.shuffled(seed), embed)
        return _calibrate(len(played), played.play, Evidence._fields, encoder, seed)
    decided = decide_pairs(data, embed)

    def serve(rule: Callable[[Evidence], bool]) -> list[Decision]:
        return [each._replace(served=each.evidence is not None and rule(each.evidence)) for each in decided]

    return _calibrate(len(decided), serve, PAIR_EVIDENCE, encoder, seed)


def _calibrate(rows: int, play: Play, parts: Sequence[str], encoder: str, seed: int) -> Calibration:
    draw = random.Random(seed)
    fitted = [draw.random() < _FITTED for _ in range(rows)]
    learnt = [
        (each.evidence, each.right)
        for each in play(lambda _: False)
        if each.evidence is not None and fitted[each.row]
    ]
    try:
        score = fit_score([evidence for evidence, _ in learnt], [right for _, right in learnt], parts)
    except ValueError as error:
        raise Unsupported(f"too few rows to fit a score: {error}") from error
    scores = np.sort([score(evidence) for evidence, _ in learnt])[::-1]
    fitted_rows = sum(fitted)
    places = sorted({int(share * fitted_rows) for share in _SHARES})
    thresholds = sorted({float(scores[place]) for place in places if place < len(scores)}, reverse=True)
    on_fitted: list[Tally] = []
    on_held: list[Tally] = []
    for threshold in thresholds:

        def passes(evidence: Evidence, threshold: float = threshold) -> bool:
            return score(evidence) >= threshold

        served = [each for each in play(passes) if each.served]
        for tallies, wanted in ((on_fitted, True), (on_held, False)):
            own = [each for each in served if fitted[each.row] is wanted]
            tallies.append(Tally(threshold, len(own), sum(not each.right for each in own)))
    return Calibration(encoder, score, tuple(on_fitted), tuple(on_held), fitted_rows, rows - fitted_rows)
