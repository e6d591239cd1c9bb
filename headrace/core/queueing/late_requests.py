"""Which requests are deferred when not all waiting ones can meet their TTFT target.

Under overload, a queue served by latest start makes all requests start at the last moment, and many miss it. Deferring
the longest prompts first lets the most other requests meet theirs (Moore, 1968, for due times in place of latest
starts).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from headrace.core.sequence import Sequence


def requests_to_defer(queue: Iterable[Sequence], now: float) -> list[Sequence]:
    """The fewest sequences to defer so that all others start in time, one after the other.

    ``queue`` is ordered by latest start; each sequence takes its ``prompt_seconds``.
    """
    kept: list[tuple[float, int, Sequence]] = []
    deferred = []
    for number, sequence in enumerate(queue):
        late = now > sequence.latest_start
        heapq.heappush(kept, (-sequence.prompt_seconds, number, sequence))
        now += sequence.prompt_seconds
        if late:
            _, _, longest = heapq.heappop(kept)
            now -= longest.prompt_seconds
            deferred.append(longest)
    return deferred
