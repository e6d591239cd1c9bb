"""Which rows of images a step computes, against counting position by position."""

from __future__ import annotations

import random

import numpy as np
import torch

from headrace.compute.images.slots import ImageRows, SlotImages
from headrace.compute.slots import Rows
from headrace.core.images import ImageSpan
from headrace.core.plan import Entry, Row
from headrace.core.request import SamplingParams
from tests.oracle.harness import pack

CPU = torch.device("cpu")


def span(start: int, length: int, offsets: list[int], number: int) -> ImageSpan:
    rows = torch.tensor([100.0 * number + offset for offset in offsets])[:, None]
    return ImageSpan(start, length, bytes([number]) * 32, ImageRows(rows, np.array(offsets, dtype=np.int64)))


def entry(slot: int, *images: ImageSpan) -> Entry:
    return Entry(slot, f"r{slot}", (7,) * 60, 60, SamplingParams(), 0, frozenset(), (), images=images)


def test_rows_of_images_stand_where_their_positions_are_computed() -> None:
    rng = random.Random(3)
    for _ in range(200):
        held, images = SlotImages(CPU), dict[int, list[ImageSpan]]()
        for slot in range(3):
            images[slot] = []
            for number, start in enumerate((0, 20, 40)):
                length = rng.randint(1, 20)
                offsets = sorted(rng.sample(range(length), rng.randint(0, length)))
                if rng.random() < 0.6:
                    images[slot].append(span(start, length, offsets, 1 + 3 * slot + number))
            held.admit(entry(slot, *images[slot]))
        starts = [rng.randint(0, 50) for _ in range(3)]
        lengths = [1, rng.randint(2, 10), rng.randint(2, 10)]
        rows = [Row(slot, starts[slot], lengths[slot], (), False) for slot in range(3)]
        batch = pack([7] * sum(lengths), starts, lengths, [list(range(64))] * 3, [0], 4, CPU)
        expected = {}
        at = 0
        for slot in range(3):
            for position in range(starts[slot], starts[slot] + lengths[slot]):
                for each in images[slot]:
                    known = dict(zip(each.features.offsets.tolist(), each.features.rows[:, 0], strict=True))
                    if position - each.start in known and position < each.end:
                        expected[at] = float(known[position - each.start])
                at += 1
        found = held.added(batch, Rows.of(rows)).features
        if found is None:
            assert not expected
        else:
            assert dict(zip(found.places.tolist(), found.rows[:, 0].tolist(), strict=True)) == expected


def test_a_slot_forgets_the_images_of_the_sequence_before() -> None:
    held = SlotImages(CPU)
    held.admit(entry(1, span(0, 4, [0, 1], 1)))
    rows = Rows.of([Row(1, 0, 4, (), False)])
    assert held.touches(rows)
    held.admit(entry(1))
    assert not held.touches(rows)
    batch = pack([7] * 4, [0], [4], [[0]], [0], 4, CPU)
    assert held.added(batch, rows) is batch
