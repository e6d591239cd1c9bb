"""Drives the decoder over paged memory without an engine, and makes tiny models with transformers to compare.

`Rig` keeps sequences with block tables from a shuffled pool; `step` computes any mix of rows as one batch.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headrace.compute.batch import Batch
from headrace.compute.kernels import select
from headrace.compute.model.decoder import Decoder, ModelDecoder
from headrace.compute.model.families import parse_config
from headrace.compute.model.hub import read_config
from headrace.compute.model.kv import PagedKV
from headrace.compute.model.weights import load_weights

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS = 32
"""Sequences of a rig whose recurrent states are kept."""


def pack(
    tokens: list[int],
    starts: list[int],
    lengths: list[int],
    tables: list[list[int]],
    wanted: list[int],
    block_size: int,
    device: torch.device = DEVICE,
) -> Batch:
    """A batch from its rows, spelt out one token at a time; rows of one token must come first."""
    positions = [start + i for start, length in zip(starts, lengths, strict=True) for i in range(length)]
    owners = [row for row, length in enumerate(lengths) for _ in range(length)]
    slots = [
        tables[row][position // block_size] * block_size + position % block_size
        for row, position in zip(owners, positions, strict=True)
    ]
    contexts = [start + length for start, length in zip(starts, lengths, strict=True)]
    width = max(map(len, tables))
    padded = [table + [0] * (width - len(table)) for table in tables]

    def tensor(values: object, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return Batch(
        tokens=tensor(tokens, torch.int32),
        positions=tensor(positions),
        slot_mapping=tensor(slots),
        query_starts=tensor([0, *itertools.accumulate(lengths)], torch.int32),
        context_lens=tensor(contexts, torch.int32),
        block_tables=tensor(padded, torch.int32),
        logits_indices=tensor(wanted),
        lengths=tuple(lengths),
        contexts=tuple(contexts),
        decode_rows=next((row for row, length in enumerate(lengths) if length != 1), len(lengths)),
        block_size=block_size,
    )


@dataclass
class Sequence:
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0


class Rig:
    def __init__(
        self,
        folder: Path,
        max_model_len: int,
        block_size: int = 4,
        num_blocks: int = 128,
        seed: int = 0,
        kernels: str = "torch",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.spec = parse_config(read_config(folder))
        weights = load_weights(folder, self.spec, dtype, DEVICE)
        self._place(
            Decoder(self.spec, weights, select(kernels, DEVICE), max_model_len), block_size, num_blocks, seed
        )

    @classmethod
    def over(cls, decoder: ModelDecoder) -> Rig:
        """A rig with a loaded decoder."""
        rig = cls.__new__(cls)
        rig._place(decoder, 4, 128, 0)
        return rig

    def _place(self, decoder: ModelDecoder, block_size: int, num_blocks: int, seed: int) -> None:
        self.decoder = decoder
        if decoder.states is not None:
            decoder.states.allocate(SLOTS, 0, DEVICE)
        self.kv = PagedKV(decoder.shape, num_blocks, block_size, decoder.dtype, DEVICE)
        self.block_size = block_size
        self.free = list(range(num_blocks))
        random.Random(seed).shuffle(self.free)
        self.sequences: list[Sequence] = []

    def step(self, rows: list[tuple[Sequence, int]], every: bool = True) -> list[Tensor]:
        """Compute ``length`` further tokens of each sequence; logits [length, vocab] (or [1, vocab]) by row."""
        rows = sorted(rows, key=lambda row: row[1] != 1)  # rows of one token come first
        for sequence, length in rows:
            while len(sequence.blocks) * self.block_size < sequence.computed + length:
                sequence.blocks.append(self.free.pop())
        starts = [sequence.computed for sequence, _ in rows]
        lengths = [length for _, length in rows]
        tables = [sequence.blocks for sequence, _ in rows]
        tokens = [token for s, n in rows for token in s.tokens[s.computed : s.computed + n]]
        wanted = list(range(len(tokens))) if every else [end - 1 for end in itertools.accumulate(lengths)]
        batch = replace(
            pack(tokens, starts, lengths, tables, wanted, self.block_size),
            slots=np.array([self._slot(sequence) for sequence, _ in rows]),
        )
        with torch.inference_mode():
            logits = self.decoder.logits(self.decoder.hidden(batch, self.kv)).float().cpu()
        for sequence, length in rows:
            sequence.computed += length
        return list(logits.split(lengths if every else [1] * len(rows)))

    def _slot(self, sequence: Sequence) -> int:
        known = next((slot for slot, each in enumerate(self.sequences) if each is sequence), None)
        if known is None:
            known = len(self.sequences)
            self.sequences.append(sequence)
        return known

    def logits(self, sequence: Sequence, chunks: list[int]) -> Tensor:
        """Logits of all positions, computed in chunks of the given sizes, repeated until the end."""
        parts: list[Tensor] = []
        while sequence.computed < len(sequence.tokens):
            length = min(chunks[len(parts) % len(chunks)], len(sequence.tokens) - sequence.computed)
            parts += self.step([(sequence, length)])
        return torch.cat(parts)

    def generate(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """Greedy continuations of all prompts together: prompts in the first step, then row by row."""
        sequences = [Sequence(list(prompt)) for prompt in prompts]
        for _ in range(count):
            rows = [(s, len(s.tokens) - s.computed) for s in sequences]
            ordered = sorted(rows, key=lambda row: row[1] != 1)
            for (sequence, _), logits in zip(ordered, self.step(rows, every=False), strict=True):
                sequence.tokens.append(int(logits.argmax()))
        return [s.tokens[len(p) :] for s, p in zip(sequences, prompts, strict=True)]
