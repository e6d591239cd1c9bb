"""Faults in the pool's memory ahead of its use, on a thread of lowest priority, mostly while no step runs.

The pool is mapped but not written, so that start-up is fast and a short run uses little memory. But the system zeroes a
memory page on first use: 60 huge pages in one step when each of 30 layers starts a new one. In a virtual machine the
host may have to find the memory first, which takes three seconds per GiB. Unused blocks are allocated in order, so a
thread touches the memory beyond the highest used block:

    in use ────────┤ near: cleared beside steps, too ┤ far: cleared while none runs ┤

The lowest priority alone does not keep it off the steps' cores, because idle cores pull it over.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

from headrace.compute.device import lower_priority

NEAR_BYTES = 256 << 20  # see docs/decisions/memory.md#clearing-memory-ahead-of-its-use
"""Memory cleared ahead even while steps run: more than the huge pages that all layers start at once."""

PIECE_BYTES = 16 << 20
"""Memory cleared between two checks of whether a step runs."""

REST_SECONDS = 0.25
"""Minimum idle time before clearing further memory; longer than the pauses of a sequential client."""


class Pool(Protocol):
    """The required methods of `PagedKV`."""

    num_blocks: int

    @property
    def nbytes(self) -> int: ...

    def populate(self, first: int, end: int) -> bool: ...


class MemoryClearing:
    """Keeps the memory of a pool cleared ahead of the blocks in use; its thread ends by itself.

    ``far`` is the number of blocks that can come into use at once. Without support of the system it has no effect.
    """

    def __init__(
        self,
        pool: Pool,
        far: int,
        near_bytes: int = NEAR_BYTES,
        piece_bytes: int = PIECE_BYTES,
        rest_seconds: float = REST_SECONDS,
    ) -> None:
        block_bytes = pool.nbytes // pool.num_blocks
        self._pool = pool
        self._near = near_bytes // block_bytes
        self._far = max(self._near, far)
        self._piece = max(1, piece_bytes // block_bytes)
        self._rest_seconds = rest_seconds
        self._reached = 0
        self._resting_since: float | None = None  # None: a step runs
        self._cleared = 0
        self._stopped = False
        self._thread: threading.Thread | None = None

    def begin(self, blocks: int) -> None:
        """A step starts; the first ``blocks`` blocks have been allocated so far."""
        self._resting_since = None
        self._reached = blocks
        self._stopped = False
        if not self._done(self._far) and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._clear, name="headrace-clear", daemon=True)
            self._thread.start()

    def rest(self) -> None:
        """No step runs from now on."""
        self._resting_since = time.monotonic()

    def restart(self) -> None:
        """The memory is about to be given back to the system: touch none before the next step."""
        self._stopped = True
        if self._thread is not None:
            self._thread.join()
        self._cleared = 0

    def _done(self, ahead: int) -> bool:
        """Whether less than one piece of ``ahead`` blocks beyond those in use is not cleared."""
        end = self._pool.num_blocks
        missing = min(end, self._reached + ahead) - self._cleared
        return missing < max(1, min(self._piece, end - self._cleared))

    def _rests(self) -> bool:
        since = self._resting_since
        return since is not None and time.monotonic() - since >= self._rest_seconds

    def _clear(self) -> None:
        lower_priority()
        while not self._stopped and not self._done(self._far):
            if self._done(self._near) and not self._rests():
                time.sleep(self._rest_seconds)
                continue
            end = min(self._cleared + self._piece, self._pool.num_blocks)
            could = self._pool.populate(self._cleared, end)
            self._cleared = end if could else self._pool.num_blocks  # the system cannot clear: stop
