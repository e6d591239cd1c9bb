"""The lines of a step's logits: one for each sampled token, and which of these tokens count.

```
 row     known .. x | drafts r s t       a row with three drafts has four lines
 lines   after x    after r   after s   after t
 drawn   r          s         u         v         <- each as if all drafts before it were known tokens
 counts  yes        yes       yes       no        u replaces t, so tokens after t do not count
```
A sampled token counts if all drafts before it equal the tokens sampled at their positions. This is computed on the
device, so that the host does not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from headrace.compute.batch import Ints, ramps
from headrace.compute.kernels.step_arrays import StepArrays
from headrace.compute.slots import Rows
from headrace.compute.transfer import upload
from headrace.core.plan import Row

Accept = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

NO_DRAFT = -3
"""Placeholder for a missing draft, or one that cannot be correct; different from all tokens and faults."""


class Lines(NamedTuple):
    """The lines as columns, int64 [L]; the lines of a row are consecutive.

    ``rows`` are indices of the plan's rows. ``positions`` are the positions of the tokens to sample in their sequences,
    ``offsets`` the number of the row's drafts before them. ``drafts`` are the drafts at these positions, `NO_DRAFT` in
    the last line of a row. ``verifies`` says whether any row has drafts.
    """

    rows: Ints
    slots: Ints
    positions: Ints
    offsets: Ints
    drafts: Ints
    verifies: bool

    def part(self, some: slice) -> Lines:
        """Some of the lines."""
        rows, slots, positions, offsets, drafts, verifies = self
        return Lines(rows[some], slots[some], positions[some], offsets[some], drafts[some], verifies)

    def cut(self, lengths: Mapping[int, int]) -> Lines:
        """The lines with the drafts of some slots cut to the given ``lengths``."""
        if not lengths:
            return self
        most = np.array([lengths.get(slot, len(self.rows)) for slot in self.slots.tolist()], dtype=np.int64)
        return self._replace(drafts=np.where(self.offsets < most, self.drafts, NO_DRAFT))

    def before(self) -> Ints | None:
        """The drafts before each line [L, K], padded with `NO_DRAFT`; None if no line has any."""
        if not self.verifies:
            return None
        places = np.arange(self.offsets.max(initial=0))
        first = np.arange(len(self.rows)) - self.offsets
        drafts = self.drafts[np.minimum(first[:, None] + places, len(self.rows) - 1)]
        return np.where(places < self.offsets[:, None], drafts, NO_DRAFT)

    def counting(self, drawn: torch.Tensor, accept: Accept) -> torch.Tensor:
        """Which of the tokens ``drawn`` int64 [L] count, as bool [L] on their device, by `counting_of` or a kernel.

        A fault after a draft does not count: the token at its place is drawn again in another step, and fails there.
        """
        known = (self.drafts, np.arange(len(self.rows)) - self.offsets, self.offsets)
        return accept(drawn, *upload(drawn.device, *known))


class Columns(NamedTuple):
    """The rows of a plan, their lines, and the packed positions ``drawn_at`` int64 [L] to sample after."""

    rows: Rows
    lines: Lines
    drawn_at: Ints


def columns_of(plan_rows: tuple[Row, ...], vocab_size: int, arrays: StepArrays | None = None) -> Columns:
    """The columns of a plan's rows (at least one), in memory of ``arrays`` if they are given."""
    if arrays is not None:
        of_rows, of_lines, verifies = arrays.columns(plan_rows, vocab_size)
        at, slots, positions, offsets, expected, after = of_lines
        return Columns(Rows(*of_rows), Lines(at, slots, positions, offsets, expected, verifies), after)
    rows = Rows.of(plan_rows)
    sampling = np.flatnonzero(rows.samples)
    counts = 1 + rows.drafts[sampling]
    at, offsets, verifies = np.repeat(sampling, counts), ramps(counts), bool(rows.drafts.any())
    drawing, end = [row for row in plan_rows if row.samples], (NO_DRAFT,)
    expected = drafted(drawing, vocab_size, end) if verifies else np.zeros_like(at)
    after = (np.cumsum(rows.length) - 1 - rows.drafts)[at] + offsets
    return Columns(
        rows, Lines(at, rows.slot[at], rows.known[at] + offsets, offsets, expected, verifies), after
    )


def every_token(rows: Rows, drafts: Ints) -> Lines:
    """All tokens of ``rows`` as lines, also those that are not sampled from; ``drafts`` are those of all rows."""
    at, offsets = np.repeat(np.arange(rows.length.size), rows.length), ramps(rows.length)
    expected = np.full(at.size, NO_DRAFT, dtype=np.int64)
    last = rows.length[at] - 1
    expected[(offsets < last) & (offsets >= last - rows.drafts[at])] = drafts
    return Lines(at, rows.slot[at], rows.start[at] + offsets + 1, offsets, expected, True)


def counting_of(drawn: Any, drafts: Any, first: Any, offsets: Any) -> Any:
    """`Lines.counting` of tensors on any device; ``first`` is the first line of each line's row."""
    wrong = (drawn != drafts) * 1
    before = wrong.cumsum(0) - wrong
    return (before == before[first]) & ((drawn >= 0) | (offsets == 0))


def drafted(rows: Sequence[Row], vocab_size: int, end: tuple[int, ...] = ()) -> Ints:
    """The drafts of all ``rows``, each followed by ``end``; `NO_DRAFT` in place of a token that the model does not
    have.
    """
    tokens = [token for row in rows for token in (*row.drafts, *end)]
    return np.array([token if 0 <= token < vocab_size else NO_DRAFT for token in tokens], dtype=np.int64)
