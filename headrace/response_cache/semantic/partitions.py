"""The rows of all partitions in memory: nearest rows, equal answers, and eviction.

For one thread. A partition is a digest of everything except the last user message, including the tenant. Each partition
has its own index, and a found row's partition is compared again, so partitions never mix.

An `Index` first compares the signs of all components (48 bytes for 384 dimensions; faiss compares 100,000 vectors in a
fraction of a millisecond). Then it computes exact cosines of the best few. Deletion is exact and needs no training.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import OrderedDict

import faiss
import numpy as np
from numpy.typing import NDArray

from headrace.core.ports import StoreFacts
from headrace.response_cache.rules.audits import same_answer
from headrace.response_cache.rules.judge import NEIGHBOURS, Neighbour
from headrace.response_cache.semantic.rows import Row

Vector = NDArray[np.float32]

_SCANNED = 1024
"""Up to this number of vectors, all cosines are computed, which is as fast."""
_RANKED = 4
"""Candidates ranked exactly, per requested row."""
_FIRST_ROOM = 4


class Index:
    """Unit vectors of ``dimensions`` (a multiple of 8), by row number."""

    def __init__(self, dimensions: int) -> None:
        self._vectors = np.empty((_FIRST_ROOM, dimensions), np.float32)
        self._signs = np.empty((_FIRST_ROOM, dimensions // 8), np.uint8)
        self._rows: list[int] = []
        self._places: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: int, vector: Vector) -> None:
        """Add a row's vector, or replace it."""
        place = self._places.get(row)
        if place is None:
            place = len(self._rows)
            if place == len(self._vectors):
                self._vectors = np.concatenate([self._vectors, np.empty_like(self._vectors)])
                self._signs = np.concatenate([self._signs, np.empty_like(self._signs)])
            self._rows.append(row)
            self._places[row] = place
        self._vectors[place] = vector
        self._signs[place] = np.packbits(vector > 0)

    def remove(self, row: int) -> None:
        """Remove a row; the last row takes its place."""
        place = self._places.pop(row)
        last = self._rows.pop()
        if last != row:
            self._rows[place] = last
            self._places[last] = place
            self._vectors[place] = self._vectors[len(self._rows)]
            self._signs[place] = self._signs[len(self._rows)]

    def nearest(self, vector: Vector, count: int) -> list[tuple[int, float]]:
        """Up to ``count`` rows and their cosines, nearest first."""
        held = len(self._rows)
        if held <= _SCANNED:
            places = np.arange(held)
            cosines = self._vectors[:held] @ vector
        else:
            signs = np.packbits(vector > 0)[None]
            _, found = faiss.knn_hamming(signs, self._signs[:held], min(held, _RANKED * count))
            places = found[0]
            cosines = self._vectors[places] @ vector
        order = np.argsort(-cosines, kind="stable")[:count]
        return [(self._rows[places[i]], float(cosines[i])) for i in order]


_SLACK = 1000
"""Expiries of removed rows that are kept beside as many as there are rows."""

_COMPARED = 3
"""Number of similar answer classes that a new answer is compared with."""


def vector_of(packed: bytes) -> Vector:
    """The components of a packed vector."""
    return np.frombuffer(packed, np.float32)


class Partitions:
    """Rows of at most ``max_bytes`` in total; the least recently served ones are evicted."""

    def __init__(self, dimensions: int, max_bytes: int) -> None:
        self._dimensions = dimensions
        self._max_bytes = max_bytes
        self._indices: dict[bytes, Index] = {}
        self._rows: OrderedDict[int, Row] = OrderedDict()  # least recently served first
        self._numbers: dict[bytes, int] = {}
        self._expiries: list[tuple[float, int]] = []  # a heap; rows that were removed leave theirs
        self._next = 0
        self._nbytes = 0
        self._evictions = 0

    def nearest(self, partition: bytes, vector: Vector) -> list[Neighbour]:
        """The partition's rows nearest to ``vector``, nearest first."""
        index = self._indices.get(partition)
        if index is None:
            return []
        found = [(self._rows[number], number, cosine) for number, cosine in index.nearest(vector, NEIGHBOURS)]
        return [
            Neighbour(number, cosine, row.answer, row.question)
            for row, number, cosine in found
            if row.partition == partition
        ]

    def size(self, partition: bytes) -> int:
        """The number of rows in a partition."""
        index = self._indices.get(partition)
        return 0 if index is None else len(index)

    def row(self, number: int) -> Row | None:
        """The row with this number, if it still exists."""
        return self._rows.get(number)

    def find(self, key: bytes) -> Row | None:
        """The row of an entry, if there is one."""
        number = self._numbers.get(key)
        return None if number is None else self._rows[number]

    def served(self, number: int) -> None:
        """Record that a row was served."""
        if number in self._rows:
            self._rows.move_to_end(number)

    def class_of(self, row_key: bytes, neighbours: list[Neighbour], answer: str, vector: bytes) -> int:
        """The class of a new answer: that of a similar request with an equal answer, else a new class."""
        compared: set[int] = set()
        for near in neighbours:
            if near.answer in compared:
                continue
            compared.add(near.answer)
            known = self._rows[near.row]
            if same_answer(answer, known.answer_text, cosine(vector, known.answer_vector)):
                return near.answer
            if len(compared) == _COMPARED:
                break
        return int.from_bytes(hashlib.sha256(row_key).digest()[:7], "little")

    def keep(self, row: Row) -> list[bytes]:
        """Add a row; returns the keys of the rows that were evicted."""
        self.forget(row.key)
        number, self._next = self._next, self._next + 1
        index = self._indices.get(row.partition)
        if index is None:
            index = self._indices[row.partition] = Index(self._dimensions)
        index.add(number, vector_of(row.vector))
        self._rows[number] = row
        self._numbers[row.key] = number
        self._nbytes += row.nbytes
        heapq.heappush(self._expiries, (row.expires, number))
        if len(self._expiries) > _SLACK + 2 * len(self._rows):
            self._expiries = [(each.expires, number) for number, each in self._rows.items()]
            heapq.heapify(self._expiries)
        gone = []
        while self._nbytes > self._max_bytes and len(self._rows) > 1:
            oldest = next(iter(self._rows.values())).key
            self.forget(oldest)
            self._evictions += 1
            gone.append(oldest)
        return gone

    def expire(self, now: float) -> list[bytes]:
        """Remove the rows whose entries have expired; returns their keys."""
        gone = []
        while self._expiries and self._expiries[0][0] <= now:
            _, number = heapq.heappop(self._expiries)
            if number in self._rows:
                gone.append(self._rows[number].key)
                self.forget(gone[-1])
        return gone

    def forget(self, key: bytes) -> bool:
        """Remove the row of an entry; returns whether there was one."""
        number = self._numbers.pop(key, None)
        if number is None:
            return False
        row = self._rows.pop(number)
        self._nbytes -= row.nbytes
        index = self._indices[row.partition]
        index.remove(number)
        if not len(index):
            del self._indices[row.partition]
        return True

    def forget_tag(self, tag: str) -> list[bytes]:
        """Remove all rows with a tag; returns their keys."""
        keys = [row.key for row in self._rows.values() if tag in row.tags]
        for key in keys:
            self.forget(key)
        return keys

    def facts(self) -> StoreFacts:
        """Number and size of the rows."""
        return StoreFacts(len(self._rows), self._nbytes, self._evictions)


def cosine(one: bytes, other: bytes) -> float | None:
    """The cosine of two packed vectors; None if one is missing."""
    return float(vector_of(one) @ vector_of(other)) if one and other else None
