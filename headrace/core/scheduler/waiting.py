"""The queue of sequences that wait for a slot, lowest rank first.

A sequence that ends while it waits is not searched for: it stays in the heap, is dropped when it is met, and all
such are swept out before they outnumber those that wait. It does not know why a sequence waits or when one may
join; that is the word of `scheduler` and its admission policy.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from headrace.core.sequence import Sequence, Status

SWEEP = 64
"""Ended sequences that may lie in the heap beside as many as wait: those low in rank might never be met."""


class WaitingQueue:
    """A heap by rank; its length counts only those that really wait."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, ...], Sequence]] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        """Those that wait, in no particular order."""
        return (sequence for _, sequence in self._heap if sequence.status is not Status.FINISHED)

    def push(self, sequence: Sequence) -> None:
        """Let a sequence wait at the place of its rank."""
        heapq.heappush(self._heap, (sequence.rank, sequence))
        self._length += 1

    def peek(self) -> Sequence | None:
        """The one that is served next."""
        while self._heap and self._heap[0][1].status is Status.FINISHED:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence | None:
        """Take out the one that is served next."""
        sequence = self.peek()
        if sequence is not None:
            heapq.heappop(self._heap)
            self._length -= 1
        return sequence

    def note_end(self) -> None:
        """One that waited has just entered ``FINISHED``."""
        self._length -= 1
        if len(self._heap) > 2 * self._length + SWEEP:
            self._heap = [entry for entry in self._heap if entry[1].status is not Status.FINISHED]
            heapq.heapify(self._heap)
