"""Admission policies: how many requests join the batch, continuously or as static batches (the textbook baseline), and
which of the first waiting ones goes next by its cached prefix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from typing import NamedTuple, Protocol

from headrace.core.memory.block_pool import BlockPool
from headrace.core.sequence import Sequence


class Queue(NamedTuple):
    """The queue as an admission policy sees it. ``admitted`` counts all admissions so far.

    ``batch_seconds`` is how long an incomplete static batch waits, if that is set while running (None: it is not).
    """

    waiting: int
    oldest_arrival: float
    running: int
    admitted: int
    batch_seconds: float | None = None


class AdmissionPolicy(Protocol):
    """How many waiting requests may be admitted now, and if none, when to ask again.

    When nothing runs, it must name a time, and then admit at least one request.
    """

    def admit(self, queue: Queue, now: float) -> int: ...

    def ready_at(self, queue: Queue) -> float: ...


def ask_admission(policy: AdmissionPolicy, queue: Queue, now: float) -> int:
    """How many requests may start.

    Raises:
        ValueError: the policy did not return a count; or whatever the policy raises.
    """
    count = policy.admit(queue, now)
    if not isinstance(count, int) or count < 0:
        raise ValueError(f"{count!r} is not a number of requests")
    return count


def ask_ready_at(policy: AdmissionPolicy, queue: Queue) -> float:
    """When to ask the policy again.

    Raises:
        ValueError: the policy did not return a finite time; or whatever the policy raises.
    """
    due = policy.ready_at(queue)
    if not isinstance(due, int | float) or not due < math.inf:
        raise ValueError(f"{due!r} is not a time at which it will admit a request")
    return due


class Continuous:
    """A request joins the batch at any step in which it fits (iteration-level scheduling, Orca, OSDI '22)."""

    def admit(self, queue: Queue, now: float) -> int:
        return queue.waiting

    def ready_at(self, queue: Queue) -> float:
        return -math.inf


class StaticBatch:
    """Starts ``size`` requests together, and the next batch only when all of them have finished.

    A smaller batch starts when its oldest request has waited for ``timeout`` seconds, or the queue's ``batch_seconds``.
    """

    def __init__(self, size: int, timeout: float) -> None:
        self._size = size
        self._timeout = timeout
        self._admitted_goal = 0

    def admit(self, queue: Queue, now: float) -> int:
        if queue.running == 0:
            if now < self.ready_at(queue):
                return 0
            self._admitted_goal = queue.admitted + min(self._size, queue.waiting)
        return max(0, self._admitted_goal - queue.admitted)

    def ready_at(self, queue: Queue) -> float:
        timeout = self._timeout if queue.batch_seconds is None else queue.batch_seconds
        return -math.inf if queue.waiting >= self._size else queue.oldest_arrival + timeout


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
