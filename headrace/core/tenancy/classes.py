"""Classes of service: weight, minimum share and batching limits of each.

A class has its own queue. Classes that have work share device time in proportion to their weights. The floor is a
share that a class gets whatever the weights of the others are.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.request import NO_SLO, Slo


@dataclass(frozen=True, slots=True)
class ServiceClass:
    """One class of service.

    ``level`` orders classes where time cannot be shared (preemption, slots): lower is served first.
    ``weight`` is its share of device time relative to the others, ``floor`` the least share (0 to 1) while it has
    work. ``prompt_tokens`` bounds the prompt tokens of this class that join in one step (0: no bound): small batches
    of prompts answer soon, large ones cost least. ``gather_seconds`` is how long its oldest waiting request may be
    held back to form a larger batch while other requests run. ``slo`` holds the latency targets of requests that
    state none.
    """

    name: str
    level: int
    weight: float
    floor: float = 0.0
    prompt_tokens: int = 0
    gather_seconds: float = 0.0
    slo: Slo = NO_SLO


PRIORITY = ServiceClass("priority", 0, 8.0, 0.10, 512)
DEFAULT = ServiceClass("default", 1, 4.0, 0.10)
FLEX = ServiceClass("flex", 2, 1.0, 0.05, 0, 0.5)
BACKGROUND = ServiceClass("background", 3, 0.0)
"""Background work such as cache warming: it runs only while no other class has work."""

CLASSES = (PRIORITY, DEFAULT, FLEX, BACKGROUND)


def is_awaited(service_class: str) -> bool:
    """Whether a client waits for requests of this class."""
    return service_class != BACKGROUND.name
