"""The HTTP front end of a simulated server: one thread that parses requests and writes tokens."""

from __future__ import annotations


class Front:
    """A server's HTTP side as a single worker with a queue.

    Before the engine gets a request it spends ``request_seconds``, and ``token_seconds`` for each token of the prompt;
    during a step, when threads are awake, ``busy_seconds`` instead of ``request_seconds``.
    It spends ``event_seconds`` on each chunk of a response before the client gets it. A request that arrives during a
    step delays the step's end by ``stall_seconds``, because both need the interpreter. A request that is read while
    nothing runs delays the step after its first token by ``wake_seconds``: threads, caches and the response's headers.
    The next request can be read after ``stall_seconds``, if they are known: the rest of a request's time is waiting.
    ``free_at`` is when all its work is done; work is given in order of time. If all are 0, there is no HTTP overhead.
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
        """When the engine gets a request with so many prompt tokens that arrives ``now``, during a step or not."""
        seconds = self.busy_seconds if stepping else self.request_seconds
        seconds += tokens * self.token_seconds
        began = max(self.free_at, now)
        self.free_at = began + min(seconds, self.stall_seconds or seconds)
        self._read_at = max(self._read_at, began + seconds)
        return self._read_at
