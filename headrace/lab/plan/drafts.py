"""Speculative decoding by arithmetic: the best number of drafted tokens per step in a steady state.

```
 tokens of a step and row   1 + a1 + a1 a2 + ...              a: acceptance by position
 seconds                    step with 1 + k positions a row, and k passes of the draft model
```
The result is the ``k`` with the most tokens per second. Here it is the same for all rows; the engine chooses it per
request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from headrace.lab.forced_acceptance import Speculation, expected_tokens
from headrace.lab.plan.roofline import Load, Replica, decoding

MOST = 16
"""The longest draft that is considered."""


class Verified(NamedTuple):
    """Steps that verify ``drafts`` tokens per row: the mean tokens that a row gains, and the seconds of a step."""

    drafts: int
    tokens: float
    seconds: float


def best_drafts(
    replica: Replica,
    load: Callable[[int, float], Load],
    rows: int,
    context: float,
    speculation: Speculation | None,
) -> Verified:
    """The drafts with the most tokens per second.

    ``load(drafts, tokens)`` is the work of a step of ``rows`` sequences with a mean ``context``, each with ``drafts``
    drafted tokens and a gain of ``tokens``.
    """
    best = Verified(0, 1.0, replica.step_seconds(load(0, 1.0)))
    if speculation is None:
        return best
    one = speculation.cost * replica.step_seconds(decoding(rows, context))
    for count in range(1, MOST + 1):
        tokens = expected_tokens(speculation.rates, count)
        seconds = replica.step_seconds(load(count, tokens)) + count * one
        if tokens / seconds > best.tokens / best.seconds:
            best = Verified(count, tokens, seconds)
    return best


def drafted(rows: int, context: float, drafts: int) -> Load:
    """A step in which ``rows`` sequences of a mean ``context`` verify ``drafts`` tokens each."""
    positions = rows * (1 + drafts)
    return Load(positions, 0, positions * (context + drafts / 2), rows * (context + drafts), positions)
