"""The partial cache (L4): resumes unfinished responses.

A deterministic response does not depend on ``max_tokens``: its first tokens are the same under every bound. So they are
stored under the key of the request without that bound (`beginning_key`), whether a client disconnected, the request
timed out, a bound cut the response, or it ended by itself. A beginning that is found becomes known output of the new
request (`core.request.Request.answered`); the engine computes only the rest.

It learns of responses like other listeners, and is searched before one is computed. Only an equal deterministic
request resumes a response, so the response does not change. Nothing is stored on disk.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from headrace.core.events import Layer
from headrace.core.ports import StoreFacts
from headrace.core.request import FinishReason
from headrace.response_cache.query import CacheQuery
from headrace.response_cache.rules.entry import SKEW_SECONDS, Entry, Served

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


class Partial:
    """Unfinished responses of one engine; ``resume_bytes`` is the memory for them."""

    def __init__(self, resume_bytes: int) -> None:
        self.layer = Layer.PARTIAL
        self._beginnings = UnfinishedAnswers(resume_bytes)

    def resumed(
        self, query: CacheQuery, versions: tuple[tuple[str, int], ...], now: float
    ) -> UnfinishedAnswer | None:
        """The stored beginning of the response, cut to its maximum length, or None. ``now`` is Unix time."""
        if not _resumable(query) or query.control.no_cache:
            return None
        beginning = self._beginnings.find(query.beginning, versions, now, query.control.max_age)
        if beginning is None:
            return None
        return beginning._replace(tokens=beginning.tokens[: query.request.params.max_tokens])

    def facts(self) -> StoreFacts:
        """Size of the cache."""
        counts = self._beginnings.counts()
        return StoreFacts(counts.entries, counts.nbytes, counts.evictions)

    # -- as a listener -------------------------------------------------------------------------------

    def stored(self, query: CacheQuery, entry: Entry) -> None:
        """Store a complete response as the beginning of longer ones, unless a stop string ended it."""
        if entry.reason is FinishReason.LENGTH or entry.stop_token is not None:
            whole = UnfinishedAnswer(
                entry.tokens, entry.seconds, entry.versions, entry.created, entry.expires
            )
            self.interrupted(query, whole)

    def interrupted(self, query: CacheQuery, beginning: UnfinishedAnswer) -> None:
        """Store the beginning of an unfinished response."""
        if _resumable(query):
            self._beginnings.keep(query.beginning, beginning)

    def cleared(self, tag: str) -> None:
        """Do nothing: unfinished responses have the versions of their tags."""

    def barred(self, served: Served) -> None:
        """Drop the beginning of a wrong response."""
        self._beginnings.forget(served.beginning)


def _resumable(query: CacheQuery) -> bool:
    """Whether a response can be resumed from its tokens alone, and the request allows caching."""
    return query.allowed.exact and not query.allowed.pool and query.request.params.logprobs is None
