"""One rank other than 0: loads its part of the model, and repeats every step of rank 0 on it.

```
 rank 0   entries, moves, rows ──message──> slots, pages, layers   as `compute.runner`, without sampling
          states whose logits are wanted ──> part of the head ──> logits
          sampled tokens ──> slots
```
It has its own slots, block tables and pages, so a message contains only changes.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._C._distributed_c10d import TCPStore

from headrace.compute.batch import Ints, ramps
from headrace.compute.blockfile import BLOCKS_FILE, BlockFile
from headrace.compute.checkpoint import ModelError
from headrace.compute.device import freeing_at_once
from headrace.compute.kernels import select
from headrace.compute.model.decoder import Decoder
from headrace.compute.model.kv import PagedKV
from headrace.compute.model.sharding import Shard, shard_of
from headrace.compute.model.weights import (
    DecoderWeights,
    dummy_weights,
    kv_fingerprint,
    load_weights,
    read_spec,
)
from headrace.compute.mover import Copied, Mover, move_blocks
from headrace.compute.slots import Rows, Slots
from headrace.compute.step_sampling import drafted
from headrace.compute.transfer import upload
from headrace.core.plan import StepPlan
from headrace.fleet.collectives import STORE_SECONDS, connect
from headrace.fleet.messages import (
    Kind,
    MemorySetup,
    ModelSetup,
    Words,
    disk_folder,
    identity,
    step_of,
    torch_dtype,
    unpacked,
)
from headrace.fleet.others import copied_message
from headrace.service.takeover import when_free

UNLOCK_SECONDS = 5.0
"""Timeout for the lock of a block file that a lost rank still holds."""


class Worker:
    """Handles the messages of rank 0: call `answer` with each, in order.

    ``report`` reports a finished disk copy to rank 0, from any thread. ``own`` are the fields of `ModelSetup` that
    depend on this machine.
    """

    def __init__(self, report: Callable[[Copied], None], own: Mapping[str, Any] | None = None) -> None:
        self._report = report
        self._own = own or {}
        self._rank: _Rank | None = None
        self._memory: _Memory | None = None

    @torch.inference_mode()
    def answer(self, message: bytes) -> dict[str, Any] | None:
        """Execute a message; returns a reply if rank 0 waits for one.

        Raises:
            ModelError: the model cannot be loaded, or is not that of rank 0.
            RuntimeError: another rank was lost.
        """
        kind, body = Kind(int.from_bytes(message[:4], "little")), message[4:]
        match kind:
            case Kind.CHECK:
                _check(self._setup(body))
                return {}
            case Kind.LOAD:
                self.close()
                with freeing_at_once():
                    self._rank = _Rank(self._setup(body))
                return {"weight_bytes": self._rank.decoder.nbytes, "fingerprint": self._rank.fingerprint}
            case Kind.ALLOCATE:
                assert self._rank is not None
                self._memory = _Memory(self._rank, MemorySetup.from_json(body), self._report)
                return {"kv_bytes": self._memory.kv.nbytes, "disk_problem": self._memory.disk_problem}
        assert self._memory is not None
        self._memory.answer(kind, unpacked(message)[1])
        return None

    def _setup(self, text: bytes) -> ModelSetup:
        return replace(ModelSetup.from_json(text), **self._own)

    def close(self) -> None:
        """Release the memory."""
        if self._memory is not None:
            self._memory.close()
        self._rank = self._memory = None


class _Rank:
    """The rank's part of the model, connected to the others."""

    def __init__(self, setup: ModelSetup) -> None:
        torch.set_num_threads(setup.threads)
        self.setup = setup
        self.device = device_of(setup.device, setup.local_rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.shard = shard_of(read_spec(Path(setup.folder)), setup.place)
        store = TCPStore(setup.host, setup.port, is_master=False, timeout=timedelta(seconds=STORE_SECONDS))
        self.collectives = connect(
            store, setup.place, self.shard.whole.vocab_size, self.device, setup.address
        )
        weights = load_part(setup, self.shard, self.device)
        spec, length = self.shard.whole, setup.max_model_len
        self.fingerprint = kv_fingerprint(weights, spec, length) if setup.with_fingerprint else ""
        kernels = select(setup.kernels, self.device, setup.cpu_isa)
        self.decoder = Decoder(self.shard, weights, kernels, setup.max_model_len, self.collectives)


class _Memory:
    """Slots and pages, of the sizes that rank 0 chose for all."""

    def __init__(self, rank: _Rank, setup: MemorySetup, report: Callable[[Copied], None]) -> None:
        self._rank, sizes = rank, (setup.num_blocks, setup.block_size, torch_dtype(setup.kv_dtype))
        self.kv = PagedKV(rank.decoder.shape, *sizes, rank.device)
        self.disk_problem = ""
        disk = self._open_disk(setup.disk_folder, setup) if setup.disk_folder and setup.disk_blocks else None
        self._mover = Mover(self.kv, setup.host_blocks, disk, report=report) if setup.host_blocks else None
        self._slots = Slots(
            max_num_seqs=setup.max_num_seqs,
            max_model_len=rank.setup.max_model_len,
            block_size=setup.block_size,
            device=rank.device,
        )

    def _open_disk(self, tier: str, setup: MemorySetup) -> BlockFile | None:
        """This rank's part of the disk tier; if it fails, every disk copy fails, and blocks are computed again."""
        folder = disk_folder(tier, self._rank.setup.place)
        block_bytes = self.kv.nbytes // setup.num_blocks
        try:
            return when_free(
                lambda: BlockFile(folder / BLOCKS_FILE, setup.disk_blocks, block_bytes),
                UNLOCK_SECONDS,
                str(folder),
            )
        except OSError as error:
            self.disk_problem = f"{folder}: {error.strerror or error}"
            return None

    def answer(self, kind: Kind, arrays: Sequence[Words]) -> None:
        decoder, collectives = self._rank.decoder, self._rank.collectives
        if kind is Kind.STEP:
            self._execute(*step_of(arrays))
        elif kind is Kind.TOKENS:
            slots, positions = (array.astype("int64") for array in arrays)
            tokens = torch.empty(len(slots), dtype=torch.int64, device=self._rank.device)
            self._slots.append(slots, positions, collectives.broadcast(tokens))
        elif kind is Kind.LOGITS:
            (count,) = arrays[0].tolist()
            collectives.answer_logits(count, decoder.spec.hidden_size, decoder.dtype, decoder.project)

    @torch.inference_mode()
    def _execute(self, plan: StepPlan, tokens: Sequence[Ints], wanted: Ints) -> None:
        for entry, known in zip(plan.entries, tokens, strict=True):
            self._slots.admit(entry, known)
        move_blocks(plan.moves, self.kv, self._mover)
        if not plan.rows:
            return
        rows = Rows.of(plan.rows)
        self._slots.extend(plan.rows)
        if rows.drafts.any():
            positions = np.repeat(rows.known, rows.drafts) + ramps(rows.drafts)
            (drafts,) = upload(self._rank.device, drafted(plan.rows, self._rank.shard.whole.vocab_size))
            self._slots.append(np.repeat(rows.slot, rows.drafts), positions, drafts)
        self._rank.decoder.hidden(self._slots.pack(rows, wanted), self.kv)

    def close(self) -> None:
        if self._mover is not None:
            self._mover.close()


def _check(setup: ModelSetup) -> None:
    """Raise ModelError unless this rank has the same model and versions as rank 0."""
    if identity(Path(setup.folder)) != setup.identity:
        raise ModelError(
            f"{setup.folder} has other weights here than on rank 0, or Headrace or torch has another version"
        )


def load_part(setup: ModelSetup, shard: Shard, device: torch.device, *, fp8: bool = False) -> DecoderWeights:
    """The weights of a rank. ``fp8``: weights stored in fp8 are not expanded; only without parallelism.

    Raises:
        ModelError: they cannot be loaded.
    """
    dtype = torch_dtype(setup.dtype)
    if setup.dummy_seed is not None:
        return dummy_weights(shard, dtype, device, setup.dummy_seed, setup.quantization)
    return load_weights(Path(setup.folder), shard, dtype, device, setup.quantization, fp8=fp8)


def device_of(kind: str, local_rank: int) -> torch.device:
    """The device of a rank by its number on its machine: each has a GPU of its own, and all share the CPU."""
    return torch.device("cuda", local_rank) if kind == "cuda" else torch.device("cpu")


# The process of one rank other than 0: `others` or `launched` starts it with a socket to rank 0.

BEAT_SECONDS = 1.0
"""Time between two heartbeats."""

logger = logging.getLogger(__name__)


class _Replies:
    """The socket for replies, shared by the computing thread and the heartbeat thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, reply: bytes) -> None:
        with self._lock:
            self._connection.send_bytes(reply)

    def beat(self) -> None:
        """Send heartbeats until rank 0 has gone; then end the process, which may be waiting for another rank."""
        ended = threading.Event()
        try:
            while not ended.wait(BEAT_SECONDS):
                self.send(b".")
        except OSError:
            os._exit(1)


def main(descriptor: int, own: str) -> None:
    """Handle the messages of a socket until it is closed; ``own`` is the argument of `Worker`, as JSON."""
    connection = Connection(descriptor)
    replies = _Replies(connection)
    replies.send(b".")
    threading.Thread(target=replies.beat, name="headrace-beat", daemon=True).start()
    worker = Worker(lambda copied: replies.send(b"C" + copied_message(copied)), json.loads(own))
    try:
        while True:
            reply = worker.answer(connection.recv_bytes())
            if reply is not None:
                replies.send(b"R" + json.dumps(reply).encode())
    except EOFError:
        os._exit(0)  # without waiting for threads of the process groups
    except Exception as error:
        replies.send(b"E" + f"{type(error).__name__}: {error}".encode())
        os._exit(1)
