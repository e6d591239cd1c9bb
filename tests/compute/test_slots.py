"""Tables of window groups in slots: a row's blocks are those that were placed last, in each group."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from headrace.compute.slots import Rows, Slots
from headrace.core.plan import Placement, Row

SLOTS, LENGTH, BLOCK, GROUPS = 3, 40, 4, 2


def made(held: bool) -> Slots:
    """Slots with the extension's arrays, or with numpy's."""
    slots = Slots(
        max_num_seqs=SLOTS,
        max_model_len=LENGTH,
        block_size=BLOCK,
        device=torch.device("cpu"),
        held=held,
        windows=GROUPS,
    )
    if not held and slots.arrays is None:
        pytest.skip("the extension is not built")
    return slots


@pytest.mark.parametrize("held", [False, True])
def test_rows_have_the_blocks_placed_last_in_each_group(held: bool) -> None:
    slots, rng = made(held), random.Random(3)
    tables = [[[0] * (LENGTH // BLOCK) for _ in range(GROUPS)] for _ in range(SLOTS)]
    blocks = [0] * SLOTS
    for _ in range(100):
        placed = []
        for slot in range(SLOTS):
            first, count = rng.randrange(LENGTH // BLOCK - 2), rng.randint(1, 3)
            parts = tuple(tuple(rng.randrange(500) for _ in range(GROUPS)) for _ in range(count))
            placed.append(Placement(slot, first, parts))
            for group in range(GROUPS):
                tables[slot][group][first : first + count] = [part[group] for part in parts]
        rows = []
        for slot in rng.sample(range(SLOTS), rng.randint(1, SLOTS)):
            start, length = rng.randrange(30), rng.choice((1, 1, 7))
            missing = max(0, -(-(start + length) // BLOCK) - blocks[slot])
            blocks[slot] += missing
            rows.append(Row(slot, start, length, tuple(rng.choices(range(99), k=missing)), True))
        slots.extend(rows)
        slots.place(placed)
        batch = slots.pack(Rows.of(rows), np.cumsum([row.length for row in rows]) - 1)
        assert len(batch.windows) == GROUPS
        for group, own in enumerate(batch.windows):
            assert batch.of(group + 1) is own
            mapping = [
                tables[row.slot][group][position // BLOCK] * BLOCK + position % BLOCK
                for row in rows
                for position in range(row.start, row.start + row.length)
            ]
            assert own.slot_mapping.tolist() == mapping
            for row, table in zip(rows, own.block_tables.tolist(), strict=True):
                used = -(-(row.start + row.length) // BLOCK)
                assert table[:used] == tables[row.slot][group][:used]
            assert (own.tokens, own.positions) == (batch.tokens, batch.positions)
            assert own.block_tables.shape == batch.block_tables.shape
        assert batch.of(0) is batch
        highest = max(max(part) for each in placed for part in each.parts)
        assert slots.reached > highest


def test_without_groups_a_batch_has_none() -> None:
    slots = Slots(max_num_seqs=1, max_model_len=LENGTH, block_size=BLOCK, device=torch.device("cpu"))
    slots.extend([Row(0, 0, 5, (7, 3), True)])
    assert slots.pack(Rows.of([Row(0, 0, 5, (), True)]), np.array([4])).windows == ()
