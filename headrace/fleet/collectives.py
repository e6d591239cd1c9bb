"""`compute.parallel.Parallel` over torch.distributed: gloo between CPUs, NCCL between GPUs.

```
 world           all ranks: states and logits of the last stage to rank 0
 stages          all ranks: states between stages. A plan's may be sent before the last stage has answered an older one
 tensor          the ranks of a stage: sums, tokens from rank 0
```
The groups are separate objects without a global process group, so a process can leave one and join another.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from headrace.compute.model.sharding import Place

STORE_SECONDS = 60.0
"""Timeout for a rank to reach rank 0's store, and for what it waits for there."""

STEP_SECONDS = 10.0
"""Timeout for the other ranks of a stage, which compute the same layer."""

STAGE_SECONDS = 300.0
"""Timeout for another stage, which may compute a long prompt. Ended or hung processes are detected earlier: see
`others`."""


class Collectives:
    """The operations of one rank. ``payload_bytes`` counts what this rank sends, receives or adds, by kind.

    Args:
        place: the rank.
        world, stages, tensor: the process groups.
        vocabulary: the number of tokens of the whole head.
        device: the device of the tensors.
    """

    def __init__(
        self, place: Place, world: Any, stages: Any, tensor: Any, vocabulary: int, device: torch.device
    ) -> None:
        self.place = place
        self.payload_bytes = dict.fromkeys(("all_reduce", "stages", "hidden", "logits", "tokens"), 0)
        self._world, self._stages, self._tensor = world, stages, tensor
        self._vocabulary = vocabulary
        self._device = device
        self._sent: deque[tuple[Any, Tensor]] = deque()  # residuals that may be under way
        self._expected: deque[Tensor] = deque()  # on rank 0: states that have not come

    @property
    def heads(self) -> tuple[int, ...]:
        """The ranks that have a part of the head, in the order of its tokens."""
        return tuple(range(self.place.size - self.place.tensor_size, self.place.size))

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._tensor is not None:
            self.payload_bytes["all_reduce"] += x.nbytes
            x = x.contiguous()
            self._tensor.allreduce([x]).wait()
        return x

    def receive(self, tokens: int, hidden: int, dtype: torch.dtype) -> Tensor:
        residual = torch.empty((tokens, hidden), dtype=dtype, device=self._device)
        self._stages.recv([residual], self.place.rank - self.place.tensor_size, 0).wait()
        return residual

    def send(self, residual: Tensor) -> None:
        self.payload_bytes["stages"] += residual.nbytes
        residual = residual.contiguous()
        sending = self._stages.send([residual], self.place.rank + self.place.tensor_size, 0)
        self._sent.append((sending, residual))
        if len(self._sent) > self.place.pipeline_size:  # more than there are plans under way
            self._sent.popleft()[0].wait()

    def hidden(self, states: Tensor, wanted: int) -> Tensor:
        sender = self.heads[0]
        if sender and self.place.rank == 0:
            states = states.new_empty((wanted, states.shape[1]))
            self._expected.append(states)
        elif sender and self.place.rank == sender:
            self.payload_bytes["hidden"] += states.nbytes
            self._world.send([states.contiguous()], 0, 0).wait()
        return states

    def arrive(self) -> None:
        """On rank 0: wait for the states of the oldest plan, which `hidden` has returned before they arrived."""
        if self._expected:
            self._world.recv([self._expected.popleft()], self.heads[0], 0).wait()

    def logits(self, hidden: Tensor, project: Callable[[Tensor], Tensor]) -> Tensor:
        """On rank 0: send the states to the ranks with a head, and join what they return, in float32."""
        hidden = hidden.contiguous()
        others = [rank for rank in self.heads if rank != 0]
        for rank in others:
            self.payload_bytes["hidden"] += hidden.nbytes
            self._world.send([hidden], rank, 0).wait()
        parts = [project(hidden).float()] if self.heads[0] == 0 else []
        for rank in others:
            tokens = Place(rank, *self.place[1:]).cut(self._vocabulary).size
            part = torch.empty((len(hidden), tokens), dtype=torch.float32, device=self._device)
            self._world.recv([part], rank, 0).wait()
            self.payload_bytes["logits"] += part.nbytes
            parts.append(part)
        return torch.cat(parts, 1)

    def answer_logits(
        self, count: int, hidden: int, dtype: torch.dtype, project: Callable[[Tensor], Tensor]
    ) -> None:
        """On another rank: its part of `logits`."""
        if self.place.rank in self.heads:
            states = torch.empty((count, hidden), dtype=dtype, device=self._device)
            self._world.recv([states], 0, 0).wait()
            part = project(states).float().contiguous()
            self.payload_bytes["logits"] += part.nbytes
            self._world.send([part], 0, 0).wait()

    def broadcast(self, tokens: Tensor) -> Tensor:
        """``tokens`` of rank 0, on every rank of the first stage; the others do not read tokens."""
        if self._tensor is not None:
            if self.place.rank == 0:
                self.payload_bytes["tokens"] += tokens.nbytes
            self._tensor.broadcast(tokens, 0).wait()
        return tokens


def open_store(address: str) -> TCPStore:
    """Rank 0's store, in which the ranks find each other. It listens at ``address`` only.

    torch itself would listen at all addresses of the machine, and the store authenticates no client.

    Raises:
        OSError, RuntimeError: it cannot listen there.
    """
    family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
    listening = socket.create_server((address, 0), family=family)
    return TCPStore(
        address,
        listening.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=STORE_SECONDS),
        master_listen_fd=listening.detach(),
        use_libuv=False,  # which takes a socket only since torch 2.8
    )


def connect(
    store: Store,
    place: Place,
    vocabulary: int,
    device: torch.device,
    address: str,
) -> Collectives:
    """Join the other ranks through ``store``, which reach this one at ``address``; waits until all have.

    Raises:
        RuntimeError: not all ranks came in time.
    """
    pipeline = place.pipeline_size > 1
    world = _group(
        store, "world", place.rank, place.size, device, address, STAGE_SECONDS if pipeline else STEP_SECONDS
    )
    stages = tensor = None
    if pipeline:
        stages = _group(store, "stages", place.rank, place.size, device, address, STAGE_SECONDS)
    if place.tensor_size > 1:
        name = f"stage {place.stage}"
        tensor = _group(store, name, place.tensor_rank, place.tensor_size, device, address, STEP_SECONDS)
    return Collectives(place, world, stages, tensor, vocabulary, device)


def _group(
    store: Store, name: str, rank: int, size: int, device: torch.device, address: str, seconds: float
) -> Any:
    """A process group of its own under ``name``."""
    # Their own options have a timeout for every operation; torch's stubs do not know it.
    kind: Any = dist.ProcessGroupNCCL if device.type == "cuda" else dist.ProcessGroupGloo
    options = kind._Options() if device.type == "cpu" else kind.Options()
    options._timeout = timedelta(seconds=seconds)
    if device.type == "cpu":
        options._devices = [kind.create_device(hostname=address)]
        options._threads = 1
    return kind(PrefixStore(name, store), rank, size, options)
