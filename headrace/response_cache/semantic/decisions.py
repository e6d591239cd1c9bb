"""Simulated decisions of a semantic cache, one per labelled request.

A stream is simulated with a cache that starts empty. As in the server, a miss is computed and becomes an entry, so the
errors are those of the policy in use. Pairs are independent and have no labelled neighbours, so only the two texts
count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.response_cache.rules.guards import traits
from headrace.response_cache.rules.judge import (
    NEIGHBOURS,
    Candidate,
    Evidence,
    Neighbour,
    PairScorer,
    differ,
    weigh,
)
from headrace.response_cache.semantic.labelled import Pairs, Stream
from headrace.response_cache.semantic.partitions import vector_of

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
