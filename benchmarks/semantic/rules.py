"""Hits and wrong hits of the semantic cache, compared with simpler rules, on labelled queries not used for fitting.

    python -m benchmarks.semantic rules --data FOLDER

Every CSV and JSON file in the folder is read as `headrace cache calibrate` reads it: pairs (text_a, text_b, same) or
questions (text, intent). The first half fits and tunes every rule, the second half is what the table shows. Streams are
shuffled once per seed and played from an empty cache; figures are medians over the seeds.

    judge           calibrated score, certified on rows of the first half that it was not fitted on
    cosine          a fixed threshold, the loosest whose share of wrong hits on the first half is within the bound
    cosine, oracle  the loosest threshold whose share of wrong hits *on the second half* is at most the judge's; it
                    cannot be chosen in advance
    per entry       the rule of arXiv:2502.03771, its delta tuned on the first half as the cosine is
    per entry, own  the same with the bound as its delta, which bounds errors per request
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from benchmarks.semantic.baselines import FixedCosine, Outcome, PerEntry, pick, play_rule
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
DELTAS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05)


class Line(NamedTuple):
    """One rule under one error bound, on the half that was not used for fitting."""

    max_error: float
    rule: str
    outcome: Outcome


def compare_stream(
    stream: Stream, embed: Embed, bounds: Sequence[float], confidence: float, seed: int
) -> list[Line]:
    """Every rule under every bound, on the second half of a shuffled stream."""
    first, second = stream.shuffled(seed).halves()
    calibration = calibrate(first, embed, "", seed)
    known, new = (PlayedStream(embed_stream(half, embed)) for half in (first, second))
    on_known = [play_rule(known, FixedCosine(cosine)) for cosine in COSINES]
    on_new = [play_rule(new, FixedCosine(cosine)) for cosine in COSINES]
    fitted = [play_rule(known, PerEntry(delta, seed)) for delta in DELTAS]
    nothing = Outcome(len(new), 0, 0)
    lines = []
    for bound in bounds:
        judged = _judged(calibration, bound, confidence, new.play, len(new))
        tuned = pick(fitted, bound)
        lines += [
            Line(bound, "judge", judged),
            Line(bound, "cosine", _chosen(on_new, pick(on_known, bound), len(new))),
            Line(bound, "cosine, oracle", _chosen(on_new, pick(on_new, judged.wrong_per_hit), len(new))),
            Line(
                bound,
                "per entry",
                nothing if tuned is None else play_rule(new, PerEntry(DELTAS[tuned], seed)),
            ),
            Line(bound, "per entry, own", play_rule(new, PerEntry(bound, seed))),
        ]
    return lines


def compare_pairs(
    pairs: Pairs, embed: Embed, bounds: Sequence[float], confidence: float, seed: int
) -> list[Line]:
    """Every rule that needs no stream under every bound, on the second half of the pairs."""
    first, second = pairs.halves()
    calibration = calibrate(first, embed, "", seed)
    decided = decide_pairs(second, embed)

    def play(rule: Rule) -> list[Decision]:
        return [
            each._replace(served=each.evidence is not None and rule(each.evidence, 0)) for each in decided
        ]

    on_first, on_second = _cosine_outcomes(first, embed), _cosine_outcomes(second, embed)
    lines = []
    for bound in bounds:
        judged = _judged(calibration, bound, confidence, play, len(decided))
        lines += [
            Line(bound, "judge", judged),
            Line(bound, "cosine", _chosen(on_second, pick(on_first, bound), len(decided))),
            Line(
                bound,
                "cosine, oracle",
                _chosen(on_second, pick(on_second, judged.wrong_per_hit), len(decided)),
            ),
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


def _chosen(outcomes: Sequence[Outcome], index: int | None, asked: int) -> Outcome:
    return Outcome(asked, 0, 0) if index is None else outcomes[index]


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
    print(
        f"  {'bound':>6}  {'rule':<14} {'hits':>7} {'wrong/hit':>10} {f'{confidence:.0%} upper':>10} {'x best':>7}"
    )
    for bound in dict.fromkeys(line.max_error for line in rounds[0]):
        hits = {}
        for rule in dict.fromkeys(line.rule for line in rounds[0]):
            outcomes = [line.outcome for lines in rounds for line in lines if line[:2] == (bound, rule)]
            whole = Outcome(*(sum(each[part] for each in outcomes) for part in range(3)))
            hits[rule] = median(each.hit_rate for each in outcomes)
            wrong, upper = "-", "-"
            if whole.served:
                wrong = f"{median(each.wrong_per_hit for each in outcomes):.2%}"
                upper = f"{median(upper_error(each.wrong, each.served, confidence) for each in outcomes):.2%}"
            ratio = ""
            if rule == "cosine, oracle" and hits[rule] and hits["judge"]:
                ratio = f"{hits['judge'] / hits[rule]:.1f}"
            print(f"  {bound:>6.1%}  {rule:<14} {hits[rule]:>7.1%} {wrong:>10} {upper:>10} {ratio:>7}")


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
