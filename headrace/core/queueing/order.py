"""Queue order policies: one method, `rank`; the lowest rank is served first.

A request gets its rank once, at arrival. Where the rank is a time, waiting counts by itself: a request that came a
second earlier is a second ahead, so no request starves. ``number`` counts arrivals and makes every rank unique.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from headrace.core.request import Request
from headrace.core.sequence import Rank

AGEING_SECONDS = 10.0
"""Seconds by which one step of ``priority`` moves a request ahead."""

PATIENCE = 4.0
"""Seconds of waiting that outweigh one second of predicted work, with `ShortestFirst`."""


class OrderPolicy(Protocol):
    """Ranks a request when it arrives: a tuple of numbers that ends in ``number``."""

    def rank(self, request: Request, number: int) -> Rank: ...


def ask_rank(policy: OrderPolicy, request: Request, number: int) -> Rank:
    """The rank that a policy gives a request, checked so that it compares with any other rank.

    Raises:
        ValueError: the policy returned no such rank. What the policy itself raises passes through.
    """
    rank = policy.rank(request, number)
    numbers = type(rank) is tuple and all(isinstance(each, int | float) for each in rank)
    if not numbers or rank[-1:] != (number,) or any(each != each for each in rank):  # NaN is not even itself
        raise ValueError(f"{rank!r} is not a tuple of numbers that ends in {number}")
    return rank


class FirstComeFirstServed:
    """By arrival alone."""

    def rank(self, request: Request, number: int) -> Rank:
        return (number,)


class ByPriority:
    """By ``priority`` (lower sooner) whatever the wait, then by arrival."""

    def rank(self, request: Request, number: int) -> Rank:
        return (request.priority, number)


class ShortestFirst:
    """By predicted work and age; ``seconds`` predicts how long a request takes alone (its output length is a guess).

    ``patience`` returns how many seconds of waiting outweigh one second of work; with 0 the order is by age.
    """

    def __init__(
        self, seconds: Callable[[Request], float], patience: Callable[[], float] = lambda: PATIENCE
    ) -> None:
        self._seconds, self._patience = seconds, patience

    def rank(self, request: Request, number: int) -> Rank:
        age = request.arrived + request.priority * AGEING_SECONDS
        patience = self._patience()
        return (age + patience * self._seconds(request) if patience else age, number)
