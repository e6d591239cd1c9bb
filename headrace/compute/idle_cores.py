"""Computes on cores that nothing else wants, as long as there are any: a thread, and a guard against its starvation.

On Linux a thread of the policy ``SCHED_IDLE`` gives its core up as soon as another thread wants it; one of the lowest
priority keeps it for a millisecond or more. But beside programs that leave no core idle it gets three thousandths of
one, and a process without privileges cannot undo that policy. So the caller's thread watches it, and computes again
itself what starves there. See docs/decisions/models.md#threads-of-the-image-encoder.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from headrace.compute.device import compute_beside_steps, run_on_idle_cores

ResultT = TypeVar("ResultT")

MOST_SECONDS = 2.0
"""A call that has waited for longer starts on the caller's thread; the shares of a core are measured over as long."""

LEAST_SHARE = 0.05
"""The share of a core below which a call starves."""


class IdleThread:
    """A thread that computes on idle cores. Where the system has no such threads, all runs on the caller's.

    A function may run twice, at the same time, and what it returned last on this thread is then dropped.
    """

    def __init__(
        self, name: str, most_seconds: float = MOST_SECONDS, least_share: float = LEAST_SHARE
    ) -> None:
        self._most_seconds = most_seconds
        self._least_share = least_share
        self._thread = ThreadPoolExecutor(1, name)
        self._clock = self._thread.submit(_begin).result()

    def call(self, function: Callable[[], ResultT], asked: float) -> ResultT:
        """The result of a function that was to be called at ``asked`` of the monotonic clock."""
        clock = self._clock
        if clock is None or time.monotonic() - asked > self._most_seconds:
            return function()
        future, share = self._thread.submit(function), 1.0
        while share >= self._least_share:
            used, began = time.clock_gettime(clock), time.monotonic()
            if wait([future], self._most_seconds).done:
                return future.result()
            share = (time.clock_gettime(clock) - used) / (time.monotonic() - began)
        future.cancel()
        return function()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)


def _begin() -> int | None:
    """The clock of this thread's CPU time, once it computes on idle cores; None if the system refuses that."""
    compute_beside_steps()
    return time.pthread_getcpuclockid(threading.get_ident()) if run_on_idle_cores() else None
