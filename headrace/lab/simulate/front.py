"""The HTTP front end of a simulated server: one thread that parses requests and writes tokens."""

from __future__ import annotations


class Front:
    """A server's HTTP side as a single worker with a queue.

    A request reaches the engine after ``request_seconds`` plus ``token_seconds`` per prompt token; during a step, when
    threads are awake, ``busy_seconds`` replace ``request_seconds``. Each chunk of a response takes ``event_seconds``. A
    request that arrives during a step delays the step's end by ``stall_seconds``, because both need the interpreter. A
    request that finds the server idle delays the step after its first token by ``wake_seconds`` (threads, caches,
    response headers). The next request can be read after ``stall_seconds`` if these are not 0: the rest of a request's
    time is waiting. ``free_at`` is when all work is done; calls must be in order of time.
    """

    def __init__(
        self,
        request_seconds: float = 0.0,
        event_seconds: float = 0.0,
        stall_seconds: float = 0.0,
        token_seconds: float = 0.0,
        wake_seconds: float = 0.0,
        busy_seconds: float | None = None,
    ) -> None:
        self.request_seconds = request_seconds
        self.event_seconds = event_seconds
        self.stall_seconds = stall_seconds
        self.token_seconds = token_seconds
        self.wake_seconds = wake_seconds
        self.busy_seconds = request_seconds if busy_seconds is None else busy_seconds
        self.free_at = self._read_at = 0.0

    def take(self, now: float, tokens: int, stepping: bool) -> float:
        """When a request that arrives ``now`` reaches the engine. ``tokens`` is its prompt length, and ``stepping``
        says whether a step is running.
        """
        seconds = self.busy_seconds if stepping else self.request_seconds
        seconds += tokens * self.token_seconds
        began = max(self.free_at, now)
        self.free_at = began + min(seconds, self.stall_seconds or seconds)
        self._read_at = max(self._read_at, began + seconds)
        return self._read_at
