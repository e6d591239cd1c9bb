"""In which order the requests of one line are served: one method, `rank`, lowest first.

A rank is given once, at arrival. Where it is a time, waiting counts by itself: who came a second earlier is a second
ahead, so that age reorders a line and nobody waits for ever. ``number`` counts arrivals and makes every rank unique.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from headrace.core.request import Request
from headrace.core.sequence import Rank

AGEING_SECONDS = 10.0
"""How much later one may come and still be served first for each step of ``priority``."""

PATIENCE = 4.0
"""Seconds of waiting that outweigh one second of predicted work."""


class OrderPolicy(Protocol):
    """Ranks a request when it arrives: numbers of which ``number`` is the last."""

    def rank(self, request: Request, number: int) -> Rank: ...


def ask_rank(policy: OrderPolicy, request: Request, number: int) -> Rank:
    """A request's rank by the policy, which can be compared with any other.

    Raises:
        ValueError: it is none; or whatever the policy raises.
    """
    rank = policy.rank(request, number)
    numbers = type(rank) is tuple and all(isinstance(each, int | float) for each in rank)
    if not numbers or rank[-1:] != (number,) or any(each != each for each in rank):  # NaN is not even itself
        raise ValueError(f"{rank!r} is no tuple of numbers that ends in {number}")
    return rank


class FirstComeFirstServed:
    """By arrival alone."""

    def rank(self, request: Request, number: int) -> Rank:
        return (number,)


class ByPriority:
    """By ``priority`` (lower sooner) whatever the wait, then by arrival."""

    def rank(self, request: Request, number: int) -> Rank:
        return (request.priority, number)


class ByAge:
    """By arrival, where each step of ``priority`` counts for `AGEING_SECONDS`."""

    def rank(self, request: Request, number: int) -> Rank:
        return (request.arrived + request.priority * AGEING_SECONDS, number)


class ShortestFirst:
    """By predicted work and age: ``seconds`` predicts what a request takes alone (no oracle: its output is a guess)."""

    def __init__(self, seconds: Callable[[Request], float]) -> None:
        self._seconds = seconds

    def rank(self, request: Request, number: int) -> Rank:
        age = request.arrived + request.priority * AGEING_SECONDS
        return (age + PATIENCE * self._seconds(request), number)
