"""What lies before the engine: one thread that parses requests and writes tokens, each in its turn."""

from __future__ import annotations


class Front:
    """A server's HTTP side as a single worker with a queue.

    It spends ``request_seconds`` on a request before the engine hears of it and ``event_seconds`` on each part of an
    answer before the client does. ``free_at`` is when it has done all that it was given; work is given in order of
    time. Both 0: clients sit beside the engine.
    """

    def __init__(self, request_seconds: float = 0.0, event_seconds: float = 0.0) -> None:
        self.request_seconds = request_seconds
        self.event_seconds = event_seconds
        self.free_at = 0.0

    def take(self, now: float) -> float:
        """When the engine gets a request that comes ``now``."""
        self.free_at = max(self.free_at, now) + self.request_seconds
        return self.free_at
