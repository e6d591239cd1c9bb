"""The rows of all partitions in memory: nearest rows, equal answers, and eviction.

For one thread. A partition is a digest of everything except the last user message, including the tenant. Each partition
has its own index, and a found row's partition is compared again, so partitions never mix.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import numpy as np

from headrace.core.ports import StoreFacts
from headrace.response_cache.rules.semantic.answer_equality import same_answer
from headrace.response_cache.rules.semantic.judge import NEIGHBOURS, Neighbour
from headrace.response_cache.semantic.index import Index, Vector
from headrace.response_cache.semantic.row import Row

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
        gone = []
        while self._nbytes > self._max_bytes and len(self._rows) > 1:
            oldest = next(iter(self._rows.values())).key
            self.forget(oldest)
            self._evictions += 1
            gone.append(oldest)
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
