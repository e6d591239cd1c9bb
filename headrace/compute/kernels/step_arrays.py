"""The arrays of a step, each set computed by one call of the extension into reused memory.

In a step of a small model, creating arrays and tensors takes longer than computing their values. Here they are created
once per shape and overwritten: a result is valid until the next call.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from headrace.compute.batch import Batch, Ints, StepInterrupt
from headrace.compute.kernels import KernelsUnavailable
from headrace.compute.kernels.cpp_checks import extension
from headrace.core.plan import Row

Words = np.ndarray[tuple[int, ...], np.dtype[np.int32]]

SHAPES = 8  # see docs/decisions/cpu-kernels.md#host-work-of-a-step
"""Maximum number of shapes whose arrays are kept. They fragment freed memory, so each costs more than its own bytes:
128 of them took 20 MB with the built-in model.
"""


class StepArrays:
    """Arrays of a step over ``cpu``, the extension; ``block_size`` is that of the tables."""

    def __init__(self, cpu: Any, block_size: int) -> None:
        self._cpu = cpu
        self._block_size = block_size
        self._columns = np.zeros(256, dtype=np.int64)
        self._packed = np.zeros(1024, dtype=np.int64)
        self._lines: dict[tuple[int, int, bool], tuple[list[Ints], list[Ints], bool]] = {}
        self._batches: dict[tuple[Any, ...], Batch] = {}

    def columns(self, rows: tuple[Row, ...], vocab_size: int) -> tuple[list[Ints], list[Ints], bool]:
        """The columns of `Rows`, those of `Lines` and `drawn_at`, and whether any row has drafts: see `columns_of`."""
        shape = self._cpu.columns(self._columns, rows, vocab_size)
        if isinstance(shape, int):
            self._columns = np.zeros(2 * shape, dtype=np.int64)
            self._lines.clear()
            shape = self._cpu.columns(self._columns, rows, vocab_size)
        found = self._lines.get(shape)
        if found is None:
            if len(self._lines) == SHAPES:
                self._lines.clear()
            count, lines, verifies = shape
            of_rows = self._columns[: 5 * count].reshape(5, count)
            of_lines = self._columns[5 * count : 5 * count + 6 * lines].reshape(6, lines)
            found = self._lines[shape] = list(of_rows), list(of_lines), verifies
        return found

    def pack(
        self,
        slots: Ints | None,
        starts: Ints,
        lengths: Ints,
        wanted: Ints,
        tables: Words,
        blocks: Ints | None,
        tokens: Words,
        *,
        limit: int,
        interrupt: StepInterrupt | None = None,
    ) -> Batch:
        """Rows of some ``slots``, as `Slots.pack` packs them; raises what `Slots.check` raises.

        ``tables`` int32 [N, W], ``blocks`` int64 [N] (their lengths) and ``tokens`` int32 [N, M] are of all slots,
        and no row ends behind ``limit``. Without ``slots`` each row has its own table, all of it, and ``tokens`` are
        packed already.
        """
        stride = 0 if slots is None else tokens.shape[1]
        given = (slots, starts, lengths, wanted, tables, tables.shape[1], blocks, tokens, stride, limit)
        shape = self._cpu.pack(self._packed, *given, self._block_size)
        if isinstance(shape, int):
            self._packed = np.zeros(2 * shape, dtype=np.int64)
            self._batches.clear()
            shape = self._cpu.pack(self._packed, *given, self._block_size)
        batch = self._batches.get((shape, interrupt))
        if batch is None:
            if len(self._batches) == SHAPES:
                self._batches.clear()
            batch = self._batches[shape, interrupt] = self._batch(shape, interrupt)
        return batch

    def forget(self) -> None:
        """Forget all batches, and with them what kernels keep for further steps."""
        self._batches.clear()

    def store(self, tokens: Words, slots: Ints, positions: Ints, values: Ints) -> None:
        """Write ``values`` to ``tokens`` int32 [N, M] of all slots, as `Slots.append` does."""
        self._cpu.store(tokens, tokens.shape[1], slots, positions, values)

    def _batch(self, shape: Sequence[int], interrupt: StepInterrupt | None) -> Batch:
        """The arrays of a shape as a batch; the order is that of `csrc/module.cpp`."""
        tokens, wanted, rows, columns, ones = shape
        positions, mapping, at, lengths, contexts, rest = np.split(
            self._packed, np.cumsum((tokens, tokens, wanted, rows, rows))
        )
        parts = []
        for size in (rows + 1, rows, tokens, rows * columns):
            parts.append(torch.from_numpy(rest.view(np.int32)[:size]))
            rest = rest[-(-size // 2) :]
        starts, ends, ids, tables = parts
        return Batch(
            tokens=ids,
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(mapping),
            query_starts=starts,
            context_lens=ends,
            block_tables=tables.view(rows, columns),
            logits_indices=torch.from_numpy(at),
            lengths=lengths.data,
            contexts=contexts.data,
            decode_rows=ones,
            block_size=self._block_size,
            interrupt=interrupt,
        )


@cache
def _extension() -> Any | None:
    try:
        return extension()
    except KernelsUnavailable:
        return None


def step_arrays(device: torch.device, block_size: int) -> StepArrays | None:
    """Arrays for steps on ``device``; None without the extension, or if arrays must be copied to the device."""
    cpu = _extension() if device.type == "cpu" else None
    return None if cpu is None else StepArrays(cpu, block_size)
