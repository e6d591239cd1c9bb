"""The arrays of a step from the extension are those that numpy makes, for random plans with drafts."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from headrace.compute.sampling.choice import counting_of
from headrace.compute.slots import Slots
from headrace.compute.step_sampling import Columns, columns_of
from headrace.core.plan import Row

SLOTS, LENGTH, BLOCK, VOCAB = 8, 200, 4, 100


def slots(held: bool) -> Slots:
    made = Slots(
        max_num_seqs=SLOTS, max_model_len=LENGTH, block_size=BLOCK, device=torch.device("cpu"), held=held
    )
    if not held and made.arrays is None:
        pytest.skip("the extension is not built")
    return made


def plan_rows(rng: random.Random, blocks: list[int], drafts: bool) -> tuple[Row, ...]:
    """Rows of some slots, which have so many ``blocks``; some drafts name tokens that the model does not have."""
    rows = []
    for slot in rng.sample(range(SLOTS), rng.randint(1, SLOTS)):
        drafted = tuple(rng.choices(range(-2, VOCAB + 9), k=rng.choice((0, 1, 4)))) if drafts else ()
        start, length = rng.randint(0, 150), rng.choice((1, 1, 6)) + len(drafted)
        missing = -(-(start + length) // BLOCK) - blocks[slot]
        new = tuple(rng.choices(range(99), k=missing)) if missing > 0 else ()
        blocks[slot] += len(new)
        rows.append(Row(slot, start, length, new, bool(drafted) or rng.random() < 0.7, drafted))
    return tuple(rows)


def store_drafts(slots: Slots, columns: Columns) -> None:
    slots.append(columns.lines.slots, columns.lines.positions, torch.from_numpy(columns.lines.drafts))


def test_arrays_are_those_of_numpy() -> None:
    rng = random.Random(5)
    kept, expected, blocks = slots(False), slots(True), [0] * SLOTS
    for step in range(200):
        rows = plan_rows(rng, blocks, drafts=step % 2 == 0)
        given, wanted = columns_of(rows, VOCAB, kept.arrays), columns_of(rows, VOCAB)
        for one, other in zip((*given.rows, *given.lines), (*wanted.rows, *wanted.lines), strict=True):
            assert np.array_equal(one, other)
        for each, columns in ((kept, given), (expected, wanted)):
            each.extend(rows)
            store_drafts(each, columns)
        assert torch.equal(kept.tokens, expected.tokens)
        one, other = kept.pack(given.rows, given.drawn_at), expected.pack(wanted.rows, wanted.drawn_at)
        for name in (
            "tokens",
            "positions",
            "slot_mapping",
            "query_starts",
            "context_lens",
            "logits_indices",
        ):
            assert getattr(one, name).dtype == getattr(other, name).dtype
            assert torch.equal(getattr(one, name), getattr(other, name)), name
        assert torch.equal(one.block_tables[:, : other.block_tables.shape[1]], other.block_tables)
        assert (tuple(one.lengths), tuple(one.contexts)) == (other.lengths, other.contexts)
        assert one.decode_rows == other.decode_rows


@pytest.mark.parametrize("row", [Row(0, 0, 5, (1,), True), Row(0, LENGTH - 1, 2, tuple(range(50)), True)])
def test_rows_beyond_blocks_or_context_are_refused(row: Row) -> None:
    for held in (False, True):
        each = slots(held)
        each.extend([row])
        columns = columns_of((row,), VOCAB, each.arrays)
        with pytest.raises(ValueError, match="a row exceeds the blocks of its slot or the context"):
            each.pack(columns.rows, columns.drawn_at)


def test_the_kernel_counts_the_lines_that_torch_counts() -> None:
    from headrace.compute.kernels import KernelsUnavailable, select

    try:
        kernels = select("cpp", torch.device("cpu"))
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    rng = np.random.default_rng(3)
    for _ in range(50):
        counts = rng.integers(1, 6, 7)
        offsets = np.concatenate([np.arange(count) for count in counts])
        drafts, drawn = rng.integers(0, 2, offsets.size), rng.integers(-1, 2, offsets.size)
        given = [
            torch.from_numpy(each) for each in (drawn, drafts, np.arange(offsets.size) - offsets, offsets)
        ]
        assert torch.equal(kernels.accept(*given), counting_of(*given))
