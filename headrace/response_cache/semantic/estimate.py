"""The semantic cache of an estimate: the server's index and judge, one request after the other.

A log has no responses, so each stored one counts as an answer of its own. A server that has computed them knows which
are equal; its evidence differs, and it serves other requests.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from headrace.core.ports import Embedder
from headrace.response_cache.query import CacheQuery
from headrace.response_cache.rules.guards import traits
from headrace.response_cache.rules.judge import Candidate, Decline, Doubt, Judge, Neighbour, Serve, weigh
from headrace.response_cache.semantic.partitions import Partitions, vector_of
from headrace.response_cache.semantic.rows import Row


class Alike(Judge):
    """An upper bound without a calibration: any entry from ``cosine`` on that no guard forbids."""

    def __init__(self, cosine: float) -> None:
        super().__init__(())
        self._cosine = cosine

    def decide(self, question: str, neighbours: Sequence[Neighbour], entries: int) -> Serve | Decline:
        """As `Judge.decide`, with the cosine as score."""
        why: Decline | None = None
        for near in neighbours:
            if near.cosine < self._cosine:
                return why or Decline(Doubt.LOW_SCORE, near, near.cosine)
            found = weigh(question, [near])
            if isinstance(found, Candidate):
                return Serve(near, near.cosine)
            why = why or Decline(found)
        return why or Decline(Doubt.NO_NEIGHBOUR)


class SimilarInLog:
    """A `response_cache.estimate.SimilarRequests` within ``max_bytes``."""

    def __init__(self, embedder: Embedder, judge: Judge, max_bytes: int) -> None:
        self._embedder = embedder
        self._judge = judge
        self._rows = Partitions(embedder.dimensions, max_bytes)
        self._last: tuple[bytes, bytes | None] = b"", None
        """The key and the vector of the last request that was looked up."""

    def find(self, query: CacheQuery) -> bytes | None:
        """The key of the response that would be served."""
        if query.turn is None or not query.partition or traits(query.turn.text).timely:
            return None
        packed = self._embedder.embed([query.turn.text])[0]
        self._last = query.key, packed
        if packed is None:
            return None
        near = self._rows.nearest(query.partition, vector_of(packed))
        verdict = self._judge.decide(query.turn.text, near, self._rows.size(query.partition))
        if not isinstance(verdict, Serve):
            return None
        row = self._rows.row(verdict.neighbour.row)
        assert row is not None  # it has just been found
        self._rows.served(verdict.neighbour.row)
        return row.key

    def store(self, query: CacheQuery) -> None:
        """Index the request that was looked up last and is computed now."""
        key, vector = self._last
        if query.turn is None or key != query.key or vector is None:
            return
        row = Row(
            key=query.key,
            partition=query.partition,
            question=query.turn.text,
            vector=vector,
            answer=int.from_bytes(hashlib.sha256(query.key).digest()[:7], "little"),
            answer_text="",
            answer_vector=b"",
            tags=query.control.tags,
            expires=math.inf,
        )
        self._rows.keep(row)

    def forget(self, key: bytes) -> None:
        """Drop a request whose response has expired."""
        self._rows.forget(key)
