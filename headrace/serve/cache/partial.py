"""The partial cache (L4): resumes unfinished responses, and indexes outputs as drafts for speculative decoding.

It is informed of responses like other keepers, and asked when one is about to be computed. Both uses are lossless: only
the same deterministic request resumes a response, and drafts from the index are verified. Nothing is stored on disk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from headrace.core.block_keys import root_key
from headrace.core.cache.partial.scoped_indexes import ScopedIndexes
from headrace.core.cache.partial.unfinished_answers import UnfinishedAnswer, UnfinishedAnswers
from headrace.core.cache.response.entry import Entry, Served, StoreFacts
from headrace.core.cache.response.query import CacheQuery
from headrace.core.cache.response.tags import EVERYTHING, tenant_tag
from headrace.core.events import Emitted, Finished, Layer, PromptScored
from headrace.core.request import FinishReason, Request
from headrace.serve.answer import Answer

LEAD = 8
"""Tokens at the end of the prompt that are indexed with an output."""


class Partial:
    """Unfinished responses and indexed outputs of one engine.

    Args:
        resume_bytes, index_bytes: memory for unfinished responses and for the index of outputs.
    """

    def __init__(self, resume_bytes: int, index_bytes: int) -> None:
        self.layer = Layer.PARTIAL
        self.proposals = ScopedIndexes(index_bytes)
        self._beginnings = UnfinishedAnswers(resume_bytes)

    def resumed(
        self, ask: CacheQuery, versions: tuple[tuple[str, int], ...], now: float
    ) -> UnfinishedAnswer | None:
        """The known beginning of the response to ``ask``, cut to its length, or None. ``now`` is Unix time."""
        if not _resumable(ask) or ask.control.no_cache:
            return None
        beginning = self._beginnings.find(ask.beginning, versions, now, ask.control.max_age)
        if beginning is None:
            return None
        return beginning._replace(tokens=beginning.tokens[: ask.request.params.max_tokens])

    def heard(self, request: Request, output: Sequence[int]) -> None:
        """Index the tokens of a response that has ended."""
        self.proposals.add(scope_of(request), output, request.tokens[-LEAD:])

    def facts(self) -> StoreFacts:
        """Size of both uses together."""
        beginnings, outputs = self._beginnings.counts(), self.proposals.counts()
        return StoreFacts(
            beginnings.entries + outputs.outputs,
            beginnings.nbytes + outputs.nbytes,
            beginnings.evictions + outputs.evicted_scopes,
        )

    # -- as a keeper -------------------------------------------------------------------------------

    def kept(self, ask: CacheQuery, entry: Entry) -> None:
        """A complete response is the beginning of every longer one, unless a stop string ended it."""
        self.heard(ask.request, entry.tokens)
        if entry.reason is FinishReason.LENGTH or entry.stop_token is not None:
            whole = UnfinishedAnswer(
                entry.tokens, entry.seconds, entry.versions, entry.created, entry.expires
            )
            self.broken_off(ask, whole)

    def broken_off(self, ask: CacheQuery, beginning: UnfinishedAnswer) -> None:
        """A response was left unfinished."""
        if _resumable(ask):
            self._beginnings.keep(ask.beginning, beginning)

    def cleared(self, tag: str) -> None:
        """Drop the outputs of a tenant, or all. Unfinished responses have the versions of their tags."""
        self.proposals.forget(b"" if tag == EVERYTHING else _tenant(tag))

    def barred(self, served: Served) -> None:
        """Drop the beginning of a wrong response."""
        self._beginnings.forget(served.beginning)


def scope_of(request: Request) -> bytes:
    """The scope within which outputs are proposed: the tenant, and the salt that separates prefixes."""
    return _tenant(tenant_tag(request.tenant)) + root_key(request.salt, request.adapter)


def _tenant(tag: str) -> bytes:
    return hashlib.sha256(tag.encode()).digest()


def _resumable(ask: CacheQuery) -> bool:
    """Whether the tokens alone determine how a response continues, and the request allows caching."""
    return ask.allowed.exact and not ask.allowed.pool and ask.request.params.logprobs is None


class RecordedAnswer(Answer):
    """An answer straight from the engine; each output is passed to ``heard`` when it has ended."""

    def __init__(
        self,
        requests: Sequence[Request],
        interval: int,
        heard: Callable[[Request, Sequence[int]], None],
    ) -> None:
        super().__init__(requests, interval)
        self._outputs: list[list[int]] = [[] for _ in requests]
        self._heard = heard

    def tell(self, index: int, event: Emitted | PromptScored | Finished) -> None:
        """As `Answer.tell`."""
        super().tell(index, event)
        if isinstance(event, Emitted):
            self._outputs[index] += event.tokens
        elif isinstance(event, Finished) and event.reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._heard(self.requests[index], self._outputs[index])
