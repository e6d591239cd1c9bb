"""Which rows and positions of images a step computes, against counting position by position."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from headrace.compute.images.slots import ImageRows, SlotImages, axes_of
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
        held, images = SlotImages(CPU, 3), dict[int, list[ImageSpan]]()
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
    held = SlotImages(CPU, 2)
    held.admit(entry(1, span(0, 4, [0, 1], 1)))
    rows = Rows.of([Row(1, 0, 4, (), False)])
    assert held.touches(rows)
    held.admit(entry(1))
    assert not held.touches(rows)
    batch = pack([7] * 4, [0], [4], [[0]], [0], 4, CPU)
    assert held.added(batch, rows) is batch


def in_grid(start: int, rows: int, columns: int) -> ImageSpan:
    count = rows * columns
    features = ImageRows(
        torch.zeros(count, 1), np.arange(count), torch.full((2, count, 1), float(start)), (rows, columns)
    )
    return ImageSpan(start, count, bytes([1 + start]) * 32, features)


def counted(images: list[ImageSpan], length: int) -> list[tuple[int, int, int]]:
    """The positions in time, rows and columns, one by one."""
    found: list[tuple[int, int, int]] = []
    free = 0
    while len(found) < length:
        image = next((each for each in images if each.start == len(found)), None)
        if image is None:
            found.append((free,) * 3)
            free += 1
        else:
            rows, columns = image.features.grid
            found += [(free, free + row, free + column) for row in range(rows) for column in range(columns)]
            free += max(rows, columns)
    return found


def random_images(rng: random.Random) -> list[ImageSpan]:
    sizes = [(rng.randint(1, 4), rng.randint(1, 5)) for _ in range(3)]
    return [in_grid(20 * number, *size) for number, size in enumerate(sizes) if rng.random() < 0.6]


def test_positions_of_images_are_counted_by_rows_and_columns() -> None:
    rng = random.Random(4)
    for _ in range(200):
        images = random_images(rng)
        end = images[-1].end if images else 0
        assert axes_of(images).T.tolist() == [list(each) for each in counted(images, end)]


def test_steps_compute_the_positions_of_their_tokens() -> None:
    """In chunks that begin and end anywhere; where all are behind the images, the batch's own are changed in place."""
    rng = random.Random(5)
    kinds = set()
    for _ in range(300):
        held, images = SlotImages(CPU, 3), [random_images(rng) for _ in range(3)]
        for slot in range(3):
            held.admit(entry(slot, *images[slot]))
        starts = [rng.randint(0, 70) for _ in range(3)]
        lengths = [1, rng.randint(2, 10), rng.randint(2, 10)]
        rows = Rows.of([Row(slot, starts[slot], lengths[slot], (), False) for slot in range(3)])
        batch = pack([7] * sum(lengths), starts, lengths, [list(range(64))] * 3, [0], 4, CPU)
        tables, positions = batch.block_tables, batch.positions
        expected = [
            counted(images[slot], 80)[at]
            for slot in range(3)
            for at in range(starts[slot], starts[slot] + lengths[slot])
        ]
        found = held.added(batch, rows)
        if found.axes is None:
            assert found.positions is positions
            assert [(each,) * 3 for each in positions.tolist()] == expected
        else:
            assert [tuple(each) for each in found.axes.t().tolist()] == expected
        assert held.touches(rows) == (found is not batch or any(held._shifts[rows.slot]))
        assert found.block_tables is tables
        kinds.add((found is batch, found.axes is None))
        if found.features is not None:
            deep = found.features.deep
            assert deep is not None
            assert deep.shape == (2, len(found.features.places), 1)
    assert len(kinds) >= 2


def test_a_slot_forgets_the_positions_of_the_sequence_before() -> None:
    held = SlotImages(CPU, 2)
    for slot in (0, 1):
        held.admit(entry(slot, in_grid(0, 2, 3)))
    rows = Rows.of([Row(1, 30, 1, (), False)])
    assert held.touches(rows)
    batch = pack([7], [30], [1], [list(range(16))], [0], 4, CPU)
    assert held.added(batch, rows).positions.tolist() == [27]
    held.admit(entry(1))
    assert not held.touches(rows)


def joint(start: int, length: int, together: tuple[int, int]) -> ImageSpan:
    return span(start, length, list(range(*together)), 1)._replace(joint=together)


def test_rows_are_cut_where_joint_positions_begin_and_end() -> None:
    held = SlotImages(CPU, 3)
    held.admit(entry(0, joint(4, 6, (1, 5)), joint(12, 5, (0, 5))))
    rows = Rows.of([Row(1, 9, 1, (), True), Row(0, 2, 16, (), False), Row(2, 0, 3, (), False)])
    batch = pack(
        [7] * 20, [9, 2, 0], [1, 16, 3], [list(range(each, each + 5)) for each in (0, 10, 20)], [0], 4, CPU
    )
    cut = held.added(batch, rows)
    assert cut.joint is not None
    assert list(zip(cut.lengths, cut.contexts, cut.joint.tolist(), strict=True)) == [
        (1, 10, 0), (3, 5, 0), (4, 9, 1), (3, 12, 0), (5, 17, 1), (1, 18, 0), (3, 3, 0)
    ]  # fmt: skip
    assert cut.query_starts.tolist() == [0, 1, 4, 8, 11, 16, 17, 20]
    assert cut.context_lens.tolist() == list(cut.contexts)
    assert cut.block_tables[:, 0].tolist() == [0, 10, 10, 10, 10, 10, 20]
    assert cut.decode_rows == batch.decode_rows == 1
    # What has been computed is not computed again, and behind images nothing is cut.
    rest = pack([7] * 3, [7], [3], [list(range(5))], [0], 4, CPU)
    again = held.added(rest, Rows.of([Row(0, 7, 3, (), False)]))
    assert again.joint is not None
    assert list(zip(again.lengths, again.contexts, again.joint.tolist(), strict=True)) == [
        (2, 9, 1),
        (1, 10, 0),
    ]
    last = pack([7], [18], [1], [list(range(5))], [0], 4, CPU)
    assert held.added(last, Rows.of([Row(0, 18, 1, (), True)])) is last


def test_a_row_that_ends_within_joint_positions_is_an_error() -> None:
    held = SlotImages(CPU, 1)
    held.admit(entry(0, joint(4, 6, (1, 5))))
    batch = pack([7] * 4, [3], [4], [list(range(5))], [0], 4, CPU)
    with pytest.raises(ValueError, match="a row ends at 7, within an image up to 9"):
        held.added(batch, Rows.of([Row(0, 3, 4, (), False)]))
