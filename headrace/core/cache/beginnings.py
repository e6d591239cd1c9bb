"""Answers that were left before their end, kept to be taken up where they were left.

A deterministic answer does not depend on how much of it was asked for: its first tokens are the same under every
``max_tokens``. So they are kept under the key of the request without that bound (`beginning_key`), whether a client
hung up, a time ran out, a bound cut the answer, or it ended by itself. What is found is known output of the new
request (`core.request.Request.answered`); the engine computes the rest and nothing twice.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

BYTES_PER_TOKEN = 8
"""A reference; the numbers themselves are mostly shared."""

BYTES_PER_BEGINNING = 400
"""Key, record and their places in the table; and the versions of its tags, of which most have three."""

LEAST_TOKENS = 8
"""Shorter beginnings are not worth their place."""


class Beginning(NamedTuple):
    """Tokens with which an answer begins.

    ``seconds`` were spent on them, ``versions`` are those of the answer's tags when it was begun, and ``answer`` is the
    key of the answer that they were part of.
    """

    tokens: tuple[int, ...]
    seconds: float
    versions: tuple[tuple[str, int], ...]
    answer: bytes


class BeginningCounts(NamedTuple):
    """What is kept now, and what has been dropped for want of room since the start."""

    entries: int
    nbytes: int
    evictions: int


class Beginnings:
    """The longest beginning known of each answer, within ``max_bytes``; the least recently used goes first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, Beginning] = OrderedDict()
        self._nbytes = 0
        self._evictions = 0

    def keep(self, key: bytes, beginning: Beginning) -> None:
        """Remember how an answer begins, unless more of it is known already under the same versions."""
        known = self._kept.get(key)
        if known is not None:
            self._kept.move_to_end(key)
            if known.versions == beginning.versions and len(known.tokens) >= len(beginning.tokens):
                return
        if len(beginning.tokens) < LEAST_TOKENS or _nbytes(beginning) > self._max_bytes:
            return
        self._forget(key)
        self._kept[key] = beginning
        self._nbytes += _nbytes(beginning)
        while self._nbytes > self._max_bytes:
            self._forget(next(iter(self._kept)))
            self._evictions += 1

    def find(self, key: bytes, versions: tuple[tuple[str, int], ...]) -> Beginning | None:
        """How the answer begins, as far as it is known under just these versions of its tags."""
        beginning = self._kept.get(key)
        if beginning is None or beginning.versions != versions:
            return None
        self._kept.move_to_end(key)
        return beginning

    def bar(self, answer: bytes) -> None:
        """Forget what was part of the answer under this key: it was wrong."""
        for key in [key for key, beginning in self._kept.items() if beginning.answer == answer]:
            self._forget(key)

    def counts(self) -> BeginningCounts:
        """Sizes and evictions."""
        return BeginningCounts(len(self._kept), self._nbytes, self._evictions)

    def _forget(self, key: bytes) -> None:
        beginning = self._kept.pop(key, None)
        if beginning is not None:
            self._nbytes -= _nbytes(beginning)


def _nbytes(beginning: Beginning) -> int:
    return BYTES_PER_BEGINNING + BYTES_PER_TOKEN * len(beginning.tokens)
