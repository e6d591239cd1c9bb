"""Partial answers, stored so that the same request can resume them.

A deterministic answer does not depend on ``max_tokens``: its first tokens are the same under every bound. So they are
stored under the key of the request without that bound (`beginning_key`), whether a client disconnected, the request
timed out, a bound cut the answer, or it ended by itself. A partial answer that is found becomes known output of the
new request (`core.request.Request.answered`); the engine computes only the rest.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from headrace.response_cache.rules.response.entry import SKEW_SECONDS

BYTES_PER_TOKEN = 8
"""A reference; the integers themselves are mostly shared."""

BYTES_PER_ANSWER = 400
"""Key, record and their entries in the table, and the versions of the tags, of which most answers have three."""

MIN_TOKENS = 8
"""Shorter partial answers are not stored."""


class UnfinishedAnswer(NamedTuple):
    """The first tokens of an answer.

    ``seconds`` is their computing time, ``versions`` are those of the answer's tags when it began. ``created`` and
    ``expires`` are the Unix times of the original answer.
    """

    tokens: tuple[int, ...]
    seconds: float
    versions: tuple[tuple[str, int], ...]
    created: float
    expires: float


class UnfinishedCounts(NamedTuple):
    """Current sizes, and evictions since the start."""

    entries: int
    nbytes: int
    evictions: int


class UnfinishedAnswers:
    """The longest known partial answer of each request, within ``max_bytes``; the least recently used is evicted
    first.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, UnfinishedAnswer] = OrderedDict()
        self._nbytes = 0
        self._evictions = 0

    def keep(self, key: bytes, beginning: UnfinishedAnswer) -> None:
        """Store a partial answer, unless a longer one, or one of equal length that expires later, has the same tag
        versions.
        """
        known = self._entries.get(key)
        if known is not None:
            self._entries.move_to_end(key)
            if known.versions == beginning.versions and _value(known) >= _value(beginning):
                return
        if len(beginning.tokens) < MIN_TOKENS or _nbytes(beginning) > self._max_bytes:
            return
        self.forget(key)
        self._entries[key] = beginning
        self._nbytes += _nbytes(beginning)
        while self._nbytes > self._max_bytes:
            self.forget(next(iter(self._entries)))
            self._evictions += 1

    def find(
        self, key: bytes, versions: tuple[tuple[str, int], ...], now: float, max_age: float | None = None
    ) -> UnfinishedAnswer | None:
        """The longest partial answer with exactly these tag versions.

        ``now`` is Unix time, ``max_age`` (seconds) the maximum accepted age. An expired one is dropped, so that it
        does not block a shorter and newer one.
        """
        beginning = self._entries.get(key)
        if beginning is None:
            return None
        age = now - beginning.created
        if now >= beginning.expires or age < -SKEW_SECONDS:
            self.forget(key)
            return None
        if beginning.versions != versions or (max_age is not None and age > max_age):
            return None
        self._entries.move_to_end(key)
        return beginning

    def forget(self, key: bytes) -> None:
        """Drop the partial answer of one key."""
        beginning = self._entries.pop(key, None)
        if beginning is not None:
            self._nbytes -= _nbytes(beginning)

    def counts(self) -> UnfinishedCounts:
        """Sizes and evictions."""
        return UnfinishedCounts(len(self._entries), self._nbytes, self._evictions)


def _nbytes(beginning: UnfinishedAnswer) -> int:
    return BYTES_PER_ANSWER + BYTES_PER_TOKEN * len(beginning.tokens)


def _value(beginning: UnfinishedAnswer) -> tuple[int, float]:
    return len(beginning.tokens), beginning.expires
