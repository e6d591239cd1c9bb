"""The images of each slot of a runner, and the rows of them that a step computes."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from headrace.compute.batch import Batch, Features, Ints
from headrace.compute.slots import Rows
from headrace.compute.transfer import upload
from headrace.core.images import ImageSpan
from headrace.core.plan import Entry


class ImageRows(NamedTuple):
    """What a model computes with at some positions of an image: the ``features`` of its `ImageSpan`.

    ``rows`` [N, hidden] stand at the ``offsets`` int64 [N] of the span, ascending; its other positions have tokens.
    """

    rows: torch.Tensor
    offsets: Ints


class SlotImages:
    """The images of sequences by their slots."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: dict[int, tuple[ImageSpan, ...]] = {}

    def admit(self, entry: Entry) -> None:
        """A sequence takes a slot."""
        self._spans.pop(entry.slot, None)
        if entry.images:
            self._spans[entry.slot] = entry.images

    def touches(self, rows: Rows) -> bool:
        """Whether a row computes a position of an image."""
        if not self._spans:
            return False
        lines = zip(rows.slot.tolist(), rows.start.tolist(), rows.end.tolist(), strict=True)
        return any(
            span.start < end and start < span.end
            for slot, start, end in lines
            for span in self._spans.get(slot, ())
        )

    def added(self, batch: Batch, rows: Rows) -> Batch:
        """The batch of packed ``rows`` with their rows of images."""
        if not self.touches(rows):
            return batch
        places, parts = list[Ints](), list[torch.Tensor]()
        lines = zip(rows.slot.tolist(), rows.start.tolist(), rows.end.tolist(), strict=True)
        begin = 0
        for slot, start, end in lines:
            for span in self._spans.get(slot, ()):
                features: ImageRows = span.features
                cut = np.searchsorted(features.offsets, (start - span.start, end - span.start))
                some = slice(*cut.tolist())
                places.append(features.offsets[some] + (begin + span.start - start))
                parts.append(features.rows[some])
            begin += end - start
        (at,) = upload(self._device, np.concatenate(places))
        return replace(batch, features=Features(at, torch.cat(parts)), kept={})
