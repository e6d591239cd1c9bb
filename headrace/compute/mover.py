"""The mover: copies blocks between device, host and disk, and from peers.

```
 device <──copies in order, on a stream of their own──> host pages (pinned on CUDA)
                                                          │  one thread reads, one writes
                                                        block file, peers ──> arrivals
```
Moves of a step run in order, before the step's rows. Copies to and from disk and peers only start in order; arrivals
report their end. On CUDA all copies are queued on one side stream. It does not wait for rows in flight, because no
block that they use is moved; the step's own rows wait for it.
"""

from __future__ import annotations

import math
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from headrace.compute.blockfile import BlockFile
from headrace.compute.device import clear_memory
from headrace.compute.model.kv import PagedKV, untouched_zeros
from headrace.compute.states import StateTensors
from headrace.core.plan import Arrival, Move, Tier

WAIT_SECONDS = 0.05
"""Maximum wait of `Mover.arrivals`, because new requests may arrive meanwhile."""

PROBE_BLOCKS = 16


class PeerReader(Protocol):
    """Reads blocks from other servers."""

    def pull(
        self,
        blocks: Sequence[int],
        targets: Sequence[memoryview],
        ready: Callable[[], None],
        ended: Callable[[int, bool, float], None],
    ) -> None:
        """Start filling each target with the peer's block of this number; returns at once.

        On separate threads, it calls ``ready`` before the first write, and ``ended(i, ok, seconds)`` for each block.
        """
        ...


class Copied(NamedTuple):
    """A rank's part of a copy to or from the disk has ended, with the checksum of its content; None: it failed."""

    move: Move
    checksum: int | None
    seconds: float


class Mover:
    """Host pages in addition to those of the device, a file on disk, and peers.

    Args:
        kv: the pages of the device.
        host_blocks: number of pages of the host; on CUDA they are pinned.
        disk: the block file, if there is a disk tier.
        peers: reads from other servers, if there are any.
        ranks: number of ranks with a part of each block. A disk copy has arrived when all of them have reported it.
        report: receives the report of a rank other than 0, instead of an arrival.
    """

    def __init__(
        self,
        kv: PagedKV,
        host_blocks: int,
        disk: BlockFile | None = None,
        peers: PeerReader | None = None,
        *,
        ranks: int = 1,
        report: Callable[[Copied], None] | None = None,
    ) -> None:
        self._kv = kv
        self._disk = disk
        self._peers = peers
        self._cuda = kv.device.type == "cuda"
        shape = (host_blocks, kv.block_elements)
        self._host = (
            torch.zeros(shape, dtype=kv.stored, pin_memory=True)
            if self._cuda
            else untouched_zeros(shape, kv.stored, kv.device)
        )
        self._side = torch.cuda.Stream(kv.device) if self._cuda else None  # type: ignore[no-untyped-call]
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="headrace-disk-reader")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="headrace-disk-writer")
        self._ranks = ranks
        self._report = report
        self._copying = 0  # copies of this rank that have begun and not ended
        self._parts: dict[Move, dict[int, Copied]] = {}  # reports of each rank, by copy
        self._arrived: deque[Arrival] = deque()
        self._news = threading.Condition()

    @property
    def host_bytes(self) -> int:
        return self._host.nbytes

    def move(self, moves: Sequence[Move]) -> None:
        """Run moves in order; on CUDA queue them, and make later work wait for them."""
        if not moves:
            return
        with self._on_side_stream():
            for (source_tier, target_tier), group in groupby(moves, key=lambda move: move[2:]):
                self._run(source_tier, target_tier, list(group))
        if self._side is not None:
            torch.cuda.current_stream(self._kv.device).wait_stream(self._side)

    def arrivals(self, *, wait: bool = False) -> tuple[Arrival, ...]:
        """The copies to and from disk and peers that have ended since the last call; ``wait`` waits briefly for one."""
        with self._news:
            if wait and not self._arrived:
                self._news.wait(WAIT_SECONDS)
            arrived = tuple(self._arrived)
            self._arrived.clear()
        return arrived

    def heard(self, rank: int, copied: Copied) -> None:
        """Register that a rank's part of a copy has ended; the copy arrives with the last part. Thread-safe."""
        move = copied.move
        with self._news:
            parts = self._parts.setdefault(move, {})
            parts[rank] = copied
            if len(parts) < self._ranks:
                return
            del self._parts[move]
            checksum = _joined([parts[each].checksum for each in range(self._ranks)])
            ok = checksum is not None
            if self._disk is not None:
                if checksum is not None and move.target_tier is Tier.DISK:
                    self._disk.checksums[move.target] = checksum
                elif move.source_tier is Tier.DISK:
                    ok = ok and checksum == self._disk.checksums.get(move.source)
            self._arrive(Arrival(move, ok, max(part.seconds for part in parts.values())))

    def restart(self) -> None:
        """Reset after a restart of the other ranks: pending copies never end, and earlier reports do not count."""
        with self._news:
            self._news.wait_for(lambda: not self._copying)
            self._parts.clear()
            self._arrived.clear()

    def clear(self) -> None:
        """Make all pages of the host zeros again, and give their memory back to the system, on a CPU.

        Copies under way end first, and are not reported.
        """
        self.restart()
        clear_memory(self._host)

    def host_speed(self) -> float:
        """Bytes per second of copies from host to device, measured on unused pages."""
        count = min(PROBE_BLOCKS, self._host.shape[0], self._kv.num_blocks)
        moves = [Move(i, i, Tier.HOST, Tier.DEVICE) for i in range(count)]
        seconds = math.inf
        for _ in range(3):  # the first touches memory that was never used
            began = time.perf_counter()
            self.move(moves)
            if self._side is not None:
                self._side.synchronize()
            seconds = min(seconds, time.perf_counter() - began)
        return count * self._host[0].nbytes / seconds

    def close(self) -> None:
        """Finish the copies under way and end the threads."""
        self._reader.shutdown()
        self._writer.shutdown()
        if self._disk is not None:
            self._disk.close()

    def _on_side_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._side is None else torch.cuda.stream(self._side)

    def _run(self, source_tier: Tier, target_tier: Tier, moves: list[Move]) -> None:
        match source_tier, target_tier:
            case Tier.DEVICE, Tier.DEVICE:
                self._kv.copy_blocks([move.source for move in moves], [move.target for move in moves])
            case Tier.DEVICE, Tier.HOST:
                targets = [self._host[move.target] for move in moves]
                self._kv.read_blocks([move.source for move in moves], targets)
            case Tier.HOST, Tier.DEVICE:
                blocks = [self._host[move.source] for move in moves]
                self._kv.write_blocks([move.target for move in moves], blocks)
            case Tier.HOST, Tier.DISK:
                for move in moves:
                    self._begin(self._writer, move, self._host[move.source])
            case Tier.DEVICE, Tier.DISK:
                for move in moves:
                    page = torch.empty(self._kv.block_elements, dtype=self._kv.stored, pin_memory=self._cuda)
                    self._kv.read_blocks([move.source], [page])
                    self._begin(self._writer, move, page)
            case Tier.DISK, Tier.HOST:
                for move in moves:
                    self._begin(self._reader, move, self._host[move.target])
            case Tier.PEER, Tier.HOST if self._peers is not None:
                self._pull(self._peers, moves)
            case _:
                raise ValueError(f"blocks are not moved from {source_tier} to {target_tier}")

    def _begin(self, thread: ThreadPoolExecutor, move: Move, page: Tensor) -> None:
        """Let a thread copy between a host page and the disk, after the work queued for that page is done."""
        with self._news:
            self._copying += 1
            if self._disk is not None and move.target_tier is Tier.DISK:
                self._disk.checksums.pop(move.target, None)
        thread.submit(self._copy, move, page, self._queued())

    def _queued(self) -> torch.cuda.Event | None:
        """The event to wait for before host pages may be used; None on a CPU."""
        if self._side is None:
            return None
        queued = torch.cuda.Event()  # type: ignore[no-untyped-call]
        queued.record(self._side)
        return queued

    def _pull(self, peers: PeerReader, moves: list[Move]) -> None:
        """Begin to copy blocks from peers to pages of the host."""
        queued = self._queued()
        targets = [_content(self._host[move.target]) for move in moves]

        def ready() -> None:
            if queued is not None:
                queued.synchronize()

        def ended(i: int, ok: bool, seconds: float) -> None:
            self._arrive(Arrival(moves[i], ok, seconds))

        peers.pull([move.source for move in moves], targets, ready, ended)

    def _copy(self, move: Move, page: Tensor, queued: torch.cuda.Event | None) -> None:
        checksum, began = None, time.perf_counter()
        try:
            if queued is not None:
                queued.synchronize()
            content = _content(page)
            began = time.perf_counter()
            if self._disk is not None and move.target_tier is Tier.DISK:
                checksum = self._disk.write(move.target, content)
            elif self._disk is not None:
                checksum = self._disk.read(move.source, content)
        except OSError:
            checksum = None  # full or broken: the arrival reports it, and the core computes
        finally:
            copied = Copied(move, checksum, time.perf_counter() - began)
            if self._report is not None:
                self._report(copied)
            else:
                self.heard(0, copied)
            with self._news:
                self._copying -= 1
                self._news.notify_all()

    def _arrive(self, arrival: Arrival) -> None:
        with self._news:
            self._arrived.append(arrival)
            self._news.notify_all()


def _joined(checksums: Sequence[int | None]) -> int | None:
    """One checksum over those of all ranks, in their order; None if a rank has none."""
    known = [checksum for checksum in checksums if checksum is not None]
    if len(known) < len(checksums):
        return None
    return known[0] if len(known) == 1 else zlib.crc32(b"".join(each.to_bytes(4, "little") for each in known))


def _content(page: Tensor) -> memoryview:
    """The bytes of a page of the host."""
    return memoryview(page.view(torch.uint8).numpy().data).cast("B")


def move_blocks(
    moves: Sequence[Move], kv: PagedKV, mover: Mover | None, states: StateTensors | None = None
) -> None:
    """Run the moves of a plan in order: by ``mover`` if there are tiers below the device, and those of ``states``.

    Raises:
        ValueError: a move needs what there is not.
    """
    if any(move.source_tier.holds_states for move in moves):
        if states is None:
            raise ValueError("this model has no recurrent states")
        # They are in other memory than blocks, so the order between both does not matter.
        states.move([move for move in moves if move.source_tier.holds_states])
        moves = [move for move in moves if not move.source_tier.holds_states]
    if mover is not None:
        mover.move(moves)
    elif moves:
        if any(move.source_tier != Tier.DEVICE or move.target_tier != Tier.DEVICE for move in moves):
            raise ValueError("this runner has no lower tiers: blocks cannot leave the device")
        kv.copy_blocks([move.source for move in moves], [move.target for move in moves])
