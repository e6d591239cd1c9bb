"""Continuation indexes of all scopes, one each, within one memory limit.

A scope separates what must not mix: tenant and salt, engine, adapter. Scopes share nothing, not even the buckets of a
table. So neither a proposal nor its duration reveals another scope's outputs. Speculative decoding calls `propose`;
finished answers are added with `add`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from headrace.core.drafting.continuation_index import (
    BYTES_PER_TOKEN,
    INITIAL_TOKENS,
    NO_PROPOSAL,
    ContinuationIndex,
    Proposal,
)


class ProposalCounts(NamedTuple):
    """Sizes of the indexes, and totals since the start."""

    scopes: int
    tokens: int
    nbytes: int
    outputs: int
    evicted_scopes: int


class ScopedIndexes:
    """Indexes of at most ``max_bytes`` together; with less than one smallest index, nothing is stored.

    A new scope replaces the least recently used one. A scope only grows into free memory; without it, it overwrites
    its own oldest outputs.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._scopes: OrderedDict[bytes, ContinuationIndex] = OrderedDict()
        self._nbytes = 0
        self._evicted = 0

    def add(
        self, scope: bytes, output: Sequence[int], lead: Sequence[int] = (), *, continued: bool = False
    ) -> None:
        """Add the tokens of a finished answer or the next part of them, as `ContinuationIndex.add`."""
        index = self._scopes.get(scope)
        if index is None:
            index = self._open(scope)
            if index is None:
                return
        self._scopes.move_to_end(scope)
        before = index.nbytes
        index.add(output, lead, continued=continued, max_bytes=self._max_bytes - self._nbytes + before)
        self._nbytes += index.nbytes - before

    def propose(self, scope: bytes, context: Sequence[int], max_tokens: int) -> Proposal:
        """The proposed tokens after ``context``, from outputs of this scope only."""
        index = self._scopes.get(scope)
        if index is None:
            return NO_PROPOSAL
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
        needed = INITIAL_TOKENS * BYTES_PER_TOKEN
        if needed > self._max_bytes:
            return None
        while self._nbytes + needed > self._max_bytes:
            _, dropped = self._scopes.popitem(last=False)
            self._nbytes -= dropped.nbytes
            self._evicted += 1
        index = self._scopes[scope] = ContinuationIndex()
        self._nbytes += index.nbytes
        return index
