"""When waiting requests may join: continuously, or in gangs (the textbook baseline)."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol


class Queue(NamedTuple):
    """What an admission policy may look at. ``admitted`` counts all admissions so far."""

    waiting: int
    oldest_arrival: float
    running: int
    admitted: int


class AdmissionPolicy(Protocol):
    """How many waiting requests may be admitted now, and if none, when to ask again.

    With nothing running it must name a time, and then admit somebody.
    """

    def admit(self, queue: Queue, now: float) -> int: ...

    def ready_at(self, queue: Queue) -> float: ...


def ask_admission(policy: AdmissionPolicy, queue: Queue, now: float) -> int:
    """How many may start.

    Raises:
        ValueError: that is no number of requests; or whatever the policy raises.
    """
    count = policy.admit(queue, now)
    if not isinstance(count, int) or count < 0:
        raise ValueError(f"{count!r} is no number of requests")
    return count


def ask_ready_at(policy: AdmissionPolicy, queue: Queue) -> float:
    """When to ask again.

    Raises:
        ValueError: that is no time; or whatever the policy raises.
    """
    due = policy.ready_at(queue)
    if not isinstance(due, int | float) or not due < math.inf:
        raise ValueError(f"{due!r} is no time at which somebody will be admitted")
    return due


class Continuous:
    """A request joins the batch at any step in which it fits (iteration-level scheduling, Orca, OSDI '22)."""

    def admit(self, queue: Queue, now: float) -> int:
        return queue.waiting

    def ready_at(self, queue: Queue) -> float:
        return -math.inf


class StaticBatch:
    """A gang of ``size`` requests starts together, and the next only when all of it have finished.

    A smaller gang starts when its oldest request has waited for ``timeout`` seconds.
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
        return -math.inf if queue.waiting >= self._size else queue.oldest_arrival + self._timeout
