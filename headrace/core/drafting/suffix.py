"""Suffix decoding: proposes the tokens that followed the last ones in past outputs of the same tenant.

```
 ended ──► pending outputs ──► index of the scope (tenant, salt, adapter) ──► propose
           at most CHUNK tokens at a time
```
The index is `core.drafting.continuation_index`: past occurrences vote on each next token. A proposal ends where
the probability that all of it is accepted becomes small, so a longer match makes it longer. Scopes share nothing:
neither a proposal nor the time to find it reveals another scope's text.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from headrace.core.block_keys import root_key
from headrace.core.drafting.proposal import DraftRow, Proposal
from headrace.core.drafting.scoped_indexes import ProposalCounts, ScopedIndexes
from headrace.core.request import Request

LEAD = 8
"""Number of tokens at the end of the prompt that are indexed with an output."""

CHUNK = 128  # see docs/decisions/speculative-decoding.md#search-of-texts-for-drafts
"""Maximum number of tokens indexed at a time, which bounds the time added to a step."""

MAX_PENDING = 1024
"""Maximum number of outputs that wait for indexing; the oldest are dropped."""


class _PendingOutput(NamedTuple):
    """Tokens of an output to index after ``lead``; ``continued``: the output's tokens before them are indexed."""

    scope: bytes
    output: list[int]
    lead: tuple[int, ...]
    continued: bool = False


class SuffixProposer:
    """Proposes from past outputs of the request's scope.

    Args:
        max_tokens: the maximum length of a proposal.
        max_bytes: memory of the indexes of all scopes; the least recently used scope is evicted.
    """

    name = "suffix"

    def __init__(self, max_tokens: int, max_bytes: int = 64 << 20) -> None:
        self._max_tokens = max_tokens
        self._indexes = ScopedIndexes(max_bytes)
        self._pending: deque[_PendingOutput] = deque(maxlen=MAX_PENDING)
        self._forgotten: deque[bytes] = deque()
        self.counts: ProposalCounts = self._indexes.counts()
        """Sizes and totals after the last change; may be read from another thread."""

    @property
    def nbytes(self) -> int:
        """Memory of the indexes."""
        return self.counts.nbytes

    def propose(self, draft_rows: Sequence[DraftRow]) -> Sequence[Proposal | None]:
        """As `core.drafting.proposal.Proposer.propose`."""
        if self._pending or self._forgotten:
            self._index_pending()
        return [self._propose(draft_row) for draft_row in draft_rows]

    def ended(self, request: Request, tokens: list[int]) -> None:
        """Queue the output for indexing, unless the request forbids it."""
        output = tokens[len(request.tokens) :]
        if request.indexed and output:
            self._pending.append(_PendingOutput(scope_of(request), output, request.tokens[-LEAD:]))

    def forget(self, tenant: str | None = None) -> None:
        """Drop the outputs of ``tenant``, or all, before the next proposal.

        It may be called from another thread.
        """
        self._forgotten.append(b"" if tenant is None else _digest(tenant))

    def _index_pending(self) -> None:
        while self._forgotten:
            prefix = self._forgotten.popleft()
            self._indexes.forget(prefix)
            kept = [each for each in self._pending if not each.scope.startswith(prefix)]
            self._pending = deque(kept, maxlen=MAX_PENDING)
        left = CHUNK
        while self._pending and left > 0:
            scope, output, lead, continued = self._pending.popleft()
            part, rest = output[:left], output[left:]
            self._indexes.add(scope, part, lead, continued=continued)
            left -= len(part)
            if rest:
                self._pending.appendleft(_PendingOutput(scope, rest, (*lead, *part)[-LEAD:], continued=True))
        self.counts = self._indexes.counts()

    def _propose(self, draft_row: DraftRow) -> Proposal | None:
        request = draft_row.request
        scope = _scope(request.tenant, request.salt, request.adapter)
        found = self._indexes.propose(scope, draft_row.tokens, min(self._max_tokens, draft_row.max_tokens))
        return Proposal(found.tokens, found.probabilities, self.name) if found.tokens else None


def scope_of(request: Request) -> bytes:
    """The scope within which outputs are proposed: the tenant, the cache salt and the adapter."""
    return _scope(request.tenant, request.salt, request.adapter)


@lru_cache(maxsize=1024)
def _scope(tenant: str, salt: str, adapter: str) -> bytes:
    return _digest(tenant) + root_key(salt, adapter)


def _digest(tenant: str) -> bytes:
    return hashlib.sha256(tenant.encode()).digest()
