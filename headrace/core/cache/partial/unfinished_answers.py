"""Answers that were left before their end, kept to be taken up where they were left.

A deterministic answer does not depend on how much of it was asked for: its first tokens are the same under every
``max_tokens``. So they are kept under the key of the request without that bound (`beginning_key`), whether a client
hung up, a time ran out, a bound cut the answer, or it ended by itself. What is found is known output of the new
request (`core.request.Request.answered`); the engine computes the rest and nothing twice.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from headrace.core.cache.response.entry import SKEW_SECONDS

BYTES_PER_TOKEN = 8
"""A reference; the numbers themselves are mostly shared."""

BYTES_PER_ANSWER = 400
"""Key, record and their places in the table; and the versions of its tags, of which most have three."""

LEAST_TOKENS = 8
"""Shorter beginnings are not worth their place."""


class UnfinishedAnswer(NamedTuple):
    """Tokens with which an answer begins.

    ``seconds`` were spent on them, ``versions`` are those of the answer's tags when it was begun. ``created`` and
    ``expires`` are Unix times, those of the answer that they were part of.
    """

    tokens: tuple[int, ...]
    seconds: float
    versions: tuple[tuple[str, int], ...]
    created: float
    expires: float


class UnfinishedCounts(NamedTuple):
    """What is kept now, and what has been dropped for want of room since the start."""

    entries: int
    nbytes: int
    evictions: int


class UnfinishedAnswers:
    """The longest beginning known of each answer, within ``max_bytes``; the least recently used goes first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, UnfinishedAnswer] = OrderedDict()
        self._nbytes = 0
        self._evictions = 0

    def keep(self, key: bytes, beginning: UnfinishedAnswer) -> None:
        """Remember how an answer begins, unless more of it, or as much for longer, is known under the same versions."""
        known = self._kept.get(key)
        if known is not None:
            self._kept.move_to_end(key)
            if known.versions == beginning.versions and _worth(known) >= _worth(beginning):
                return
        if len(beginning.tokens) < LEAST_TOKENS or _nbytes(beginning) > self._max_bytes:
            return
        self.forget(key)
        self._kept[key] = beginning
        self._nbytes += _nbytes(beginning)
        while self._nbytes > self._max_bytes:
            self.forget(next(iter(self._kept)))
            self._evictions += 1

    def find(
        self, key: bytes, versions: tuple[tuple[str, int], ...], now: float, max_age: float | None = None
    ) -> UnfinishedAnswer | None:
        """How the answer begins, as far as it is known under just these versions of its tags.

        ``now`` is Unix time, ``max_age`` (seconds) what the caller calls too old. What has ended is dropped, so that it
        does not stand in the way of what is shorter and new.
        """
        beginning = self._kept.get(key)
        if beginning is None:
            return None
        age = now - beginning.created
        if now >= beginning.expires or age < -SKEW_SECONDS:
            self.forget(key)
            return None
        if beginning.versions != versions or (max_age is not None and age > max_age):
            return None
        self._kept.move_to_end(key)
        return beginning

    def forget(self, key: bytes) -> None:
        """Drop what is known of one answer."""
        beginning = self._kept.pop(key, None)
        if beginning is not None:
            self._nbytes -= _nbytes(beginning)

    def counts(self) -> UnfinishedCounts:
        """Sizes and evictions."""
        return UnfinishedCounts(len(self._kept), self._nbytes, self._evictions)


def _nbytes(beginning: UnfinishedAnswer) -> int:
    return BYTES_PER_ANSWER + BYTES_PER_TOKEN * len(beginning.tokens)


def _worth(beginning: UnfinishedAnswer) -> tuple[int, float]:
    return len(beginning.tokens), beginning.expires
