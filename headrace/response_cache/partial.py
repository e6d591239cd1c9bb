"""The partial cache (L4): resumes unfinished responses.

It receives responses like other keepers, and is searched before one is computed. Only an equal deterministic request
resumes a response, so the response does not change. Nothing is stored on disk.
"""

from __future__ import annotations

from headrace.core.events import Layer
from headrace.core.ports import StoreFacts
from headrace.core.request import FinishReason
from headrace.response_cache.rules.partial.unfinished_answers import UnfinishedAnswer, UnfinishedAnswers
from headrace.response_cache.rules.response.entry import Entry, Served
from headrace.response_cache.rules.response.query import CacheQuery


class Partial:
    """Unfinished responses of one engine; ``resume_bytes`` is the memory for them."""

    def __init__(self, resume_bytes: int) -> None:
        self.layer = Layer.PARTIAL
        self._beginnings = UnfinishedAnswers(resume_bytes)

    def resumed(
        self, ask: CacheQuery, versions: tuple[tuple[str, int], ...], now: float
    ) -> UnfinishedAnswer | None:
        """The stored beginning of the response to ``ask``, cut to its maximum length, or None. ``now`` is Unix time."""
        if not _resumable(ask) or ask.control.no_cache:
            return None
        beginning = self._beginnings.find(ask.beginning, versions, now, ask.control.max_age)
        if beginning is None:
            return None
        return beginning._replace(tokens=beginning.tokens[: ask.request.params.max_tokens])

    def facts(self) -> StoreFacts:
        """Size of the cache."""
        counts = self._beginnings.counts()
        return StoreFacts(counts.entries, counts.nbytes, counts.evictions)

    # -- as a keeper -------------------------------------------------------------------------------

    def kept(self, ask: CacheQuery, entry: Entry) -> None:
        """Store a complete response as the beginning of longer ones, unless a stop string ended it."""
        if entry.reason is FinishReason.LENGTH or entry.stop_token is not None:
            whole = UnfinishedAnswer(
                entry.tokens, entry.seconds, entry.versions, entry.created, entry.expires
            )
            self.broken_off(ask, whole)

    def broken_off(self, ask: CacheQuery, beginning: UnfinishedAnswer) -> None:
        """Store the beginning of an unfinished response."""
        if _resumable(ask):
            self._beginnings.keep(ask.beginning, beginning)

    def cleared(self, tag: str) -> None:
        """Do nothing: unfinished responses have the versions of their tags."""

    def barred(self, served: Served) -> None:
        """Drop the beginning of a wrong response."""
        self._beginnings.forget(served.beginning)


def _resumable(ask: CacheQuery) -> bool:
    """Whether a response can be resumed from its tokens alone, and the request allows caching."""
    return ask.allowed.exact and not ask.allowed.pool and ask.request.params.logprobs is None
