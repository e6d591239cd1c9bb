"""The mover: copies blocks between device, host and disk, and from peers.

```
 device <──copies in order, on a stream of their own──> host pages (pinned on CUDA)
                                                          │  one thread reads, one writes
                                                        block file, peers ──> arrivals
```
Moves of a step run one after the other, before the step's rows. Copies to and from disk and peers only start in their
turn; arrivals report their end. On CUDA all copies are queued on one side stream. It need not wait for rows in flight,
because nothing that they still use is moved, and the step's own rows wait for it.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from headrace.compute.blockfile import BlockFile
from headrace.compute.kv import PagedKV, untouched_zeros
from headrace.core.plan import Arrival, Move, Tier

WAIT_SECONDS = 0.05
"""The longest wait of `Mover.arrivals`, because new requests may arrive meanwhile."""

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
        """Begin to fill each target with the block of the tier that has this number; it returns at once.

        On threads of its own, it calls ``ready`` before the first write, and ``ended(i, ok, seconds)`` once a block.
        """
        ...


class Mover:
    """Host pages in addition to those of the device, a file on disk, and peers.

    Args:
        kv: the pages of the device.
        host_blocks: number of pages of the host; on CUDA they are pinned.
        disk: the block file, if there is a disk tier.
        peers: reads from other servers, if there are any.
    """

    def __init__(
        self, kv: PagedKV, host_blocks: int, disk: BlockFile | None = None, peers: PeerReader | None = None
    ) -> None:
        self._kv = kv
        self._disk = disk
        self._peers = peers
        self._cuda = kv.device.type == "cuda"
        shape = (host_blocks, *kv.block_shape)
        self._host = (
            torch.zeros(shape, dtype=kv.stored, pin_memory=True)
            if self._cuda
            else untouched_zeros(shape, kv.stored, kv.device)
        )
        self._side = torch.cuda.Stream(kv.device) if self._cuda else None  # type: ignore[no-untyped-call]
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="headrace-disk-reader")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="headrace-disk-writer")
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
                blocks = self._kv.read_blocks([move.source for move in moves])
                for move, block in zip(moves, blocks, strict=True):
                    self._host[move.target].copy_(block, non_blocking=True)
            case Tier.HOST, Tier.DEVICE:
                blocks = [self._host[move.source] for move in moves]
                self._kv.write_blocks([move.target for move in moves], blocks)
            case Tier.HOST, Tier.DISK:
                for move in moves:
                    self._begin(self._writer, move, self._host[move.source])
            case Tier.DEVICE, Tier.DISK:
                for move in moves:
                    page = torch.empty(self._kv.block_shape, dtype=self._kv.stored, pin_memory=self._cuda)
                    page.copy_(self._kv.read_blocks([move.source])[0], non_blocking=True)
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
        thread.submit(self._copy, move, page, self._queued())

    def _queued(self) -> torch.cuda.Event | None:
        """What has to be waited for before pages of the host may be used."""
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
        ok, began = False, time.perf_counter()
        try:
            if queued is not None:
                queued.synchronize()
            content = _content(page)
            began = time.perf_counter()
            if self._disk is not None and move.target_tier is Tier.DISK:
                self._disk.write(move.target, content)
                ok = True
            elif self._disk is not None:
                self._disk.read(move.source, content)
                ok = True
        except OSError:
            ok = False  # full, broken or damaged: the arrival reports it, and the core computes
        finally:
            self._arrive(Arrival(move, ok, time.perf_counter() - began))

    def _arrive(self, arrival: Arrival) -> None:
        with self._news:
            self._arrived.append(arrival)
            self._news.notify()


def _content(page: Tensor) -> memoryview:
    """The bytes of a page of the host."""
    return memoryview(page.view(torch.uint8).numpy().data).cast("B")


def move_blocks(moves: Sequence[Move], kv: PagedKV, mover: Mover | None) -> None:
    """Run the moves of a plan in order, by ``mover`` if there are tiers below the device.

    Raises:
        ValueError: there are none, and a move needs one.
    """
    if mover is not None:
        mover.move(moves)
    elif moves:
        if any(move.source_tier != Tier.DEVICE or move.target_tier != Tier.DEVICE for move in moves):
            raise ValueError("this runner has no lower tiers: blocks cannot leave the device")
        kv.copy_blocks([move.source for move in moves], [move.target for move in moves])
