"""The images of each slot of a runner: the rows of them that a step computes, and the positions that they change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from headrace.compute.batch import Batch, Features, Ints
from headrace.compute.slots import Rows
from headrace.compute.transfer import upload
from headrace.core.images import ImageSpan
from headrace.core.plan import Entry


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class ImageRows:
    """What a model computes with at some positions of an image: the ``features`` of its `ImageSpan`.

    ``rows`` [N, hidden] stand at the ``offsets`` int64 [N] of the span, ascending; its other positions have tokens.
    ``deep`` [L, N, hidden] are those of `batch.Features`. With ``grid`` the image has that many rows and columns of
    positions, which are all of its span.
    """

    rows: torch.Tensor
    offsets: Ints
    deep: torch.Tensor | None = None
    grid: tuple[int, int] | None = None

    @property
    def nbytes(self) -> int:
        """The memory that they take."""
        return self.rows.nbytes + (0 if self.deep is None else self.deep.nbytes) + self.offsets.nbytes


def axes_of(images: Sequence[ImageSpan]) -> Ints:
    """The positions int64 [3, N] in time, rows and columns of a prompt's tokens up to the end of its last image.

    An image with a grid has one position in time. What is behind begins where the longer side of the grid ends
    (arXiv:2409.12191), and ``N`` is then more than the next position.
    """
    ends = [0, *(span.end for span in images)]
    found = np.empty((3, ends[-1]), dtype=np.int64)
    free = 0
    for before, span in zip(ends, images, strict=False):
        text = span.start - before
        found[:, before : span.start] = free + np.arange(text)
        free += text
        features: ImageRows = span.features
        if features.grid is None:
            found[:, span.start : span.end] = free + np.arange(span.length)
            free += span.length
        else:
            rows, columns = features.grid
            found[:, span.start : span.end] = free
            found[1, span.start : span.end] += np.repeat(np.arange(rows), columns)
            found[2, span.start : span.end] += np.tile(np.arange(columns), rows)
            free += max(rows, columns)
    return found


class SlotImages:
    """The images of sequences by their slots."""

    def __init__(self, device: torch.device, slots: int) -> None:
        self._device = device
        self._spans: dict[int, tuple[ImageSpan, ...]] = {}
        self._axes: dict[int, Ints] = {}
        self._shifts = np.zeros(slots, dtype=np.int64)  # of positions behind the last image

    def admit(self, entry: Entry) -> None:
        """A sequence takes a slot."""
        self._spans.pop(entry.slot, None)
        if self._axes.pop(entry.slot, None) is not None:
            self._shifts[entry.slot] = 0
        if entry.images:
            self._spans[entry.slot] = entry.images
        if any(span.features.grid is not None for span in entry.images):
            axes = self._axes[entry.slot] = axes_of(entry.images)
            self._shifts[entry.slot] = axes.max() + 1 - axes.shape[1]

    def touches(self, rows: Rows) -> bool:
        """Whether a row computes a position of an image, or one whose rotation images have changed."""
        return self._shown(rows) or self._shifted(rows)

    def _shown(self, rows: Rows) -> bool:
        """Whether a row computes a position of an image."""
        if not self._spans:
            return False
        lines = zip(rows.slot.tolist(), rows.start.tolist(), rows.end.tolist(), strict=True)
        return any(
            span.start < end and start < span.end
            for slot, start, end in lines
            for span in self._spans.get(slot, ())
        )

    def _shifted(self, rows: Rows) -> bool:
        return bool(self._axes) and bool(self._shifts[rows.slot].any())

    def added(self, batch: Batch, rows: Rows) -> Batch:
        """The batch of packed ``rows`` with their rows of images, and with the positions of their rotations.

        Positions that are equal in time, rows and columns are written to the batch's own.
        """
        if self._shifted(rows):
            batch = self._turned(batch, rows)
        if not self._shown(rows):
            return batch
        return self._with_features(self._cut(batch, rows), rows)

    def _cut(self, batch: Batch, rows: Rows) -> Batch:
        """The batch with its rows cut where joint positions begin and end; no row may end within some."""
        owners, lengths, ends, joint = list[int](), list[int](), list[int](), list[bool]()

        def piece(row: int, begin: int, end: int, together: bool = False) -> None:
            if begin < end:
                owners.append(row)
                lengths.append(end - begin)
                ends.append(end)
                joint.append(together)

        lines = zip(rows.slot.tolist(), rows.start.tolist(), rows.end.tolist(), strict=True)
        for row, (slot, start, end) in enumerate(lines):
            at = start
            for span in self._spans.get(slot, ()):
                begin, stop = max(at, span.start + span.joint[0]), span.start + span.joint[1]
                if begin < end and begin < stop:
                    if stop > end:
                        raise ValueError(f"a row ends at {end}, within an image up to {stop}")
                    piece(row, at, begin)
                    piece(row, begin, stop, together=True)
                    at = stop
            piece(row, at, end)
        if not any(joint):
            return batch
        starts = np.concatenate([[0], np.cumsum(lengths)])
        arrays = (
            np.array(owners),
            starts.astype(np.int32),
            np.array(ends, np.int32),
            np.array(joint, np.uint8),
        )
        places, query_starts, contexts, flags = upload(self._device, *arrays)

        def cut(each: Batch) -> Batch:
            return replace(
                each,
                query_starts=query_starts,
                context_lens=contexts,
                block_tables=each.block_tables.index_select(0, places),
                lengths=tuple(lengths),
                contexts=tuple(ends),
                joint=flags,
                shared=None,
                windows=tuple(cut(window) for window in each.windows),
                kept={},
            )

        return cut(batch)

    def _turned(self, batch: Batch, rows: Rows) -> Batch:
        starts = np.cumsum(rows.length) - rows.length
        moved = np.repeat(self._shifts[rows.slot], rows.length)
        axes = None
        for begin, slot, start, end in zip(
            starts.tolist(), rows.slot.tolist(), rows.start.tolist(), rows.end.tolist(), strict=True
        ):
            own = self._axes.get(slot)
            if own is None or start >= own.shape[1]:
                continue
            if axes is None:
                positions = np.repeat(rows.start - starts, rows.length) + np.arange(len(moved))
                axes = np.tile(positions + moved, (3, 1))
            some = own[:, start:end]
            axes[:, begin : begin + some.shape[1]] = some
        if axes is not None:
            (turned,) = upload(self._device, axes.reshape(-1))
            return replace(batch, axes=turned.view(3, -1), kept={})
        (shifts,) = upload(self._device, moved)
        batch.positions.add_(shifts)
        return batch

    def _with_features(self, batch: Batch, rows: Rows) -> Batch:
        places, parts, deep = list[Ints](), list[torch.Tensor](), list[torch.Tensor]()
        lines = zip(rows.slot.tolist(), rows.start.tolist(), rows.end.tolist(), strict=True)
        begin = 0
        for slot, start, end in lines:
            for span in self._spans.get(slot, ()):
                features: ImageRows = span.features
                cut = np.searchsorted(features.offsets, (start - span.start, end - span.start))
                some = slice(*cut.tolist())
                places.append(features.offsets[some] + (begin + span.start - start))
                parts.append(features.rows[some])
                if features.deep is not None:
                    deep.append(features.deep[:, some])
            begin += end - start
        (at,) = upload(self._device, np.concatenate(places))
        features_ = Features(at, torch.cat(parts), torch.cat(deep, 1) if deep else None)
        return replace(batch, features=features_, kept={})
