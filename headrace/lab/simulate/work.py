"""What a step asks of a device, in the few sums that its time follows from."""

from __future__ import annotations

from typing import NamedTuple

from headrace.core.plan import StepPlan, Tier

_NO_ROWS: tuple[tuple[int, ...], ...] = ((),) * 5
_DEVICE, _ACROSS = {Tier.DEVICE}, {Tier.DEVICE, Tier.HOST}


class StepWork(NamedTuple):
    """The work of one step.

    ``tokens`` are the positions computed, ``contexts`` the sum over them of the positions that each attends to,
    ``read_tokens`` the positions whose keys and values are read (once a row, however many tokens it has), and
    ``samples`` the rows that draw a token. ``copies`` are blocks copied on the device, ``transfers`` blocks that
    cross to or from the host; copies to and from the disk go on beside the steps and are no part of one.
    """

    rows: int
    tokens: int
    contexts: int
    read_tokens: int
    samples: int
    copies: int = 0
    transfers: int = 0


def work_of(plan: StepPlan) -> StepWork:
    """The sums of a plan, at little cost per row: this runs for every step that is simulated."""
    rows = plan.rows
    _, starts, lengths, _, samples = zip(*rows, strict=True) if rows else _NO_ROWS
    tokens: int = sum(lengths)
    contexts = read = tokens + sum(starts)
    if tokens > len(rows):
        for _, start, length, *_ in rows:
            if length > 1:
                contexts += (length - 1) * start + length * (length - 1) // 2
    copies = transfers = 0
    for move in plan.moves:
        ends = {move.source_tier, move.target_tier}
        copies += ends == _DEVICE
        transfers += ends == _ACROSS
    return StepWork(len(rows), tokens, contexts, read, sum(samples), copies, transfers)
