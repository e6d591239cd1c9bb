"""One indexed request with its answer, as the semantic cache stores it."""

from __future__ import annotations

from dataclasses import dataclass

_OVERHEAD = 600
"""Approximate bytes of the objects around the texts and vectors of a row."""


@dataclass(frozen=True, slots=True)
class Row:
    """An entry of the exact cache (``key``), the last user message that it answers, and the vectors of both.

    ``partition`` is the digest of everything that must be equal. ``answer`` is the class of its answer: entries with
    equal answers share it. ``answer_text`` is the normalized answer, ``answer_vector`` its vector or empty. ``tags``
    are the entry's; ``expires`` is a Unix time.
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
        """Its size in memory, including its vectors in the index."""
        texts = len(self.question) + len(self.answer_text)
        return _OVERHEAD + texts + 2 * len(self.vector) + len(self.answer_vector)
