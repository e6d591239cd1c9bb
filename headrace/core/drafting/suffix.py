"""Suffix decoding: proposes what followed the last tokens in past outputs of the same tenant.

```
 ended ──► waiting outputs ──► index of the scope (tenant, salt, adapter) ──► propose
           at most CHUNK tokens at a time
```
The index is `core.cache.partial.continuation_index`: past places vote on each next token, and a proposal ends where the
chance that all of it is right becomes small, so it is longer the longer the agreement is. Scopes share nothing: neither
a proposal nor its duration shows another scope's text.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from headrace.core.block_keys import root_key
from headrace.core.cache.partial.scoped_indexes import ProposalCounts, ScopedIndexes
from headrace.core.cache.response.tags import EVERYTHING, tenant_tag
from headrace.core.drafting.proposal import DraftAsk, Proposal
from headrace.core.request import Request

LEAD = 8
"""Tokens at the end of the prompt that are indexed with an output."""

CHUNK = 128
"""Tokens indexed at a time: bounds what they add to a step."""

WAITING = 1024
"""Outputs that wait for being indexed; the oldest are dropped."""


class _Waiting(NamedTuple):
    """Tokens of an output to index after ``lead``; ``goes_on``: the part before them has been indexed."""

    scope: bytes
    output: list[int]
    lead: tuple[int, ...]
    goes_on: bool = False


class SuffixProposer:
    """Proposes from past outputs of the request's scope.

    Args:
        most: the longest proposal in tokens.
        max_bytes: memory of the indexes of all scopes; the least recently used scope is evicted.
    """

    name = "suffix"

    def __init__(self, most: int, max_bytes: int = 64 << 20) -> None:
        self._most = most
        self._indexes = ScopedIndexes(max_bytes)
        self._outputs: deque[_Waiting] = deque(maxlen=WAITING)
        self._forgotten: deque[bytes] = deque()
        self.counts: ProposalCounts = self._indexes.counts()
        """Sizes and totals after the last change; may be read from another thread."""

    @property
    def nbytes(self) -> int:
        """Memory of the indexes."""
        return self.counts.nbytes

    def propose(self, asks: Sequence[DraftAsk]) -> Sequence[Proposal | None]:
        """As `core.drafting.proposal.Proposer.propose`."""
        if self._outputs or self._forgotten:
            self._catch_up()
        return [self._propose(ask) for ask in asks]

    def ended(self, request: Request, tokens: list[int]) -> None:
        """Index the output, unless the request forbids it."""
        output = tokens[len(request.tokens) :]
        if request.indexed and output:
            self._outputs.append(_Waiting(scope_of(request), output, request.tokens[-LEAD:]))

    def forget(self, tag: str) -> None:
        """Drop the outputs of the tenant with this cache tag, or all, before the next proposal.

        It may be called from another thread.
        """
        self._forgotten.append(b"" if tag == EVERYTHING else _digest(tag))

    def _catch_up(self) -> None:
        while self._forgotten:
            prefix = self._forgotten.popleft()
            self._indexes.forget(prefix)
            kept = [each for each in self._outputs if not each.scope.startswith(prefix)]
            self._outputs = deque(kept, maxlen=WAITING)
        left = CHUNK
        while self._outputs and left > 0:
            scope, output, lead, goes_on = self._outputs.popleft()
            part, rest = output[:left], output[left:]
            self._indexes.add(scope, part, lead, goes_on=goes_on)
            left -= len(part)
            if rest:
                self._outputs.appendleft(_Waiting(scope, rest, (*lead, *part)[-LEAD:], goes_on=True))
        self.counts = self._indexes.counts()

    def _propose(self, ask: DraftAsk) -> Proposal | None:
        request = ask.request
        scope = _scope(request.tenant, request.salt, request.adapter)
        found = self._indexes.propose(scope, ask.tokens, min(self._most, ask.most))
        return Proposal(found.tokens, found.probabilities, self.name) if found.tokens else None


def scope_of(request: Request) -> bytes:
    """The scope within which outputs are proposed: the tenant, and the salt and adapter that separate prefixes."""
    return _scope(request.tenant, request.salt, request.adapter)


@lru_cache(maxsize=1024)
def _scope(tenant: str, salt: str, adapter: str) -> bytes:
    return _digest(tenant_tag(tenant)) + root_key(salt, adapter)


def _digest(tag: str) -> bytes:
    return hashlib.sha256(tag.encode()).digest()
