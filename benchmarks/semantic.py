"""Hits and wrong hits of the semantic cache, compared with a fixed cosine, on labelled queries not used for fitting.

    python -m benchmarks.semantic --data FOLDER

Every CSV and JSON file in the folder is read as `headrace cache calibrate` reads it: pairs (text_a, text_b, same) or
questions (text, intent). The first half fits and tunes every rule, the second half is what the table shows. Streams are
shuffled once per seed and played from an empty cache; figures are medians over the seeds.

    judge           calibrated score, certified on rows of the first half that it was not fitted on
    cosine          a fixed threshold, the loosest whose share of wrong hits on the first half is within the bound
    cosine, oracle  the loosest threshold whose share of wrong hits *on the second half* is at most the judge's; it
                    cannot be chosen in advance
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from benchmarks.stage import plain_parser
from headrace.compute.encoder.sentences import PACKAGED, Sentences
from headrace.response_cache.rules.calibration import CONFIDENCE, Calibration, Unsupported, upper_error
from headrace.response_cache.rules.judge import Judge
from headrace.response_cache.semantic.calibrate import (
    BadRows,
    Decision,
    Embed,
    Pairs,
    PlayedStream,
    Rule,
    Stream,
    calibrate,
    decide_pairs,
    embed_stream,
    read_rows,
)

COSINES = [step / 100 for step in range(60, 100)] + [0.995, 0.999]


class Outcome(NamedTuple):
    """Counts of a simulated rule: requests, hits, and wrong hits."""

    asked: int
    served: int
    wrong: int

    @property
    def hit_rate(self) -> float:
        return self.served / self.asked if self.asked else 0.0

    @property
    def wrong_per_hit(self) -> float:
        return self.wrong / self.served if self.served else 0.0


class Line(NamedTuple):
    """One rule under one error bound, on the half that was not used for fitting."""

    max_error: float
    rule: str
    outcome: Outcome


def play_cosine(stream: PlayedStream, threshold: float) -> Outcome:
    """Simulate ``stream`` from an empty cache; the nearest entry is served if its cosine is at least ``threshold``."""
    served = wrong = 0
    cached = bytearray(len(stream))
    for row in range(len(stream)):
        entry, cosine = next(((e, c) for e, c in stream.earlier(row) if cached[e]), (row, -1.0))
        if cosine >= threshold:
            served += 1
            wrong += stream.answers[entry] != stream.answers[row]
        else:
            cached[row] = True
    return Outcome(len(stream), served, wrong)


def pick(outcomes: Sequence[Outcome], max_error: float) -> Outcome:
    """The outcome with the most hits among those with a share of wrong hits of at most ``max_error``."""
    fitting = [each for each in outcomes if each.served and each.wrong_per_hit <= max_error]
    return max(fitting, key=lambda each: each.served, default=Outcome(outcomes[0].asked, 0, 0))


def compare_stream(
    stream: Stream, embed: Embed, bounds: Sequence[float], confidence: float, seed: int
) -> list[Line]:
    """Every rule under every bound, on the second half of a shuffled stream."""
    first, second = stream.shuffled(seed).halves()
    calibration = calibrate(first, embed, "", seed)
    known, new = (PlayedStream(embed_stream(half, embed)) for half in (first, second))
    on_known, on_new = ([play_cosine(half, cosine) for cosine in COSINES] for half in (known, new))
    judged = [_judged(calibration, bound, confidence, new.play, len(new)) for bound in bounds]
    return _lines(bounds, judged, on_known, on_new)


def compare_pairs(
    pairs: Pairs, embed: Embed, bounds: Sequence[float], confidence: float, seed: int
) -> list[Line]:
    """Every rule under every bound, on the second half of the pairs."""
    first, second = pairs.halves()
    calibration = calibrate(first, embed, "", seed)
    decided = decide_pairs(second, embed)

    def play(rule: Rule) -> list[Decision]:
        return [
            each._replace(served=each.evidence is not None and rule(each.evidence, 0)) for each in decided
        ]

    judged = [_judged(calibration, bound, confidence, play, len(decided)) for bound in bounds]
    return _lines(bounds, judged, _cosine_outcomes(first, embed), _cosine_outcomes(second, embed))


def _lines(
    bounds: Sequence[float], judged: Sequence[Outcome], known: Sequence[Outcome], new: Sequence[Outcome]
) -> list[Line]:
    """The judge's outcomes, and those of a cosine that was chosen on the ``known`` half, or on the ``new`` one."""
    lines = []
    for bound, judge in zip(bounds, judged, strict=True):
        tuned = pick(known, bound)
        chosen = new[known.index(tuned)] if tuned.served else Outcome(new[0].asked, 0, 0)
        lines += [
            Line(bound, "judge", judge),
            Line(bound, "cosine", chosen),
            Line(bound, "cosine, oracle", pick(new, judge.wrong_per_hit)),
        ]
    return lines


def _judged(
    calibration: Calibration,
    bound: float,
    confidence: float,
    play: Callable[[Rule], Sequence[Decision]],
    asked: int,
) -> Outcome:
    try:
        judge = Judge(calibration.rules(bound, confidence))
    except Unsupported:
        return Outcome(asked, 0, 0)
    served = [each for each in play(judge.passes) if each.served]
    return Outcome(asked, len(served), sum(not each.right for each in served))


def _cosine_outcomes(pairs: Pairs, embed: Embed) -> list[Outcome]:
    vectors = zip(embed([r.first for r in pairs.rows]), embed([r.second for r in pairs.rows]), strict=True)
    cosines = np.array([-1.0 if a is None or b is None else _cosine(a, b) for a, b in vectors])
    same = np.array([row.same for row in pairs.rows])
    return [
        Outcome(len(same), int((cosines >= least).sum()), int((~same[cosines >= least]).sum()))
        for least in COSINES
    ]


def _cosine(first: bytes, second: bytes) -> float:
    return float(np.frombuffer(first, np.float32) @ np.frombuffer(second, np.float32))


def show(name: str, rounds: Sequence[Sequence[Line]], confidence: float) -> None:
    """Print the medians of one data set."""
    print(f"\n{name}: {rounds[0][0].outcome.asked} questions not fitted to, {len(rounds)} orders")
    print(f"  {'bound':>6}  {'rule':<14} {'hits':>7} {'wrong/hit':>10} {f'{confidence:.0%} upper':>10}")
    for bound, rule in dict.fromkeys(line[:2] for line in rounds[0]):
        outcomes = [line.outcome for lines in rounds for line in lines if line[:2] == (bound, rule)]
        hits, wrong, upper = median(each.hit_rate for each in outcomes), "-", "-"
        if any(each.served for each in outcomes):
            wrong = f"{median(each.wrong_per_hit for each in outcomes):.2%}"
            upper = f"{median(upper_error(each.wrong, each.served, confidence) for each in outcomes):.2%}"
        print(f"  {bound:>6.1%}  {rule:<14} {hits:>7.1%} {wrong:>10} {upper:>10}")


def remembering(sentences: Sentences) -> Embed:
    """Embed each text once for all rules."""
    known: dict[str, bytes | None] = {}

    def embed(texts: Sequence[str]) -> list[bytes | None]:
        new = list(dict.fromkeys(text for text in texts if text not in known))
        known.update(zip(new, sentences.embed(new), strict=True))
        return [known[text] for text in texts]

    return embed


def main() -> None:
    """Measure and print."""
    parser = plain_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of CSV and JSON files")
    parser.add_argument("--max-error", type=float, nargs="+", default=[0.01, 0.02, 0.05])
    parser.add_argument("--confidence", type=float, default=CONFIDENCE)
    parser.add_argument("--seeds", type=int, default=3, help="orders of each stream")
    parser.add_argument("--encoder", default=PACKAGED)
    given = parser.parse_args()
    embed = remembering(Sentences.from_name(given.encoder))
    for path in sorted(given.data.iterdir()):
        if path.suffix not in (".csv", ".json"):
            continue
        try:
            data = read_rows(path)
            if isinstance(data, Stream):
                rounds = [
                    compare_stream(data, embed, given.max_error, given.confidence, seed)
                    for seed in range(given.seeds)
                ]
            else:
                rounds = [compare_pairs(data, embed, given.max_error, given.confidence, seed=0)]
        except (BadRows, Unsupported) as error:
            print(f"\n{path.name}: {error}", file=sys.stderr)
            continue
        show(data.name, rounds, given.confidence)


if __name__ == "__main__":
    main()
