from __future__ import annotations

import pytest
import torch

from headrace.compute.model.kv import PagedKV
from headrace.compute.mover import move_blocks
from headrace.compute.states import ALIGNED, LOST, UNKNOWN, StateShape, StateTensors, row_bytes
from headrace.core.plan import Move, Tier

CPU = torch.device("cpu")
SHAPES = {
    "conv": StateShape((3, 5), torch.bfloat16),
    "scan": StateShape((2, 4, 4), torch.float32),
    "count": StateShape((1,), torch.int64),
}


def save(slot: int, cell: int) -> Move:
    return Move(slot, cell, Tier.SLOT, Tier.CHECKPOINT)


def restore(cell: int, slot: int) -> Move:
    return Move(cell, slot, Tier.CHECKPOINT, Tier.SLOT)


def test_the_states_of_a_sequence_are_adjacent_and_aligned() -> None:
    tensors = StateTensors(SHAPES, 2, 3, CPU)
    assert tensors.rows.shape == (5, row_bytes(SHAPES))
    assert row_bytes(SHAPES) == 64 + 128 + 64
    for key, (shape, dtype) in SHAPES.items():
        view = tensors.views[key]
        assert (view.shape, view.dtype) == ((5, *shape), dtype)
        assert (view.data_ptr() - tensors.rows.data_ptr()) % ALIGNED == 0
        view.fill_(1)
    held = sum(view.numel() * view.element_size() for view in tensors.views.values())
    assert int((tensors.rows != 0).sum()) <= held, "a view reaches beyond its part of the row"


def test_moves_copy_all_layers_and_ends_in_order() -> None:
    tensors = StateTensors(SHAPES, 2, 2, CPU)
    for key, view in tensors.views.items():
        view[0], view[1] = 10, 20
        assert key in SHAPES
    tensors.ends[:2] = 7, 8
    tensors.move([save(0, 1), restore(1, 1), save(1, 0)])
    assert tensors.ends == [7, 7, 7, 7]
    assert all((view == 10).all() for view in tensors.views.values())


def test_unwritten_states_have_no_end() -> None:
    tensors = StateTensors(SHAPES, 1, 1, CPU)
    tensors.move([restore(0, 0)])
    assert tensors.ends == [UNKNOWN, UNKNOWN]
    assert StateTensors({}, 2, 0, CPU).views == {}


def test_a_lost_state_is_continued_in_its_slot_only() -> None:
    tensors = StateTensors(SHAPES, 2, 1, CPU)
    tensors.lose([1])
    tensors.move([save(1, 0), restore(0, 0)])
    assert tensors.ends == [UNKNOWN, LOST, UNKNOWN]


def test_moves_of_states_need_states() -> None:
    with pytest.raises(ValueError, match="no recurrent states"):
        move_blocks([save(0, 0)], object.__new__(PagedKV), None)
