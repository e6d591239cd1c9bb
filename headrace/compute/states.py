"""Recurrent states on the device: those of all slots, and behind them the cells of all checkpoints.

```
 row of slot 0      | layer 0 conv | layer 0 recurrent | layer 1 conv | …     all states of one sequence, adjacent
 …
 row of cell 0      | layer 0 conv | layer 0 recurrent | …
```
So a checkpoint is saved or restored by copying one row, whatever its layers. A model reads and writes the states of a
layer through a view [slots, ...] of all rows, indexed by the slots of a step's rows (`Batch.slots`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from headrace.compute.batch import Ints
from headrace.compute.device import clear_memory, huge_memory
from headrace.core.plan import Move, Tier

ALIGNED = 64
"""Bytes to which each state is aligned."""

UNKNOWN = -1
"""The end of a state that an unfinished step has left."""

LOST = -2
"""The end of a state whose row has failed. A row in flight may continue it, but its output is ignored."""


class StateShape(NamedTuple):
    """The state of one sequence in one layer."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its bytes in a row, with what aligns the next one."""
        size = math.prod(self.shape) * self.dtype.itemsize
        return -(-size // ALIGNED) * ALIGNED


def row_bytes(shapes: Mapping[Hashable, StateShape]) -> int:
    """Bytes of the states of one sequence."""
    return sum(shape.nbytes for shape in shapes.values())


class KeptStates(Protocol):
    """The recurrent states of a model, which are allocated when the memory has been sized."""

    def allocate(self, slots: int, cells: int, device: torch.device) -> StateTensors: ...


class StateTensors:
    """The states of ``slots`` slots and ``cells`` checkpoints: ``views`` [slots + cells, ...] by keys of ``shapes``.

    ``ends`` are the positions behind which the states of each row stand. ``copy(target, source)`` copies a row.
    """

    def __init__(
        self,
        shapes: Mapping[Hashable, StateShape],
        slots: int,
        cells: int,
        device: torch.device,
        copy: Callable[[Tensor, Tensor], object] = Tensor.copy_,
    ) -> None:
        self.slots = slots
        self.layout = [[str(key), list(each.shape), str(each.dtype)] for key, each in shapes.items()]
        """What a row holds, in values that JSON has: equal rows have equal layouts."""
        count, width = slots + cells, row_bytes(shapes)
        if device.type == "cpu" and count * width:  # pages that the operating system clears on first use
            self.rows = huge_memory(count * width).view(count, width)
        else:
            self.rows = torch.zeros((count, width), dtype=torch.uint8, device=device)
        self._copy = copy
        self.ends = [UNKNOWN] * (slots + cells)
        self.views: dict[Hashable, Tensor] = {}
        at = 0
        for key, each in shapes.items():
            elements = math.prod(each.shape)
            part = self.rows[:, at : at + elements * each.dtype.itemsize].view(each.dtype)
            self.views[key] = part.view(slots + cells, *each.shape)
            at += each.nbytes

    def after(self, slots: Ints, starts: Ints, stops: Ints) -> dict[int, int]:
        """Where the state of each slot ends after rows from ``starts``, whose states stay behind ``stops``.

        Raises:
            RuntimeError: a row does not continue where its slot's state ends.
        """
        after: dict[int, int] = {}
        for slot, start, stop in zip(slots.tolist(), starts.tolist(), stops.tolist(), strict=True):
            end = self.ends[slot]
            if start and end not in (start, LOST):
                raise RuntimeError(f"slot {slot} has computed {end} tokens, a row starts at {start}")
            after[slot] = LOST if start and end == LOST else stop
        return after

    def move(self, moves: Sequence[Move]) -> None:
        """Save and restore states, in the order of ``moves``."""
        for move in moves:
            source = move.source + self._first(move.source_tier)
            target = move.target + self._first(move.target_tier)
            if target != source:
                self._copy(self.rows[target], self.rows[source])
            self.ends[target] = max(UNKNOWN, self.ends[source])  # only a slot may be lost

    def read(self, cell: int) -> bytes:
        """The bytes of a checkpoint."""
        return self.rows[self.slots + cell].cpu().numpy().tobytes()

    def write(self, cell: int, content: bytes, end: int) -> None:
        """Fill a cell with the bytes of a checkpoint that stands behind ``end`` positions."""
        row = self.slots + cell
        self.rows[row] = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self.rows.device)
        self.ends[row] = end

    def clear(self) -> None:
        """Make all states zeros again, and give their memory back to the system, on a CPU; no step may be in flight."""
        if self.rows.nbytes:
            clear_memory(self.rows)
        self.ends = [UNKNOWN] * len(self.ends)

    @property
    def row_bytes(self) -> int:
        """Bytes of the states of one sequence."""
        return self.rows.shape[1]

    def lose(self, slots: Iterable[int]) -> None:
        """The rows of these slots have failed, and the next ones may be in flight."""
        for slot in slots:
            self.ends[slot] = LOST

    def _first(self, tier: Tier) -> int:
        """The first row of a tier."""
        return 0 if tier is Tier.SLOT else self.slots
