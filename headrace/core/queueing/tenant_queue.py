"""The line of one tenant in one class: who of them goes next.

```
 timely: can still make their first token in time, by latest start
   ──(given up: not all can)──>  late: by rank; of what is computed beside the timely, LATE_SHARE is theirs
```
A sequence that ends while it waits is not searched for: it stays in its heap, is dropped when it is met, and all such
are swept out before they outnumber those that wait.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many
from typing import Protocol

from headrace.core.queueing.late_requests import given_up
from headrace.core.sequence import Rank, Sequence, Status

SWEEP = 64
"""Ended sequences that may lie in a heap beside as many as wait: those low in rank might never be met."""

WINDOW = 32
"""Sequences among which a pick policy chooses: bounds the cost of a choice."""

LATE_SHARE = 1 / 16
"""What is computed of the prompts of the late, to those of others that could still be in time: who goes late has waited
for nothing, and makes somebody else late."""

LITTLE_SLACK_SECONDS = 0.25
"""The first of a line is not passed over when it must start within so many seconds."""


class PolicyFailed(Exception):
    """A policy raised or returned nonsense when it was asked for ``sequence``, which pays for it alone."""

    def __init__(self, sequence: Sequence, policy: str, error: Exception) -> None:
        super().__init__(f"the {policy} policy failed: {type(error).__name__}: {error}")
        self.sequence = sequence


class PickPolicy(Protocol):
    """Which of the first few of a line goes next (their index), when there is a better one than the first."""

    def pick(self, window: Many[Sequence]) -> int: ...


class Heap:
    """Waiting sequences by a key, lowest first; its length counts only those that really wait."""

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, Sequence]] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        """Those that wait, in no particular order."""
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
        """Take out the first few of those that wait, with their keys."""
        heap, taken = self._heap, list[tuple[Rank, Sequence]]()
        while heap and len(taken) < count:
            entry = heapq.heappop(heap)
            if entry[1].status is not Status.FINISHED:
                taken.append(entry)
        self._length -= len(taken)
        return taken

    def put_back(self, taken: Iterable[tuple[Rank, Sequence]]) -> None:
        """Let them wait again where they were."""
        for entry in taken:
            heapq.heappush(self._heap, entry)
            self._length += 1

    def note_end(self) -> None:
        """One that waited here has just entered ``FINISHED``."""
        self._length -= 1
        if len(self._heap) > 2 * self._length + SWEEP:
            self._heap = [entry for entry in self._heap if entry[1].status is not Status.FINISHED]
            heapq.heapify(self._heap)


class TenantQueue:
    """Earliest latest-start first, while it can be met; who is given up waits behind, with a share.

    A first token that is late already is late whatever comes next, so those who can still make theirs go first: this
    is what keeps goodput from collapsing where first come, first served makes everybody late. Where nobody has a wish
    the order is rank alone. ``pick`` may prefer another of the first `WINDOW` to the first one, but not more than
    ``max_passes`` times, nor when the first has little slack.
    """

    def __init__(self, pick: PickPolicy | None = None, max_passes: int = 0) -> None:
        self._timely = Heap()
        self._late = Heap()
        self._judged = -math.inf  # when those that can be in time were told from the others
        self._owed_seconds = 0.0  # of prompts of the late
        self._pick = pick
        self._max_passes = max_passes

    def __len__(self) -> int:
        return len(self._timely) + len(self._late)

    def __iter__(self) -> Iterator[Sequence]:
        """Those that wait, in no particular order."""
        yield from self._timely
        yield from self._late

    def ahead_of(self, sequence: Sequence) -> list[Sequence]:
        """Those that wait before one of this line, by their places as they are, in no particular order."""
        place = _place(sequence)
        return [each for each in self if _place(each) < place]

    def push(self, sequence: Sequence) -> None:
        """Let a sequence wait at its place."""
        if sequence.late:
            self._late.push(sequence.rank, sequence)
        else:
            self._timely.push((sequence.latest_start, *sequence.rank), sequence)

    def peek(self, now: float) -> Sequence | None:
        """The first one, which a pick policy may yet pass over."""
        return self._next(now).peek()

    def pop(self, now: float) -> Sequence | None:
        """Take out the one that goes next; ``now`` never goes back.

        Raises:
            PolicyFailed: the pick policy failed; nobody was taken out.
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
                raise IndexError(f"{index} is none of {len(taken)}")
            _, chosen = taken.pop(index)
        except Exception as error:
            raise PolicyFailed(first, "pick", error) from error
        finally:
            heap.put_back(taken)
        chosen.overtakes = None if chosen is first else first
        return chosen

    def note_start(self, sequence: Sequence) -> None:
        """One that was taken out has begun to run."""
        if sequence.overtakes is not None:
            sequence.overtakes.passes += 1
            sequence.overtakes = None
        if self._late and not sequence.late:
            self._owed_seconds += LATE_SHARE * sequence.prompt_seconds
        elif self._timely and sequence.late:
            self._owed_seconds -= sequence.prompt_seconds

    def note_end(self, sequence: Sequence) -> None:
        """One that waited here has just entered ``FINISHED``."""
        (self._late if sequence.late else self._timely).note_end()

    def _next(self, now: float) -> Heap:
        if self._judged < now:
            while self._give_up(now):
                pass
            self._judged = now
        late = self._late.peek()
        if late is not None and (not self._timely or self._owed_seconds >= late.prompt_seconds):
            return self._late
        return self._timely

    def _give_up(self, now: float) -> bool:
        """Let those of the first few wait behind with whom the others cannot be in time; whether there were any."""
        first = self._timely.peek()
        if first is None or first.latest_start == math.inf:
            return False
        taken = self._timely.take(WINDOW)
        lost = given_up([sequence for _, sequence in taken], now)
        for sequence in lost:
            sequence.late = True
            self._late.push(sequence.rank, sequence)
        self._timely.put_back(entry for entry in taken if not entry[1].late)
        return bool(lost)


def _place(sequence: Sequence) -> Rank:
    return (sequence.late, 0.0 if sequence.late else sequence.latest_start, *sequence.rank)
