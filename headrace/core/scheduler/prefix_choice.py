"""Which of the first few of a line goes next, when the first one is not the best."""

from __future__ import annotations

from collections.abc import Sequence as Many

from headrace.core.memory.block_pool import BlockPool
from headrace.core.sequence import Sequence


class LongestPrefix:
    """The one of whose tokens most are in the cache, or are being computed by a running one right now.

    So requests that share a prefix follow each other while it is there, and a prefix is used before it is evicted
    (SGLang's longest-prefix-match, with the line's bound on being passed over). Among equals those of the group that
    went last (`Request.affinity`) go on, then whoever is first.
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
