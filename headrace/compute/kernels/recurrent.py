"""The recurrent states of a native model during its steps: which rows continue which slot, and what a step may leave.

A mixer reads and writes the states of its layer in place, at the slots of the step's rows. A state belongs to the end
of what its sequence has computed. So a row must begin where its slot's last row ended, or at position 0, or where a
checkpoint that was moved to its slot ends. A step that is interrupted leaves the states as they were before it.

The last positions of a row may be ahead of its state (`Batch.ahead`). They are a second pass, whose states are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from headrace.compute.batch import Batch, Ints
from headrace.compute.kernels.mixers import StepRows
from headrace.compute.states import LOST, UNKNOWN, StateShape, StateTensors


class RecurrentStates:
    """The states of the layers of one model, by the keys ``(layer, number)``: see `states.KeptStates`."""

    def __init__(self, shapes: Mapping[Hashable, StateShape]) -> None:
        self._shapes = shapes
        self._tensors: StateTensors | None = None
        self._rows: StepRows | None = None

    def allocate(self, slots: int, cells: int, device: torch.device) -> StateTensors:
        """Allocate the states of slots and checkpoints."""
        self._tensors = StateTensors(self._shapes, slots, cells, device)
        return self._tensors

    def of(self, keys: Sequence[Hashable]) -> list[Tensor]:
        """The states [slots + cells, ...] by their keys."""
        assert self._tensors is not None, "states are allocated when the memory has been sized"
        return [self._tensors.views[key] for key in keys]

    @property
    def rows(self) -> StepRows:
        """The rows of the step that is being computed."""
        assert self._rows is not None, "outside of a step"
        return self._rows

    def compute(self, batch: Batch, run: Callable[[Batch], Tensor]) -> Tensor:
        """The last hidden states [S, hidden] of a step; ``run`` computes those of one pass."""
        if batch.ahead is None or not batch.ahead.any():
            with self.step(batch):
                return run(batch)
        # Neither pass is interrupted: the states stand behind the first one then, and not where they began.
        kept = np.asarray(batch.lengths, dtype=np.int64) - batch.ahead
        first, wanted = _part(batch, np.zeros_like(kept), kept)
        with self.step(first):
            parts = [run(first)]
        second, later = _part(batch, kept, batch.ahead)
        assert second.slots is not None
        assert self._tensors is not None
        slots = torch.as_tensor(second.slots, device=self._tensors.rows.device)
        states, ends = self._tensors.rows[slots], [self._tensors.ends[slot] for slot in second.slots]
        with self.step(second):
            parts.append(run(second))
        self._tensors.rows[slots] = states
        for slot, end in zip(second.slots, ends, strict=True):
            self._tensors.ends[slot] = end
        order = torch.from_numpy(np.argsort(np.concatenate((wanted, later)))).to(parts[0].device)
        return torch.cat(parts).index_select(0, order)

    @contextmanager
    def step(self, batch: Batch) -> Iterator[None]:
        """Compute a step.

        Raises:
            RuntimeError: a row does not continue where its slot's state ends.
        """
        if batch.slots is None or self._tensors is None:
            raise RuntimeError("a model with recurrent states needs the slots of its rows, and their memory")
        tensors, slots = self._tensors, np.ascontiguousarray(batch.slots, dtype=np.int64)
        after = self._ends(slots, batch, tensors.ends)
        saved: Tensor | None = None
        if batch.interrupt is not None:
            saved = tensors.rows[torch.as_tensor(slots, device=tensors.rows.device)]
        else:
            for slot in after:
                tensors.ends[slot] = UNKNOWN
        lengths = np.asarray(batch.lengths, dtype=np.int64)
        starts = np.concatenate((np.zeros(1, dtype=np.int64), lengths.cumsum()))
        self._rows = StepRows(slots, starts, np.asarray(batch.contexts, dtype=np.int64) == lengths)
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

    @staticmethod
    def _ends(slots: Ints, batch: Batch, ends: Sequence[int]) -> dict[int, int]:
        """Where the state of each slot ends after the step."""
        after: dict[int, int] = {}
        for slot, length, end in zip(slots.tolist(), batch.lengths, batch.contexts, strict=True):
            start = end - length
            if start and ends[slot] not in (start, LOST):
                raise RuntimeError(f"slot {slot} has computed {ends[slot]} tokens, a row starts at {start}")
            after[slot] = LOST if start and ends[slot] == LOST else end
        return after


def _part(batch: Batch, skipped: Ints, lengths: Ints) -> tuple[Batch, Ints]:
    """``lengths`` tokens of each row behind its first ``skipped`` ones, of rows that have any; and which of the wanted
    logits they are.
    """
    rows = np.flatnonzero(lengths)
    whole = np.asarray(batch.lengths, dtype=np.int64)
    begins = (np.cumsum(whole) - whole + skipped)[rows]
    lengths, before = lengths[rows], (np.asarray(batch.contexts, dtype=np.int64) - whole + skipped)[rows]
    starts = np.concatenate((np.zeros(1, dtype=np.int64), lengths.cumsum()))
    places = np.repeat(begins - starts[:-1], lengths) + np.arange(starts[-1])
    asked = batch.logits_indices.cpu().numpy()
    wanted = np.flatnonzero(np.isin(asked, places))
    device = batch.tokens.device
    at, which = torch.from_numpy(places).to(device), torch.from_numpy(rows).to(device)
    longer = np.flatnonzero(lengths != 1)
    part = replace(
        batch,
        tokens=batch.tokens[at],
        positions=batch.positions[at],
        slot_mapping=batch.slot_mapping[at],
        query_starts=torch.from_numpy(starts.astype(np.int32)).to(device),
        context_lens=torch.from_numpy((before + lengths).astype(np.int32)).to(device),
        block_tables=batch.block_tables[which].contiguous(),
        logits_indices=torch.from_numpy(np.searchsorted(places, asked[wanted])).to(device),
        lengths=tuple(lengths.tolist()),
        contexts=tuple((before + lengths).tolist()),
        decode_rows=int(longer[0]) if longer.size else len(rows),
        interrupt=None,
        shared=None,
        slots=None if batch.slots is None else batch.slots[rows],
        ahead=None,
        kept={},
    )
    return part, wanted
