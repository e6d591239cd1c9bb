"""Retention priority of each block of a request, from the ranges in the request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from headrace.core.request import DEFAULT_RETENTION, Request


class BlockRetention(NamedTuple):
    """The retention of one block: its priority, and the seconds after its last use that it lasts (None: no end)."""

    priority: int = DEFAULT_RETENTION
    seconds: float | None = None


UNSET_RETENTION = BlockRetention()


def block_retention(request: Request, block_size: int, num_blocks: int) -> list[BlockRetention]:
    """The retention of each of the first ``num_blocks`` blocks of a request.

    A block that overlaps a range has its priority. Blocks of the answer have that of the prompt's last block. A block
    is retained at least as long as the blocks after it, because they are only found through it.
    """
    prompt = len(request.tokens)
    last = (prompt - 1) // block_size
    kept: list[BlockRetention] = []
    best: BlockRetention | None = None
    for i in range(num_blocks - 1, -1, -1):
        own = _requested(request, min(i, last), block_size)
        best = own if best is None else _longest((best, own))
        kept.append(best)
    return kept[::-1]


def _requested(request: Request, block: int, block_size: int) -> BlockRetention:
    begin, end = block * block_size, min((block + 1) * block_size, len(request.tokens))
    touching = [
        BlockRetention(each.priority, each.seconds)
        for each in request.retention
        if each.start < end and (each.end is None or each.end > begin)
    ]
    return _longest(touching) if touching else UNSET_RETENTION


def _longest(kept: Iterable[BlockRetention]) -> BlockRetention:
    return max(kept, key=lambda each: (each.priority, each.seconds is None, each.seconds or 0.0))
