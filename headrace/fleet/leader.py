"""Rank 0 of a parallel model: sends each plan to the other ranks, computes its part, and restarts lost ranks.

It implements `compute.parallel.Parallel` for the decoder, and `compute.parallel.Followers` for the runner. If a rank is
lost, the operation in progress raises `RunnerLost`, and so does every later one until `restore`.

In a pipeline rank 0 starts plans while the last stage computes an older one. The last stage receives their messages
only after it has returned the logits of the older one; otherwise these would wait for all queued plans.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from headrace.compute.batch import Ints
from headrace.compute.memory_plan import RankSize
from headrace.compute.mover import Copied
from headrace.core.plan import StepPlan
from headrace.core.ports import RunnerLost
from headrace.fleet.collectives import Collectives, connect, open_store
from headrace.fleet.messages import Kind, MemorySetup, ModelSetup, packed, step_message
from headrace.fleet.others import Others, RankFailed

REASON_SECONDS = 2.0
"""Timeout for the reason of a broken connection, which the watcher of the ranks finds."""

logger = logging.getLogger(__name__)


class Leader:
    """Connects rank 0 to ``others``.

    ``setup`` is that of rank 0, ``vocabulary`` the number of tokens of the whole LM head. `connect` starts the ranks,
    `loaded` waits until they have loaded, `allocate` allocates their memory. ``plan_bytes`` counts the bytes of all
    messages.
    """

    def __init__(self, others: Others, setup: ModelSetup, vocabulary: int, device: torch.device) -> None:
        self.plan_bytes = 0
        self._others = others
        self._setup = setup
        self._vocabulary = vocabulary
        self._device = device
        self._collectives: Collectives | None = None
        self._counted: Counter[str] = Counter()  # of the connections that were replaced
        self._weight_bytes: list[int] = []
        self.fingerprints: list[str] = []
        """Fingerprints of the weights of ranks 1, 2, … (set by `loaded`), if the setup requests them."""
        self._memory: MemorySetup | None = None
        self._lost = ""
        self._reported = False  # whether the loss was reported to the runner
        place = setup.place
        self._stage = range(1, place.tensor_size)  # the other ranks of the first stage
        self._last = range(max(1, place.size - place.tensor_size), place.size)  # those of the last one
        self._open = 0  # plans with rows that have begun and not ended
        self._held: deque[tuple[bytes, bool]] = (
            deque()
        )  # for the last stage: messages, and whether a plan has rows

    # -- start -------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Start the other ranks, which begin to load; returns when all are connected.

        Raises:
            RankFailed: a rank could not start or has another model.
        """
        self._open = 0
        self._held.clear()
        self._others.start()
        try:
            host, place = self._others.address, self._setup.place
            store = open_store(host)
            self._others.send([_asked(Kind.CHECK, self._setup.to_json())] * (place.size - 1))
            self._others.replies()
            setups = [self._setup.at(rank, host, store.port).to_json() for rank in range(1, place.size)]
            self._others.send([_asked(Kind.LOAD, setup) for setup in setups])
            self._collectives = connect(store, place, self._vocabulary, self._device, host)
        except (RuntimeError, OSError) as error:  # torch's if a rank did not connect
            raise RankFailed(self._others.failure(REASON_SECONDS) or str(error)) from error

    def loaded(self) -> list[int]:
        """Wait until all ranks have loaded; returns the bytes of the weights of ranks 1, 2, …"""
        replies = self._others.replies()
        self._weight_bytes = [reply["weight_bytes"] for reply in replies]
        self.fingerprints = [reply["fingerprint"] for reply in replies]
        return self._weight_bytes

    def allocate(self, memory: MemorySetup) -> list[RankSize]:
        """Allocate the memory of all ranks; returns the sizes of ranks 1, 2, …"""
        self._memory = memory
        self._others.send([_asked(Kind.ALLOCATE, memory.to_json())] * (self._setup.place.size - 1))
        replies = self._others.replies()
        for rank, reply in enumerate(replies, 1):
            if reply["disk_problem"]:
                logger.warning("rank %d has no disk tier in %s", rank, reply["disk_problem"])
        return [
            RankSize(weights, reply["kv_bytes"])
            for weights, reply in zip(self._weight_bytes, replies, strict=True)
        ]

    def listen(self, heard: Callable[[int, Copied], None]) -> None:
        """Call ``heard`` with the rank for each finished disk copy on ranks 1, 2, …, from any thread."""
        self._others.listen(heard)

    def close(self) -> None:
        """End the other ranks."""
        self._lost, self._reported = self._lost or "the ranks were stopped", False
        self._collectives = None
        self._others.close()

    # -- `compute.parallel.Followers` ------------------------------------------------------------------

    def restore(self) -> bool:
        if not self._reported:
            return False
        began = time.monotonic()
        self._counted = Counter(self.payload_bytes)
        self._collectives = None
        self.connect()
        self.loaded()
        if self._memory is not None:
            self.allocate(self._memory)
        self._lost, self._reported = "", False
        logger.warning("all ranks run again after %.1f s", time.monotonic() - began)
        return True

    def execute(self, plan: StepPlan, tokens: Sequence[Ints], wanted: Ints) -> None:
        if not (plan.entries or plan.moves or plan.rows):
            return
        message = step_message(plan, tokens, wanted)
        if self._open and self._setup.place.pipeline_size > 1:
            self._held.append((message, bool(plan.rows)))
            self._send(message, range(1, self._last.start))
        else:
            self._send(message, range(1, self._setup.place.size))
        self._open += bool(plan.rows)

    def append(self, slots: Ints, positions: Ints, tokens: Tensor) -> None:
        if self._stage:
            self._send(packed(Kind.TOKENS, slots, positions), self._stage)
        with self._connected() as collectives:
            collectives.broadcast(tokens)

    def arrive(self) -> None:
        with self._connected() as collectives:
            collectives.arrive()

    def end(self) -> None:
        self._open -= 1
        more = True
        while self._held and more:  # up to the next plan that wants logits
            message, has_rows = self._held.popleft()
            self._send(message, self._last)
            more = not has_rows

    # -- `compute.parallel.Parallel` -----------------------------------------------------------------

    def all_reduce(self, x: Tensor) -> Tensor:
        with self._connected() as collectives:
            return collectives.all_reduce(x)

    def receive(self, tokens: int, hidden: int, dtype: torch.dtype) -> Tensor:
        raise NotImplementedError("rank 0 is in the first stage")

    def send(self, residual: Tensor) -> None:
        with self._connected() as collectives:
            collectives.send(residual)

    def hidden(self, states: Tensor, wanted: int) -> Tensor:
        with self._connected() as collectives:
            return collectives.hidden(states, wanted)

    def logits(self, hidden: Tensor, project: Callable[[Tensor], Tensor]) -> Tensor:
        self._send(packed(Kind.LOGITS, [len(hidden)]), self._last)
        with self._connected() as collectives:
            return collectives.logits(hidden, project)

    @property
    def payload_bytes(self) -> dict[str, int]:
        """The payload of rank 0's operations, by kind; it goes on counting when lost ranks run again."""
        collectives = self._collectives
        if collectives is None:
            return dict(self._counted)
        return {kind: count + self._counted[kind] for kind, count in collectives.payload_bytes.items()}

    def _send(self, message: bytes, ranks: range) -> None:
        with self._connected():
            self._others.send(
                [message if rank in ranks else None for rank in range(1, self._setup.place.size)]
            )
            self.plan_bytes += len(message) * len(ranks)

    @contextmanager
    def _connected(self) -> Iterator[Collectives]:
        """Convert errors of the body to `RunnerLost`; also raise it if a rank was lost before."""
        self._lost = self._lost or self._others.failure()
        if self._lost or self._collectives is None:
            self._reported = True
            raise RunnerLost(self._lost)
        try:
            yield self._collectives
        except RuntimeError as error:  # of the connections: `others` knows why
            first = str(error).partition("\n")[0]
            self._lost = self._others.failure(REASON_SECONDS) or first
            self._reported = True
            self._others.stop()
            raise RunnerLost(self._lost) from error


def _asked(kind: Kind, setup: bytes) -> bytes:
    return kind.to_bytes(4, "little") + setup
