"""In which order requests are served: one method, `rank`, lowest first."""

from __future__ import annotations

from typing import Protocol

from headrace.core.request import Request


class OrderPolicy(Protocol):
    """Ranks a request once, when it arrives; ``number`` counts arrivals and makes every rank unique."""

    def rank(self, request: Request, number: int) -> tuple[float, ...]: ...


class FirstComeFirstServed:
    """By arrival alone."""

    def rank(self, request: Request, number: int) -> tuple[float, ...]:
        return (number,)


class ByPriority:
    """By the request's ``priority`` (lower sooner), then by arrival."""

    def rank(self, request: Request, number: int) -> tuple[float, ...]:
        return (request.priority, number)
