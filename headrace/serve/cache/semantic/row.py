"""What is kept of an answered question, so that near ones find it."""

from __future__ import annotations

from dataclasses import dataclass

_OVERHEAD = 600
"""Bytes of the objects around the texts and vectors of a row, about."""


@dataclass(frozen=True, slots=True)
class Row:
    """An entry of the exact cache (``key``), the question that it answers, and the vectors of both.

    ``partition`` is the digest of all that must be equal before similarity is asked about. ``answer`` is the class of
    its answer: entries whose answers say the same share it. ``answer_text`` is the answer's gist, ``answer_vector``
    the vector of that, empty where it has none. ``tags`` are those of the entry; ``expires`` is a Unix time.
    """

    key: bytes
    partition: bytes
    question: str
    vector: bytes
    answer: int
    answer_text: str
    answer_vector: bytes
    tags: tuple[str, ...]
    expires: float

    @property
    def nbytes(self) -> int:
        """The room that it takes in memory, its place in the index included."""
        texts = len(self.question) + len(self.answer_text)
        return _OVERHEAD + texts + 2 * len(self.vector) + len(self.answer_vector)
