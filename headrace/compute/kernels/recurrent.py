"""The recurrent states of a native model during its steps: which rows continue which slot, and what a step may leave.

A mixer reads and writes the states of its layer in place, at the slots of the step's rows. A state belongs to the end
of what its sequence has computed. So a row must begin where its slot's last row ended, or at position 0, or where a
checkpoint that was moved to its slot ends. A step that is interrupted leaves the states as they were before it.

The last positions of a row may be ahead of its state (`Batch.ahead`). They are computed with it, and leave the state
before them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from headrace.compute.batch import Batch
from headrace.compute.kernels.mixers import LineRows, StepRows
from headrace.compute.states import UNKNOWN, StateShape, StateTensors


class RecurrentStates:
    """The states of the layers of one model, by the keys ``(layer, number)``: see `states.KeptStates`.

    ``copy`` is that of the kernels.
    """

    def __init__(
        self, shapes: Mapping[Hashable, StateShape], copy: Callable[[Tensor, Tensor], object] = Tensor.copy_
    ) -> None:
        self._shapes = shapes
        self._copy = copy
        self._tensors: StateTensors | None = None
        self._rows: StepRows | LineRows | None = None

    def allocate(self, slots: int, cells: int, device: torch.device) -> StateTensors:
        """Allocate the states of slots and checkpoints."""
        self._tensors = StateTensors(self._shapes, slots, cells, device, self._copy)
        return self._tensors

    def of(self, keys: Sequence[Hashable]) -> list[Tensor]:
        """The states [slots + cells, ...] by their keys."""
        assert self._tensors is not None, "states are allocated when the memory has been sized"
        return [self._tensors.views[key] for key in keys]

    @property
    def rows(self) -> StepRows | LineRows:
        """The rows of the step that is being computed."""
        assert self._rows is not None, "outside of a step"
        return self._rows

    @contextmanager
    def step(self, batch: Batch) -> Iterator[None]:
        """Compute a step. In that of a graph, only the device knows the rows; `StateTensors.after` checks its replays.

        Raises:
            RuntimeError: a row does not continue where its slot's state ends.
        """
        if batch.line_slots is not None:
            self._rows = LineRows(batch.line_slots, batch.context_lens)
            try:
                yield
            finally:
                self._rows = None
            return
        if batch.slots is None or self._tensors is None:
            raise RuntimeError("a model with recurrent states needs the slots of its rows, and their memory")
        tensors, slots = self._tensors, np.ascontiguousarray(batch.slots, dtype=np.int64)
        lengths, contexts = (np.asarray(each, dtype=np.int64) for each in (batch.lengths, batch.contexts))
        stops = contexts if batch.ahead is None else contexts - batch.ahead
        after = tensors.after(slots, contexts - lengths, stops)
        saved: Tensor | None = None
        if batch.interrupt is not None:
            saved = tensors.rows[torch.as_tensor(slots, device=tensors.rows.device)]
        else:
            for slot in after:
                tensors.ends[slot] = UNKNOWN
        starts = np.concatenate((np.zeros(1, dtype=np.int64), lengths.cumsum()))
        kept = lengths if batch.ahead is None else lengths - batch.ahead
        self._rows = StepRows(slots, starts, contexts == lengths, kept, {})
        try:
            yield
        except BaseException:
            if saved is not None:
                tensors.rows[torch.as_tensor(slots, device=saved.device)] = saved
            raise
        finally:
            self._rows = None
        for slot, end in after.items():
            tensors.ends[slot] = end
