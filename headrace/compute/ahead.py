"""The pool's memory is cleared before a step has to wait for that.

The pool is mapped and not written, so that start-up is quick and a short life takes little of a machine. But the system
clears a page when it is first touched: 60 huge ones in one step where 30 layers begin a new one each, and below a
virtual machine its host may have to find the memory first. Blocks that were never used are handed out in order, so a
thread of the lowest priority clears some way ahead of the highest block in use. Knows nothing of what blocks hold.
"""

from __future__ import annotations

import threading
from typing import Protocol

from headrace.compute.device import lower_priority

AHEAD_BYTES = 512 << 20
"""What is cleared beyond the highest block in use. More would take a core for longer, and memory for nothing."""

PIECE_BYTES = 64 << 20
"""How far the distance may shrink before another thread makes it whole again."""


class Pool(Protocol):
    """What is asked of `PagedKV`."""

    num_blocks: int

    @property
    def nbytes(self) -> int: ...

    def populate(self, first: int, end: int) -> bool: ...


class ClearedAhead:
    """Keeps the memory of a pool cleared ahead of the blocks in use; needs nobody to end it.

    Where the system cannot be told to clear pages, all stays as it would be without.
    """

    def __init__(self, pool: Pool, ahead_bytes: int = AHEAD_BYTES, piece_bytes: int = PIECE_BYTES) -> None:
        block_bytes = pool.nbytes // pool.num_blocks
        self._pool = pool
        self._ahead = ahead_bytes // block_bytes
        self._piece = max(1, min(piece_bytes, ahead_bytes) // block_bytes)
        self._cleared = 0
        self._thread: threading.Thread | None = None

    def reached(self, blocks: int) -> None:
        """So many blocks from the first on have been handed out; to be called whenever they may be more."""
        wanted = min(self._pool.num_blocks, blocks + self._ahead)
        due = min(self._pool.num_blocks, self._cleared + self._piece)
        if wanted >= due > self._cleared and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(
                target=self._clear, args=(wanted,), name="headrace-clear", daemon=True
            )
            self._thread.start()

    def _clear(self, end: int) -> None:
        lower_priority()
        while self._cleared < end:
            piece = min(self._cleared + self._piece, end)
            could = self._pool.populate(self._cleared, piece)
            self._cleared = piece if could else self._pool.num_blocks  # or nothing more can be done here
