"""Calibration from labelled requests: the score is fitted on one part, and thresholds are evaluated on the other.

Rows are assigned to the parts at random. A stream is simulated once per threshold, because served requests are not
stored; and in pieces of several lengths, to measure small caches as well as large ones. `Calibration` decides which
threshold meets which error bound. The threshold of a second judge is chosen on the fitted rows; what is counted is what
both would serve.

The fit is a logistic regression over the segments of piecewise linear functions with non-negative slopes. The problem
is convex and solved by accelerated projected gradients (Beck and Teboulle, 2009). With some dozens of slopes, a few
thousand labelled decisions are enough.
"""

from __future__ import annotations

import csv
import io
import json
import math
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.plots import load_pyplot
from headrace.response_cache.rules.calibration import (
    Calibration,
    Certificate,
    Stratum,
    Tally,
    Unsupported,
    upper_error,
)
from headrace.response_cache.rules.guards import traits
from headrace.response_cache.rules.judge import (
    NEIGHBOURS,
    Candidate,
    Curve,
    Evidence,
    Neighbour,
    PairScorer,
    Score,
    differ,
    weigh,
)
from headrace.response_cache.semantic.partitions import vector_of

# Labelled requests from a file: pairs with equal or different answers, or requests with an intent each.
#
# Files are CSV with a header, or JSON; the columns determine the kind. Requests of one intent share an
# answer.

_PAIR_COLUMNS = (
    ("text_a", "text_b", "same"),
    ("question1", "question2", "is_duplicate"),
    ("sentence1", "sentence2", "label"),
)
_QUESTION_COLUMNS = ("query", "text", "question", "utterance")
_INTENT_COLUMNS = ("intent", "category", "label", "answer")
_TRUE, _FALSE = frozenset({"1", "1.0", "true", "yes"}), frozenset({"0", "0.0", "false", "no"})


class BadRows(ValueError):
    """A file that cannot be read as labelled requests."""


class Pair(NamedTuple):
    """Two requests, and whether they have the same answer."""

    first: str
    second: str
    same: bool


class Question(NamedTuple):
    """A request and the name of its answer."""

    text: str
    answer: str


@dataclass(frozen=True, slots=True)
class Pairs:
    """Independent pairs: the first request is cached, the second is looked up."""

    name: str
    rows: tuple[Pair, ...]

    def halves(self) -> tuple[Pairs, Pairs]:
        """The first and the second half, in the order of the file."""
        cut = len(self.rows) // 2
        return Pairs(self.name, self.rows[:cut]), Pairs(self.name, self.rows[cut:])


@dataclass(frozen=True, slots=True)
class Stream:
    """Requests in the order of their arrival."""

    name: str
    rows: tuple[Question, ...]

    def shuffled(self, seed: int) -> Stream:
        """In a random order: files are often sorted by intent, and traffic is not."""
        rows = list(self.rows)
        random.Random(seed).shuffle(rows)
        return Stream(self.name, tuple(rows))

    def halves(self) -> tuple[Stream, Stream]:
        """The first and the second half."""
        cut = len(self.rows) // 2
        return Stream(self.name, self.rows[:cut]), Stream(self.name, self.rows[cut:])


def read_rows(path: Path) -> Pairs | Stream:
    """Reads the labelled requests of a file.

    Raises:
        BadRows: the file cannot be read, or lacks the columns of either kind.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BadRows(f"{path} cannot be read: {error}") from error
    if path.suffix == ".json":
        return _from_json(path, text)
    table = csv.DictReader(io.StringIO(text, newline=""))  # newline="": quoted fields may contain line breaks
    columns = [name.strip().lower() for name in table.fieldnames or ()]
    table.fieldnames = columns
    for first, second, same in _PAIR_COLUMNS:
        if {first, second, same} <= set(columns):
            pairs = tuple(
                Pair(row[first] or "", row[second] or "", _same(row[same], path, line))
                for line, row in enumerate(table, 2)
            )
            return Pairs(path.stem, pairs)
    question = next((name for name in _QUESTION_COLUMNS if name in columns), None)
    intent = next((name for name in _INTENT_COLUMNS if name in columns), None)
    if question is None or intent is None:
        raise BadRows(
            f"{path} needs the columns text_a,text_b,same or query,intent; it has {','.join(columns)}"
        )
    return Stream(path.stem, tuple(Question(row[question] or "", row[intent] or "") for row in table))


def _from_json(path: Path, text: str) -> Stream:
    try:
        content: Any = json.loads(text)
    except ValueError as error:
        raise BadRows(f"{path} is not JSON: {error}") from error
    listed = content.get("train") if isinstance(content, dict) else content
    if not isinstance(listed, list) or not all(
        isinstance(row, list) and len(row) == 2 and all(isinstance(part, str) for part in row)
        for row in listed
    ):
        raise BadRows(f"{path} must be a list of [question, intent], or an object that has one as 'train'")
    return Stream(path.stem, tuple(Question(*row) for row in listed))


def _same(value: str | None, path: Path, line: int) -> bool:
    spelt = (value or "").strip().lower()
    if spelt not in _TRUE | _FALSE:
        raise BadRows(f"{path}, line {line}: same must be 0 or 1, got {value!r:.80}")
    return spelt in _TRUE


# Simulated decisions of a semantic cache, one per labelled request.
#
# A stream is simulated with a cache that starts empty. As in the server, a miss is computed and becomes an
# entry, so the errors are those of the policy in use. Pairs are independent and have no labelled neighbours,
# so only the two texts count.

Vectors = NDArray[np.float32]
Embed = Callable[[Sequence[str]], Sequence[bytes | None]]
"""As `core.ports.Embedder.embed`."""

_BLOCK = 512
_REACH = 8 * NEIGHBOURS
"""Nearest earlier rows examined per request: enough to include `NEIGHBOURS` cached ones."""

PAIR_EVIDENCE = ("cosine", "shared", "kept", "order", "length", "complete")
"""Evidence available for a pair without labelled neighbours."""


class Decision(NamedTuple):
    """The decision for one row: the candidate's evidence and correctness; no evidence without a candidate.

    ``entries`` is the number of cache entries at that time, ``texts`` are the cached and the new text.
    """

    row: int
    entries: int
    evidence: Evidence | None = None
    right: bool = False
    served: bool = False
    texts: tuple[str, str] = ("", "")


Rule = Callable[[Evidence, int], bool]
"""Whether to serve, given this evidence and the number of entries."""

Agrees = Callable[[str, str], bool]
"""Whether the second judge calls a cached and a new text the same."""


def agrees_always(cached: str, asked: str) -> bool:
    """There is no second judge."""
    return True


class PairScores:
    """Scores of a second judge, each computed once."""

    def __init__(self, scorer: PairScorer) -> None:
        self._scorer = scorer
        self._known: dict[tuple[str, str], float | None] = {}

    def of(self, pairs: Sequence[tuple[str, str]]) -> list[float | None]:
        """The score of each pair."""
        new = list(dict.fromkeys(pair for pair in pairs if pair not in self._known))
        self._known.update(zip(new, self._scorer.score(new), strict=True))
        return [self._known[pair] for pair in pairs]

    def agrees(self, threshold: float) -> Agrees:
        """The judge with this threshold."""

        def agrees(cached: str, asked: str) -> bool:
            score = self.of([(cached, asked)])[0]
            return score is not None and score >= threshold

        return agrees


class Labelled(NamedTuple):
    """Rows of a stream with vectors [rows, dimensions]; rows with equal ``answers`` share an answer."""

    texts: tuple[str, ...]
    answers: tuple[int, ...]
    vectors: Vectors

    def part(self, start: int, stop: int) -> Labelled:
        """Some of the rows."""
        return Labelled(self.texts[start:stop], self.answers[start:stop], self.vectors[start:stop])


def embed_stream(stream: Stream, embed: Embed) -> Labelled:
    """Embeds the rows; omits those that exceed the encoder's context."""
    vectors = embed([row.text for row in stream.rows])
    kept = [
        (row, vector_of(found)) for row, found in zip(stream.rows, vectors, strict=True) if found is not None
    ]
    numbers = {answer: number for number, answer in enumerate(dict.fromkeys(row.answer for row, _ in kept))}
    return Labelled(
        tuple(row.text for row, _ in kept),
        tuple(numbers[row.answer] for row, _ in kept),
        np.array([vector for _, vector in kept], np.float32),
    )


class PlayedStream:
    """A stream that can be simulated with several rules; ``first`` is the number of its first row."""

    def __init__(self, rows: Labelled, first: int = 0) -> None:
        self.answers = rows.answers
        self._texts = rows.texts
        self._first = first
        self._differ = lru_cache(maxsize=None)(differ)  # the same pairs are met with each rule
        self._near, self._cosines = _earlier(rows.vectors)

    def __len__(self) -> int:
        return len(self.answers)

    def play(self, rule: Rule, agrees: Agrees = agrees_always) -> list[Decision]:
        """One decision per row, with a cache that holds the earlier rows that were not served.

        The second judge ``agrees`` is asked about what the rule would serve.

        Requests about the current time are neither served nor stored.
        """
        cached = np.zeros(len(self), dtype=bool)
        entries = 0
        decisions = []
        for row in range(len(self)):
            decision = Decision(self._first + row, entries)
            if not traits(self._texts[row]).timely:
                found = weigh(self._texts[row], self._neighbours(row, cached), self._differ)
                if isinstance(found, Candidate):
                    right = found.neighbour.answer == self.answers[row]
                    texts = (found.neighbour.text, self._texts[row])
                    served = rule(found.evidence, entries) and agrees(*texts)
                    decision = Decision(
                        self._first + row, entries, found.evidence, right, served=served, texts=texts
                    )
                cached[row] = not decision.served
                entries += not decision.served
            decisions.append(decision)
        return decisions

    def earlier(self, row: int) -> Iterator[tuple[int, float]]:
        """Rows before ``row`` and their cosines, nearest first."""
        for other, cosine in zip(self._near[row], self._cosines[row], strict=True):
            if other < 0:
                return
            yield int(other), float(cosine)

    def _neighbours(self, row: int, cached: NDArray[np.bool_]) -> list[Neighbour]:
        near = self._near[row]
        chosen = np.flatnonzero((near >= 0) & cached[near])[:NEIGHBOURS]
        return [
            Neighbour(other, cosine, self.answers[other], self._texts[other])
            for other, cosine in zip(near[chosen].tolist(), self._cosines[row, chosen].tolist(), strict=True)
        ]


def decide_pairs(pairs: Pairs, embed: Embed) -> list[Decision]:
    """One decision per pair; none is served, since thresholds are applied to the evidence later."""
    firsts = embed([row.first for row in pairs.rows])
    seconds = embed([row.second for row in pairs.rows])
    decisions = []
    for index, (row, first, second) in enumerate(zip(pairs.rows, firsts, seconds, strict=True)):
        found = None
        if first is not None and second is not None and not traits(row.first).timely:
            found = weigh(
                row.second, [Neighbour(index, float(vector_of(first) @ vector_of(second)), 0, row.first)]
            )
        if isinstance(found, Candidate):
            decisions.append(Decision(index, 0, found.evidence, row.same, texts=(row.first, row.second)))
        else:
            decisions.append(Decision(index, 0))
    return decisions


def _earlier(vectors: Vectors) -> tuple[NDArray[np.int64], Vectors]:
    """The nearest earlier rows of each row, nearest first; -1 if there are fewer."""
    count = len(vectors)
    near = np.full((count, _REACH), -1, dtype=np.int64)
    cosines = np.full((count, _REACH), -1.0, dtype=np.float32)
    for start in range(0, count, _BLOCK):
        stop = min(start + _BLOCK, count)
        similar = vectors[start:stop] @ vectors[:stop].T
        for row in range(start, stop):
            earlier = similar[row - start, :row]
            reach = min(_REACH, row)
            chosen = np.argpartition(-earlier, reach - 1)[:reach] if reach < row else np.arange(row)
            chosen = chosen[np.argsort(-earlier[chosen], kind="stable")]
            near[row, :reach] = chosen
            cosines[row, :reach] = earlier[chosen]
    return near, cosines


_QUANTILES = (0.0, 0.2, 0.4, 0.6, 0.8, 0.95, 1.0)
_STEPS = 600
_RIDGE = 1.0

_Floats = NDArray[np.float64]


def fit_score(
    evidence: Sequence[Evidence], right: Sequence[bool], parts: Sequence[str] = Evidence._fields
) -> Score:
    """The score that fits ``right`` best, from the named ``parts`` of the evidence.

    Raises:
        ValueError: all decisions have the same outcome.
    """
    if not 0 < sum(right) < len(right):
        raise ValueError("fitting needs both right and wrong decisions")
    columns = {part: np.array([getattr(each, part) for each in evidence], np.float64) for part in parts}
    knots = {part: np.unique(np.quantile(column, _QUANTILES)) for part, column in columns.items()}
    varying = [part for part in parts if len(knots[part]) > 1]
    segments = [_segments(columns[part], knots[part]) for part in varying]
    slopes, intercept = _solve(np.hstack(segments), np.array(right, np.float64))
    curves = []
    for part in varying:
        own, slopes = np.split(slopes, [len(knots[part]) - 1])
        values = np.concatenate([[0.0], np.cumsum(own * np.diff(knots[part]))])
        if values[-1] > 0.0:
            curves.append((part, Curve(tuple(knots[part].tolist()), tuple(values.tolist()))))
    return Score(intercept, tuple(curves))


def _segments(column: _Floats, knots: _Floats) -> _Floats:
    """Length of each segment between the knots that lies below each value, [rows, segments]."""
    reach: _Floats = np.clip(column[:, None], knots[:-1], knots[1:]) - knots[:-1]
    return reach


def _solve(inputs: _Floats, right: _Floats) -> tuple[_Floats, float]:
    """Non-negative slopes and the intercept that minimize the regularized logistic loss."""
    scale = inputs.std(0) + 1e-9
    design = np.column_stack([inputs / scale, np.ones(len(inputs))])
    ridge = np.full(design.shape[1], _RIDGE)
    ridge[-1] = 0.0
    curvature = 0.25 * np.linalg.norm(design, 2) ** 2 + _RIDGE
    weights = np.zeros(design.shape[1])
    weights[-1] = np.log(right.mean() / (1.0 - right.mean()))
    ahead, momentum = weights.copy(), 1.0
    for _ in range(_STEPS):
        likely = 1.0 / (1.0 + np.exp(-design @ ahead))
        step = ahead - (design.T @ (likely - right) + ridge * ahead) / curvature
        step[:-1] = np.maximum(step[:-1], 0.0)
        following = (1.0 + np.sqrt(1.0 + 4.0 * momentum**2)) / 2.0
        if (ahead - step) @ (step - weights) > 0.0:  # overshot: restart the momentum (O'Donoghue, Candes)
            following, ahead = 1.0, step.copy()
        else:
            ahead = step + (momentum - 1.0) / following * (step - weights)
        weights, momentum = step, following
    return weights[:-1] / scale, float(weights[-1])


SIZES = (0, 30, 300)
"""Minimum number of entries of a small, a medium and a large partition."""

_PIECE = 2
"""Rows of a piece per entry of the stratum's maximum size; served rows are not stored."""

_FITTED = 0.3
"""Share of the rows for fitting the score; the rest certifies the error bound."""

_SHARES = (
    *(0.01, 0.02, 0.035, 0.05, 0.07, 0.1, 0.15),
    *(step / 20 for step in range(4, 10)),
    *(step / 80 for step in range(40, 65)),
)
"""Hit rates on the fitted rows at which thresholds are set.

They are close together where bounds of 1 % to 5 % are usually met. Entries that are the only ones of their kind get
similar scores, so that a third of what they serve may lie between two thresholds that are far apart.
"""

_Play = Callable[[Rule, Agrees], Sequence[Decision]]


def calibrate(
    data: Pairs | Stream,
    embed: Embed,
    encoder: str,
    seed: int = 0,
    second: PairScorer | None = None,
    by_hand: Sequence[float] = (),
) -> Calibration:
    """Fits scores on a part of ``data``, and counts hits and errors of thresholds on the rest.

    With a ``second`` judge, only what it calls the same is served. Pairs have no cache size, so they have one stratum,
    and a score without evidence from neighbours. ``by_hand`` are cosines; what serving from each of them on would do is
    counted too, on all rows.

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

        learnt = _unserved(serve, 0, math.inf)
        strata = [_stratum(0, math.inf, serve, PAIR_EVIDENCE, fitted, learnt, [], scores, least, by_hand)]
    else:
        rows = embed_stream(data.shuffled(seed), embed)
        fitted = [draw.random() < _FITTED for _ in rows.answers]
        strata, smaller = [], list[Decision]()
        for size, following in zip(SIZES, (*SIZES[1:], math.inf), strict=True):
            play = _pieces(rows, following)
            learnt = _unserved(play, size, following)
            strata.append(
                _stratum(
                    size,
                    following,
                    play,
                    Evidence._fields,
                    fitted,
                    learnt,
                    smaller,
                    scores,
                    least,
                    by_hand,
                )
            )
            smaller = learnt
    if not any(stratum.held for stratum in strata):
        raise Unsupported(f"{len(data.rows)} rows are too few to fit a score, or all have the same outcome")
    return Calibration(encoder, tuple(strata), "" if second is None else second.name)


def _pieces(rows: Labelled, entries: float) -> _Play:
    """Simulates the rows in pieces that are long enough for ``entries`` entries, each from an empty cache."""
    count = len(rows.answers)
    length = int(min(count, _PIECE * entries)) or 1
    streams = [PlayedStream(rows.part(start, start + length), start) for start in range(0, count, length)]
    return lambda rule, agrees: list(chain.from_iterable(stream.play(rule, agrees) for stream in streams))


def _unserved(play: _Play, size: int, following: float) -> list[Decision]:
    """The decisions of caches with ``size`` to ``following`` entries that serve nothing."""
    decisions = play(lambda evidence, entries: False, agrees_always)
    return [each for each in decisions if size <= each.entries < following]


def _candidates(decisions: Sequence[Decision], fitted: Sequence[bool]) -> list[Decision]:
    """The decisions of fitted rows that found a candidate."""
    return [each for each in decisions if each.evidence is not None and fitted[each.row]]


def _known(candidates: Sequence[Decision]) -> list[tuple[Evidence, bool]]:
    """Evidence and outcome of candidates."""
    return [(each.evidence, each.right) for each in candidates if each.evidence is not None]


def _stratum(
    size: int,
    following: float,
    play: _Play,
    parts: Sequence[str],
    fitted: Sequence[bool],
    learnt: Sequence[Decision],
    smaller: Sequence[Decision],
    judge: PairScores | None,
    least: float,
    by_hand: Sequence[float],
) -> Stratum:
    """Counts the decisions of caches with ``size`` to ``following`` entries; smaller caches serve nothing.

    The score is fitted on the decisions ``learnt`` and on those of ``smaller`` caches: a large cache of few subjects
    shows too rarely how an entry fares that is the only one of its kind, as most are in other caches. The threshold of
    the second judge is at least ``least``.
    """

    def inside(decisions: Sequence[Decision]) -> list[Decision]:
        return [each for each in decisions if size <= each.entries < following]

    fitted_rows = sum(fitted[each.row] for each in learnt)
    candidates = _candidates(learnt, fitted)
    own = _known(candidates)
    known = own + _known(_candidates(smaller, fitted))
    judge_threshold: float | None = None
    agrees: Agrees = agrees_always
    if judge is not None:
        judge_threshold = _judge_threshold(judge, candidates, least)
        agrees = judge.agrees(judge_threshold)
    try:
        score = fit_score([evidence for evidence, _ in known], [right for _, right in known], parts)
    except ValueError:  # no decisions, or all have the same outcome
        return Stratum(size, Score(0.0, ()), (), (), fitted_rows, len(learnt) - fitted_rows, judge_threshold)
    scores = np.sort([score(evidence) for evidence, _ in own])[::-1]
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
            counted = [each for each in decisions if fitted[each.row] is wanted]
            served = [each for each in counted if each.served]
            tallies.append(Tally(threshold, len(served), sum(not each.right for each in served)))
            rows[index] = max(rows[index], len(counted))
    fitted_count, held_count = rows
    found = Stratum(size, score, tuple(on_fitted), tuple(on_held), fitted_count, held_count, judge_threshold)
    return replace(found, by_hand=_count_by_hand(by_hand, size, play, agrees, inside))


def _count_by_hand(
    cosines: Sequence[float],
    size: int,
    play: _Play,
    agrees: Agrees,
    inside: Callable[[Sequence[Decision]], list[Decision]],
) -> tuple[Tally, ...]:
    """What serving from each cosine on does, on all rows: nothing was fitted for it."""
    tallies = []
    for cosine in sorted(set(cosines), reverse=True):

        def passes(evidence: Evidence, entries: int, cosine: float = cosine) -> bool:
            return entries >= size and evidence.cosine >= cosine

        served = [each for each in inside(play(passes, agrees)) if each.served]
        tallies.append(Tally(cosine, len(served), sum(not each.right for each in served)))
    return tuple(tallies)


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


def plot_calibration(
    calibration: Calibration, max_errors: Sequence[float], confidence: float, path: Path, title: str
) -> None:
    """Writes a PNG: the share of wrong hits over the hit rate, its upper bound, and the certified thresholds.

    Raises:
        NoPlots: matplotlib is missing.
    """
    pyplot = load_pyplot()
    figure, axis = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for index, stratum in enumerate(calibration.strata):
        tallies = [tally for tally in stratum.held if tally.served]
        hits = [100 * tally.served / stratum.held_rows for tally in tallies]
        wrong = [100 * tally.wrong / tally.served for tally in tallies]
        bounds = [100 * upper_error(tally.wrong, tally.served, confidence) for tally in tallies]
        name = f"from {stratum.entries} entries on" if stratum.entries else "small caches"
        [line] = axis.plot(hits, wrong, marker=".", label=name)
        axis.plot(hits, bounds, linestyle=":", color=line.get_color())
        for max_error in max_errors:
            found = calibration.certificates(max_error, confidence)[index]
            if isinstance(found, Certificate):
                share = 100 * found.tally.served / stratum.held_rows
                axis.plot([share], [100 * found.bound], marker="o", color=line.get_color())
    axis.set_xlabel("requests served from cache, %")
    axis.set_ylabel("wrong hits, % (dotted: upper bound; dots: certified)")
    axis.set_ylim(0, 10)
    axis.set_title(title)
    axis.grid(alpha=0.3)
    axis.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
