"""Past outputs of every scope, each in an index of its own, within one bound of memory.

A scope is whatever must not mix: tenant and salt, engine, adapter. Nothing is shared between scopes, not even the
buckets of a table, so that neither a proposal nor the time it takes says anything about another scope's outputs.
Speculative decoding draws from `propose`; answers that have ended are taken in with `add`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from headrace.core.cache.partial.continuation_index import (
    BYTES_PER_TOKEN,
    NOTHING,
    SMALLEST,
    ContinuationIndex,
    Proposal,
)


class ProposalCounts(NamedTuple):
    """What the indexes hold now, and what they have done since the start."""

    scopes: int
    tokens: int
    nbytes: int
    outputs: int
    evicted_scopes: int


class ScopedIndexes:
    """Indexes of at most ``max_bytes`` together; below one smallest index nothing is kept.

    A new scope takes the place of the one that has not been used for longest. A scope grows only into memory that
    nobody holds; when there is none it overwrites its own oldest outputs.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._scopes: OrderedDict[bytes, ContinuationIndex] = OrderedDict()
        self._nbytes = 0
        self._evicted = 0

    def add(self, scope: bytes, output: Sequence[int], lead: Sequence[int] = ()) -> None:
        """Take in the tokens of an answer that has ended; ``lead`` are the prompt's last ones."""
        index = self._scopes.get(scope)
        if index is None:
            index = self._open(scope)
            if index is None:
                return
        self._scopes.move_to_end(scope)
        before = index.nbytes
        index.add(output, lead, max_bytes=self._max_bytes - self._nbytes + before)
        self._nbytes += index.nbytes - before

    def propose(self, scope: bytes, context: Sequence[int], max_tokens: int) -> Proposal:
        """What may follow ``context``, from outputs of this scope alone."""
        index = self._scopes.get(scope)
        if index is None:
            return NOTHING
        self._scopes.move_to_end(scope)
        return index.propose(context, max_tokens)

    def forget(self, prefix: bytes = b"") -> None:
        """Drop the outputs of all scopes that begin with ``prefix``."""
        for scope in [scope for scope in self._scopes if scope.startswith(prefix)]:
            self._nbytes -= self._scopes.pop(scope).nbytes

    def counts(self) -> ProposalCounts:
        """Sizes and totals."""
        indexes = self._scopes.values()
        return ProposalCounts(
            len(indexes),
            sum(index.tokens for index in indexes),
            self._nbytes,
            sum(index.outputs for index in indexes),
            self._evicted,
        )

    def _open(self, scope: bytes) -> ContinuationIndex | None:
        needed = SMALLEST * BYTES_PER_TOKEN
        if needed > self._max_bytes:
            return None
        while self._nbytes + needed > self._max_bytes:
            _, dropped = self._scopes.popitem(last=False)
            self._nbytes -= dropped.nbytes
            self._evicted += 1
        index = self._scopes[scope] = ContinuationIndex()
        self._nbytes += index.nbytes
        return index
