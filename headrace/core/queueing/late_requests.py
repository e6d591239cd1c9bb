"""Who is given up when not all of those that wait can be in time.

Served one after the other, a line under overload makes everybody start at the last moment, and whoever misses it has
been waiting for nothing. To give up the longest prompts before that happens saves more of the others than any other
choice does (Moore, 1968, there for due times in place of latest starts).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from headrace.core.sequence import Sequence


def given_up(line: Iterable[Sequence], now: float) -> list[Sequence]:
    """The fewest without whom each of the others starts in time, one after the other in the order of the line.

    ``line`` is by latest start; each takes its ``prompt_seconds``.
    """
    kept: list[tuple[float, int, Sequence]] = []
    lost = []
    for number, sequence in enumerate(line):
        late = now > sequence.latest_start
        heapq.heappush(kept, (-sequence.prompt_seconds, number, sequence))
        now += sequence.prompt_seconds
        if late:
            _, _, longest = heapq.heappop(kept)
            now -= longest.prompt_seconds
            lost.append(longest)
    return lost
