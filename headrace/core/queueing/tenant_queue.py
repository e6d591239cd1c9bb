"""The waiting requests of one tenant in one class, and which of them is next.

```
 timely: can still meet the TTFT target, ordered by latest start
   ──(not all can meet it)──>  late: ordered by rank; receives LATE_SHARE of the prefill work beside the timely ones
```
A sequence that ends while it waits is not searched for. It stays in its heap and is dropped when it is reached. All
such entries are swept out before they outnumber the waiting sequences.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many
from typing import Protocol

from headrace.core.sequence import Rank, Sequence, Status

# Which requests are deferred when not all waiting ones can meet their TTFT target.
#
# Under overload, a queue served by latest start makes all requests start at the last moment, and many miss it.
# Deferring the longest prompts first lets the most other requests meet theirs (Moore, 1968, for due times in place of
# latest starts).


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


SWEEP = 64
"""Ended sequences that a heap may hold in addition to as many as wait, because low ranks might never be reached."""

WINDOW = 32
"""Sequences among which a pick policy chooses: bounds the cost of a choice."""

LATE_SHARE = 1 / 16  # see docs/decisions/scheduling.md#requests-that-cannot-meet-their-deadline
"""Prefill work of late requests relative to that of timely ones. A late request that runs makes another one late, so
the share is small; without it, late requests would starve."""

LITTLE_SLACK_SECONDS = 0.25
"""The first request of a queue is not passed over when its latest start is within this many seconds."""


class PolicyFailed(Exception):
    """A policy raised or returned an invalid value for ``sequence``; that sequence alone fails."""

    def __init__(self, sequence: Sequence, policy: str, error: Exception) -> None:
        super().__init__(f"the {policy} policy failed: {type(error).__name__}: {error}")
        self.sequence = sequence


class PickPolicy(Protocol):
    """Chooses which of the first few sequences of a queue is next, by its index."""

    def pick(self, window: Many[Sequence]) -> int: ...


class Heap:
    """Waiting sequences by a key, lowest first. Its length counts only sequences that still wait."""

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, Sequence]] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        """Waiting sequences, in no particular order."""
        return (sequence for _, sequence in self._heap if sequence.status is not Status.FINISHED)

    def push(self, key: Rank, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (key, sequence))
        self._length += 1

    def peek(self) -> Sequence | None:
        while self._heap and self._heap[0][1].status is Status.FINISHED:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence | None:
        sequence = self.peek()
        if sequence is not None:
            heapq.heappop(self._heap)
            self._length -= 1
        return sequence

    def take(self, count: int) -> list[tuple[Rank, Sequence]]:
        """Remove and return the first ``count`` waiting sequences with their keys."""
        heap, taken = self._heap, list[tuple[Rank, Sequence]]()
        while heap and len(taken) < count:
            entry = heapq.heappop(heap)
            if entry[1].status is not Status.FINISHED:
                taken.append(entry)
        self._length -= len(taken)
        return taken

    def put_back(self, taken: Iterable[tuple[Rank, Sequence]]) -> None:
        """Put sequences back at their places."""
        for entry in taken:
            heapq.heappush(self._heap, entry)
            self._length += 1

    def note_end(self) -> None:
        """A sequence of this heap has just entered ``FINISHED``."""
        self._length -= 1
        if len(self._heap) > 2 * self._length + SWEEP:
            self._heap = [entry for entry in self._heap if entry[1].status is not Status.FINISHED]
            heapq.heapify(self._heap)


class TenantQueue:
    """Earliest latest start first, while it can be met; requests that cannot meet it wait behind, with a share.

    A request that has missed its TTFT target gains nothing by running first, so requests that can still meet theirs
    go before it. This keeps goodput from collapsing under overload, where first come, first served makes all requests
    late. Without latency targets the order is rank alone. ``pick`` may prefer another one of the first `WINDOW` to
    the first one, but not more than ``max_passes`` times, and not when the first one has little slack.
    """

    def __init__(self, pick: PickPolicy | None = None, max_passes: int = 0) -> None:
        self._timely = Heap()
        self._late = Heap()
        self._separated_at = -math.inf  # when late requests were last separated from timely ones
        self._owed_seconds = 0.0  # prefill time owed to late requests
        self._pick = pick
        self._max_passes = max_passes

    def __len__(self) -> int:
        return len(self._timely) + len(self._late)

    def __iter__(self) -> Iterator[Sequence]:
        """Waiting sequences, in no particular order."""
        yield from self._timely
        yield from self._late

    def ahead_of(self, sequence: Sequence) -> list[Sequence]:
        """The sequences ahead of one of this queue, by their present places, in no particular order."""
        position = _position(sequence)
        return [each for each in self if _position(each) < position]

    def push(self, sequence: Sequence) -> None:
        """Add a sequence at its place."""
        if sequence.late:
            self._late.push(sequence.rank, sequence)
        else:
            self._timely.push((sequence.latest_start, *sequence.rank), sequence)

    def peek(self, now: float) -> Sequence | None:
        """The first sequence, which a pick policy may still pass over."""
        return self._next(now).peek()

    def pop(self, now: float) -> Sequence | None:
        """Remove and return the next sequence; ``now`` never goes back.

        Raises:
            PolicyFailed: the pick policy failed; no sequence was removed.
        """
        heap = self._next(now)
        first = heap.peek()
        if first is None or self._pick is None or len(heap) == 1:
            return heap.pop()
        if first.passes >= self._max_passes or first.latest_start - now < LITTLE_SLACK_SECONDS:
            return heap.pop()
        taken = heap.take(WINDOW)
        try:
            index = self._pick.pick([sequence for _, sequence in taken])
            if index < 0:
                raise IndexError(f"index {index} is outside 0 to {len(taken) - 1}")
            _, chosen = taken.pop(index)
        except Exception as error:
            raise PolicyFailed(first, "pick", error) from error
        finally:
            heap.put_back(taken)
        chosen.overtakes = None if chosen is first else first
        return chosen

    def pop_first(self, now: float) -> Sequence | None:
        """Remove and return the first sequence, which no pick policy may pass over."""
        return self._next(now).pop()

    def note_start(self, sequence: Sequence) -> None:
        """A sequence that was popped has started to run."""
        if sequence.overtakes is not None:
            sequence.overtakes.passes += 1
            sequence.overtakes = None
        if self._late and not sequence.late:
            self._owed_seconds += LATE_SHARE * sequence.prompt_seconds
        elif self._timely and sequence.late:
            self._owed_seconds -= sequence.prompt_seconds

    def note_end(self, sequence: Sequence) -> None:
        """A waiting sequence of this queue has just entered ``FINISHED``."""
        (self._late if sequence.late else self._timely).note_end()

    def _next(self, now: float) -> Heap:
        if self._separated_at < now:
            while self._defer_late(now):
                pass
            self._separated_at = now
        late = self._late.peek()
        if late is not None and (not self._timely or self._owed_seconds >= late.prompt_seconds):
            return self._late
        return self._timely

    def _defer_late(self, now: float) -> bool:
        """Move requests to the late heap so that the rest of the window can be in time; whether any moved."""
        first = self._timely.peek()
        if first is None or first.latest_start == math.inf:
            return False
        taken = self._timely.take(WINDOW)
        deferred = requests_to_defer([sequence for _, sequence in taken], now)
        for sequence in deferred:
            sequence.late = True
            self._late.push(sequence.rank, sequence)
        self._timely.put_back(entry for entry in taken if not entry[1].late)
        return bool(deferred)


def _position(sequence: Sequence) -> Rank:
    return (sequence.late, 0.0 if sequence.late else sequence.latest_start, *sequence.rank)
