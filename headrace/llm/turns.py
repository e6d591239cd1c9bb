"""Threads that share one engine take turns: one of them computes, and the others wait in the order of arrival."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

POLL_SECONDS = 0.1
"""How often a waiting thread looks for a deferred Ctrl-C."""


class Turns:
    """Lets one thread compute at a time.

    A turn belongs to a thread until `release`. A thread that waits for one gives a ``key``, by which `notify` finds it.
    Nothing here allocates while the lock is held but in a consistent state: the garbage collector may call `when_free`
    from any allocation, so the lock can be taken again by its own thread.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner: int | None = None
        self._waiting: dict[object, threading.Condition] = {}
        self._once = 0  # of them, those that want a single turn
        self._arrived = threading.Condition(self._lock)
        self._process = os.getpid()

    @property
    def wanted(self) -> bool:
        """Whether a thread waits for a single turn, for which a thread of many turns should release its own."""
        return self._once > 0

    def is_own_process(self) -> bool:
        """Whether this is not a forked child, where the threads that compute do not exist."""
        return self._process == os.getpid()

    def require_caller(self) -> None:
        """Raise RuntimeError in a forked child, and on the thread whose turn it is: a call from inside a step."""
        if not self.is_own_process():
            raise RuntimeError(
                "this LLM was made by another process and does not work after a fork; make one in each process,"
                " or start processes with the method 'spawn'"
            )
        if self._owner == threading.get_ident():
            raise RuntimeError("an LLM cannot be called from inside one of its own steps")

    def take(self, key: object, done: Callable[[], bool], check: Callable[[], None]) -> bool:
        """Wait for a turn; False if ``done()`` became true before. ``check`` may end the waiting by an exception.

        Raises:
            RuntimeError: see `require_caller`.
        """
        self.require_caller()
        with self._lock:
            mine = self._waiting[key] = threading.Condition(self._lock)
            try:
                while not done():
                    if self._owner is None and next(iter(self._waiting)) is key:
                        self._owner = threading.get_ident()
                        return True
                    mine.wait(POLL_SECONDS)
                    check()
                return False
            finally:
                del self._waiting[key]
                if self._owner is None:
                    self._wake_next()

    def release(self, finish: Callable[[], None] = lambda: None) -> None:
        """End this thread's turn, after a last ``finish()``; no `when_free` comes between the two."""
        with self._lock:
            try:
                finish()
            finally:
                self._owner = None
                self._wake_next()

    @contextmanager
    def once(self) -> Iterator[None]:
        """A single turn for the block."""
        with self._lock:
            self._once += 1
        try:
            self.take(object(), lambda: False, lambda: None)
        finally:
            with self._lock:
                self._once -= 1
        try:
            yield
        finally:
            self.release()

    def when_free(self, action: Callable[[], None]) -> None:
        """Call ``action`` as a turn of its own if no thread has one now; otherwise its owner must do it."""
        with self._lock:
            if self._owner is None:
                self._owner = threading.get_ident()
                self.release(action)

    def notify(self, keys: Iterable[object]) -> None:
        """Let the threads that wait with these keys call their ``done``."""
        with self._lock:
            for key in keys:
                if key in self._waiting:
                    self._waiting[key].notify()

    def arrived(self) -> None:
        """End the `rest` of the thread whose turn it is."""
        with self._lock:
            self._arrived.notify()

    def rest(self, seconds: float, idle: Callable[[], bool]) -> None:
        """Wait during this thread's turn, until something has `arrived` or it is no longer ``idle``."""
        with self._lock:
            if idle():
                self._arrived.wait(seconds)

    def _wake_next(self) -> None:
        if self._waiting:
            next(iter(self._waiting.values())).notify()
