"""The one capacity function: start-up sizing, admission, preemption and planning all ask it."""

from __future__ import annotations


def blocks_needed(tokens: int, block_size: int) -> int:
    """Blocks that hold the keys and values of ``tokens`` positions."""
    return -(-tokens // block_size)
