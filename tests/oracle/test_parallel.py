"""The options of families in a model in parts: ranks are threads, and their logits those of transformers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.compute.kernels import KernelsUnavailable, select
from headrace.compute.model.decoder import Decoder
from headrace.compute.model.kv import PagedKV
from headrace.compute.model.sharding import Place, shard_of
from headrace.compute.model.weights import load_weights, read_spec
from tests.oracle.families import CASES, LENGTH, VOCAB
from tests.oracle.harness import pack

CPU = torch.device("cpu")
BLOCK = 4
SECONDS = 60
TENSOR, STAGES, EXPERTS = (2, 1), (1, 2), (2, 1, True)


@dataclass
class Meeting:
    """What two ranks exchange."""

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(2, timeout=SECONDS))
    given: dict[int, Tensor] = field(default_factory=dict)
    residuals: Queue[Tensor] = field(default_factory=Queue)

    def exchange(self, rank: int, mine: Tensor) -> list[Tensor]:
        self.given[rank] = mine.clone()
        self.barrier.wait()
        every = [self.given[0], self.given[1]]
        self.barrier.wait()
        return every


@dataclass
class Threads:
    """A `Parallel` of two threads."""

    meeting: Meeting
    rank: int
    divided: bool

    def all_reduce(self, x: Tensor) -> Tensor:
        return sum(self.meeting.exchange(self.rank, x), torch.zeros_like(x)) if self.divided else x

    def receive(self, tokens: int, hidden: int, dtype: torch.dtype) -> Tensor:
        residual = self.meeting.residuals.get(timeout=SECONDS)
        assert (residual.shape, residual.dtype) == ((tokens, hidden), dtype)
        return residual

    def send(self, residual: Tensor) -> None:
        self.meeting.residuals.put(residual.clone())

    def hidden(self, states: Tensor, wanted: int) -> Tensor:
        return states

    def logits(self, hidden: Tensor, project: Callable[[Tensor], Tensor]) -> Tensor:
        logits = project(hidden)
        return torch.cat(self.meeting.exchange(self.rank, logits), -1) if self.divided else logits


def computed(folder: Path, tokens: list[int], place: Place, kernels: str, meeting: Meeting) -> Tensor:
    """The logits of one rank, computed in two chunks."""
    shard = shard_of(read_spec(folder), place)
    weights = load_weights(folder, shard, torch.float32, CPU)
    parallel = Threads(meeting, place.rank, place.tensor_size > 1)
    decoder = Decoder(shard, weights, select(kernels, CPU), LENGTH, parallel)
    kv = PagedKV(shard.spec.shape, LENGTH // BLOCK, BLOCK, torch.float32, CPU)
    table, parts = [list(range(LENGTH // BLOCK))], []
    for begin, end in ((0, 25), (25, LENGTH)):
        wanted = list(range(end - begin))
        batch = pack(tokens[begin:end], [begin], [end - begin], table, wanted, BLOCK, CPU)
        states = decoder.hidden(batch, kv)
        parts.append(decoder.logits(states) if place.last else states)
    return torch.cat(parts)


@pytest.mark.parametrize("kernels", ["torch", "cpp"])
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("granite", TENSOR),
        ("granite-biases", STAGES),
        ("glm4", TENSOR),
        ("ernie4_5", TENSOR),
        ("hunyuan", TENSOR),
        ("hyperclovax", TENSOR),
        ("smollm3", TENSOR),
        ("gpt_oss", TENSOR),
        ("gpt_oss", STAGES),
        ("olmo2", STAGES),
        ("olmo3", STAGES),
        ("gpt_oss", EXPERTS),
        ("gpt_oss-quantizable", EXPERTS),
        ("mixtral", EXPERTS),
        ("qwen3_moe", EXPERTS),
        ("qwen2_moe", EXPERTS),
        ("glm4_moe", EXPERTS),
    ],
)
@torch.inference_mode()
def test_a_model_in_two_parts(name: str, sizes: tuple[Any, ...], kernels: str, tmp_path: Path) -> None:
    try:
        select(kernels, CPU)
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    model = CASES[name].build(tmp_path)
    tokens = torch.randint(1, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(1))
    meeting = Meeting()
    with ThreadPoolExecutor(2) as threads:
        ranks = [
            threads.submit(computed, tmp_path, tokens.tolist(), Place(rank, *sizes), kernels, meeting)
            for rank in range(2)
        ]
        logits = ranks[-1].result(SECONDS)
    torch.testing.assert_close(logits, model(tokens[None]).logits[0], rtol=2e-4, atol=2e-4)
