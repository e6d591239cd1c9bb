"""How often what was lost with the memory of an engine is computed again.

A rank that ends takes the keys and values of all requests with it, and so does an engine process. The tokens of their
answers are known: `core.sequence.Sequence` has them in the first case, `service.open_requests` in the second. Sampling
depends only on known tokens and a request's seed, so a request continues from them as after a preemption.

A request may itself be the cause. The limits end it before it has ended the engine for all others.
"""

from __future__ import annotations

from collections import deque

MOST_LOSSES = 3
"""The most losses within `LOSS_SECONDS` after which requests are computed again."""

LOSS_SECONDS = 600.0

MOST_LOSSES_OF_REQUEST = 2
"""The most losses after which one request is computed again. It is below `MOST_LOSSES`, so a request that ends every
engine fails while the engine may still be started again."""


class Recovery:
    """Counts the losses of one engine."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque()

    def lost(self, now: float) -> bool:
        """Count a loss; returns whether running requests are computed again after it."""
        self._losses.append(now)
        while self._losses[0] <= now - LOSS_SECONDS:
            self._losses.popleft()
        return len(self._losses) <= MOST_LOSSES
