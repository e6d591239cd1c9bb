"""Recurrent states during steps: what a step may continue, and what it leaves behind when it does not end."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.compute.batch import Batch, StepInterrupt, StepInterrupted
from headrace.compute.kernels.recurrent import RecurrentStates
from headrace.compute.states import LOST, UNKNOWN, StateShape
from tests.oracle.harness import pack

KEY = (0, 0)


def batch_of(starts: list[int], lengths: list[int], slots: list[int]) -> Batch:
    tables = [[4 * row + block for block in range(4)] for row in range(len(starts))]
    packed = pack([1] * sum(lengths), starts, lengths, tables, [0], 8, torch.device("cpu"))
    return replace(packed, slots=np.array(slots))


@pytest.fixture
def states() -> RecurrentStates:
    made = RecurrentStates({KEY: StateShape((3,), torch.float32)})
    made.allocate(3, 0, torch.device("cpu"))
    return made


def test_rows_continue_where_their_slots_end(states: RecurrentStates) -> None:
    with states.step(batch_of([0, 0], [5, 2], [2, 0])):
        rows = states.rows
        assert (rows.slots.tolist(), rows.starts.tolist(), rows.fresh.tolist()) == (
            [2, 0],
            [0, 5, 7],
            [True] * 2,
        )
    with states.step(batch_of([5], [1], [2])):
        assert states.rows.fresh.tolist() == [False]
    with pytest.raises(RuntimeError, match="slot 0 has computed 2 tokens, a row starts at 3"):
        states.step(batch_of([3], [1], [0])).__enter__()
    with states.step(batch_of([0], [1], [2])):  # another sequence begins in the slot
        pass


def test_a_row_continues_where_its_state_stayed(states: RecurrentStates) -> None:
    with states.step(replace(batch_of([0, 0], [5, 2], [2, 0]), ahead=np.array([2, 0]))):
        assert states.rows.kept.tolist() == [3, 2]
    with states.step(replace(batch_of([3], [1], [2]), ahead=np.array([1]))):
        assert states.rows.kept.tolist() == [0]
    with pytest.raises(RuntimeError, match="slot 2 has computed 3 tokens, a row starts at 5"):
        states.step(batch_of([5], [1], [2])).__enter__()


def test_a_failed_step_leaves_no_state_to_continue(states: RecurrentStates) -> None:
    with pytest.raises(torch.OutOfMemoryError), states.step(batch_of([0], [4], [1])):
        raise torch.OutOfMemoryError
    with pytest.raises(RuntimeError, match=f"slot 1 has computed {UNKNOWN} tokens"):
        states.step(batch_of([4], [1], [1])).__enter__()


def test_a_lost_state_may_be_continued_until_its_sequence_begins_again(states: RecurrentStates) -> None:
    tensors = states.allocate(3, 0, torch.device("cpu"))
    tensors.lose([1])
    with states.step(batch_of([7], [1], [1])):
        pass
    assert tensors.ends[1] == LOST
    with states.step(batch_of([0], [2], [1])):
        pass
    assert tensors.ends[1] == 2


def test_an_interrupted_step_leaves_states_as_they_were(states: RecurrentStates) -> None:
    with states.step(batch_of([0], [4], [1])):
        states.of([KEY])[0][1] = 7.0
    step = replace(batch_of([4], [1], [1]), interrupt=StepInterrupt())

    def interrupted() -> None:
        with states.step(step):
            states.of([KEY])[0][1] = 9.0
            raise StepInterrupted

    with pytest.raises(StepInterrupted):
        interrupted()
    assert states.of([KEY])[0][1].tolist() == [7.0] * 3
    with states.step(step):
        states.of([KEY])[0][1] = 9.0
    assert states.of([KEY])[0][1].tolist() == [9.0] * 3


def test_a_step_needs_the_slots_of_its_rows(states: RecurrentStates) -> None:
    with pytest.raises(RuntimeError, match="needs the slots of its rows"):
        states.step(replace(batch_of([0], [1], [0]), slots=None)).__enter__()
