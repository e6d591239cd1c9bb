"""The work of a step, as sums that determine its time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from headrace.core.plan import Move, StepPlan, Tier

_NO_ROWS: tuple[tuple[int, ...], ...] = ((),) * 6
_DEVICE, _ACROSS = {Tier.DEVICE}, {Tier.DEVICE, Tier.HOST}


class StepWork(NamedTuple):
    """The work of one step.

    ``tokens`` are the computed positions, ``contexts`` the sum over them of the positions that each attends to,
    ``read_tokens`` the positions whose keys and values are read (once per row), and ``samples`` the sampled tokens,
    including one per draft. ``copies`` are blocks copied on the device, ``transfers`` blocks copied from or to the
    host. Copies from and to the disk run in parallel and are not part of a step.
    """

    rows: int
    tokens: int
    contexts: int
    read_tokens: int
    samples: int
    copies: int = 0
    transfers: int = 0


def columns(plan: StepPlan) -> Sequence[tuple[Any, ...]]:
    """A plan's rows as columns, in the order of the fields of `Row`."""
    return tuple(zip(*plan.rows, strict=True)) or _NO_ROWS


def work_of(plan: StepPlan) -> StepWork:
    """The sums of a plan."""
    return added_up(columns(plan), plan.moves)


def added_up(rows: Sequence[tuple[Any, ...]], moves: Iterable[Move]) -> StepWork:
    """The sums of rows given as `columns`, and of moves; fast, because every simulated step needs them."""
    _, starts, lengths, _, samples, drafts = rows
    tokens: int = sum(lengths)
    contexts = read = tokens + sum(starts)
    if tokens > len(lengths):
        for start, length in zip(starts, lengths, strict=True):
            if length > 1:
                contexts += (length - 1) * start + length * (length - 1) // 2
    copies = transfers = 0
    for move in moves:
        ends = {move.source_tier, move.target_tier}
        copies += ends == _DEVICE
        transfers += ends == _ACROSS
    return StepWork(
        len(lengths), tokens, contexts, read, sum(samples) + sum(map(len, drafts)), copies, transfers
    )
