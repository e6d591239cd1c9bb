"""Chooses which of the first waiting requests goes next by its cached prefix."""

from __future__ import annotations

from collections.abc import Sequence as Many

from headrace.core.memory.block_pool import BlockPool
from headrace.core.sequence import Sequence


class LongestPrefix:
    """Picks the request with the longest prefix that is cached, or that a running request is computing.

    Requests that share a prefix then follow each other, and a prefix is used before it is evicted (SGLang's
    longest-prefix-match, bounded by ``max_passes`` of the queue). Ties go to the group served last
    (`Request.affinity`), then to the first in the queue.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._group = ""

    def pick(self, window: Many[Sequence]) -> int:
        size = self._pool.block_size
        best, best_score = 0, (-1, False)
        for i, sequence in enumerate(window):
            group = sequence.request.affinity
            score = (self._pool.leading(sequence.full_keys(size)), bool(group) and group == self._group)
            if score > best_score:
                best, best_score = i, score
        self._group = window[best].request.affinity
        return best
