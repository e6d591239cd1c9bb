"""The cache of partial answers (L4): where an answer was left, and what past outputs say comes next.

It is told of answers as other keepers are, and asked when one is about to be computed. Both uses are lossless: a
beginning is taken up only by the same deterministic request, and what the index proposes is for a verifier. It keeps
nothing on disk. Next on the road: speculative decoding draws from `proposals`.
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
from headrace.serve.service import Answer

LEAD = 8
"""Tokens of the prompt's end that an output is indexed behind."""


class Partial:
    """Beginnings and proposals of one engine.

    Args:
        resume_bytes, index_bytes: memory for beginnings and for the index of outputs.
    """

    def __init__(self, resume_bytes: int, index_bytes: int) -> None:
        self.layer = Layer.PARTIAL
        self.proposals = ScopedIndexes(index_bytes)
        self._beginnings = UnfinishedAnswers(resume_bytes)

    def resumed(
        self, ask: CacheQuery, versions: tuple[tuple[str, int], ...], now: float
    ) -> UnfinishedAnswer | None:
        """How the answer to ``ask`` begins, cut to its length; None where that is not known. ``now``: Unix time."""
        if not _resumable(ask) or ask.control.no_cache:
            return None
        beginning = self._beginnings.find(ask.beginning, versions, now, ask.control.max_age)
        if beginning is None:
            return None
        return beginning._replace(tokens=beginning.tokens[: ask.request.params.max_tokens])

    def heard(self, request: Request, output: Sequence[int]) -> None:
        """An answer has ended; its tokens may be indexed."""
        self.proposals.add(scope_of(request), output, request.tokens[-LEAD:])

    def facts(self) -> StoreFacts:
        """How full it is, both uses together."""
        beginnings, outputs = self._beginnings.counts(), self.proposals.counts()
        return StoreFacts(
            beginnings.entries + outputs.outputs,
            beginnings.nbytes + outputs.nbytes,
            beginnings.evictions + outputs.evicted_scopes,
        )

    # -- as a keeper -------------------------------------------------------------------------------

    def kept(self, ask: CacheQuery, entry: Entry) -> None:
        """A whole answer is the beginning of every longer one, unless a stop string ended it."""
        self.heard(ask.request, entry.tokens)
        if entry.reason is FinishReason.LENGTH or entry.stop_token is not None:
            whole = UnfinishedAnswer(
                entry.tokens, entry.seconds, entry.versions, entry.created, entry.expires
            )
            self.broken_off(ask, whole)

    def broken_off(self, ask: CacheQuery, beginning: UnfinishedAnswer) -> None:
        """An answer ended before its end."""
        if _resumable(ask):
            self._beginnings.keep(ask.beginning, beginning)

    def cleared(self, tag: str) -> None:
        """Drop the outputs of a tenant, or all; beginnings know their tags' versions."""
        self.proposals.forget(b"" if tag == EVERYTHING else _tenant(tag))

    def barred(self, served: Served) -> None:
        """Forget how a wrong answer begins."""
        self._beginnings.forget(served.beginning)


def scope_of(request: Request) -> bytes:
    """Within which outputs may be proposed to each other: the tenant, and as far as prefixes are shared."""
    return _tenant(tenant_tag(request.tenant)) + root_key(request.salt, request.adapter)


def _tenant(tag: str) -> bytes:
    return hashlib.sha256(tag.encode()).digest()


def _resumable(ask: CacheQuery) -> bool:
    """Whether the tokens alone say how an answer goes on, and the caller wants it kept at all."""
    return ask.allowed.exact and not ask.allowed.pool and ask.request.params.logprobs is None


class RecordedAnswer(Answer):
    """An answer that comes straight from the engine; each output is passed on to ``heard`` when it has ended."""

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
