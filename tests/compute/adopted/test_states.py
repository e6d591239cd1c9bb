"""Recurrent states by slot: rows of any sequences in any steps continue where theirs ended."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from headrace.compute.adopted.attention import heard_by
from headrace.compute.adopted.states import CHECK_SLOTS, SequenceStates, mixers_of, redirect
from headrace.compute.batch import Batch, StepInterrupt
from headrace.compute.states import LOST

HIDDEN = 4
CONFIG = AutoConfig.for_model("lfm2", num_hidden_layers=1, layer_types=["conv"])


class Summing(nn.Module):
    """A mixer whose output is the sum of all tokens so far; ``alone``: it reads its state for a single token only."""

    def __init__(self, *, alone: bool = False) -> None:
        super().__init__()
        self.layer_idx = 0
        self.conv = nn.Conv1d(1, 1, 1)
        self.alone = alone
        self.calls: list[tuple[int, ...]] = []

    def forward(self, hidden_states: Tensor, cache: Any = None, attention_mask: Any = None) -> Tensor:
        self.calls.append(tuple(hidden_states.shape[:2]))
        sums = hidden_states.cumsum(1)
        layer = None if cache is None else cache.layers[self.layer_idx]
        before = None if layer is None else layer.recurrent_states[0]
        if before is not None and (hidden_states.shape[1] == 1 or not self.alone):
            sums = sums + before[:, None]
        if layer is not None:
            layer.update_recurrent_state(sums[:, -1])
        return sums


class Row(NamedTuple):
    """Tokens ``start`` to ``end`` of the sequence in a slot."""

    slot: int
    start: int
    end: int


class Steps:
    """Sequences of random tokens, and steps of a mixer over rows of them."""

    def __init__(self, *, alone: bool = False) -> None:
        self.mixer = Summing(alone=alone)
        redirect([self.mixer])
        self.states = SequenceStates(CONFIG)
        self.tokens = torch.randint(
            -4, 5, (CHECK_SLOTS, 40, HIDDEN), generator=torch.Generator().manual_seed(0)
        ).float()

    def run(
        self, rows: Sequence[Row], interrupt: StepInterrupt | None = None, *, ends: bool = True
    ) -> list[Tensor]:
        """The outputs of each row; without ``ends`` the step is interrupted behind the mixer."""
        self.states.begin(replace(batch(rows), interrupt=interrupt))
        given = torch.cat([self.tokens[row.slot, row.start : row.end] for row in rows])
        with heard_by(self.states):  # type: ignore[arg-type] # nothing attends here
            found = self.mixer(hidden_states=given[None])[0]
        if ends:
            self.states.end()
        return list(torch.split(found, [row.end - row.start for row in rows]))

    def expected(self, row: Row) -> Tensor:
        return self.tokens[row.slot, : row.end].cumsum(0)[row.start :]


def batch(rows: Sequence[Row]) -> Batch:
    lengths, none = [row.end - row.start for row in rows], torch.zeros(1)
    return Batch(
        tokens=torch.zeros(sum(lengths), dtype=torch.int32),
        positions=none,
        slot_mapping=none,
        query_starts=none,
        context_lens=none,
        block_tables=none,
        logits_indices=none,
        lengths=lengths,
        contexts=[row.end for row in rows],
        decode_rows=0,
        block_size=8,
        slots=np.array([row.slot for row in rows]),
    )


def test_rows_in_any_order_and_size_continue_where_their_slot_ended() -> None:
    draw, steps, done = random.Random(1), Steps(), [0] * CHECK_SLOTS
    for _ in range(60):
        rows = []
        for slot in draw.sample(range(CHECK_SLOTS), draw.randint(1, CHECK_SLOTS)):
            if done[slot] > 30 or draw.random() < 0.1:
                done[slot] = 0  # another sequence, or the same again
            length = draw.choice((1, 1, 2, 3, 7))
            rows.append(Row(slot, done[slot], done[slot] + length))
            done[slot] += length
        for row, found in zip(rows, steps.run(rows), strict=True):
            assert torch.equal(found, steps.expected(row)), row


def test_rows_of_one_length_are_one_call() -> None:
    steps = Steps()
    steps.run([Row(0, 0, 3), Row(1, 0, 3), Row(2, 0, 5)])
    steps.mixer.calls.clear()
    steps.run([Row(2, 5, 6), Row(0, 3, 4), Row(3, 0, 1), Row(1, 3, 4)])
    assert sorted(steps.mixer.calls) == [(1, 1), (3, 1)]  # a row that begins has no state to read


def test_a_mixer_that_reads_its_state_for_one_token_only() -> None:
    """Mamba-1: whole rows that continue are wrong, and right token by token."""
    first, second = Row(0, 0, 4), Row(0, 4, 9)
    for by_token in (False, True):
        steps = Steps(alone=True)
        steps.states.token_by_token = by_token
        steps.run([first])
        assert steps.mixer.calls == [(1, 4)]  # a row that begins is one call in both cases
        (found,) = steps.run([second])
        assert torch.equal(found, steps.expected(second)) is by_token
        assert steps.mixer.calls[1:] == ([(1, 1)] * 5 if by_token else [(1, 5)])


def test_a_row_elsewhere_than_the_end_of_its_state_is_an_error() -> None:
    steps = Steps()
    steps.run([Row(1, 0, 3)])
    with pytest.raises(RuntimeError, match="slot 1 has computed 3 tokens, a row starts at 2"):
        steps.run([Row(1, 2, 5)])


def test_an_interrupted_step_leaves_states_as_they_were() -> None:
    steps, row = Steps(), Row(0, 3, 8)
    steps.run([Row(0, 0, 3)])
    steps.run([row], StepInterrupt(), ends=False)
    (found,) = steps.run([row])
    assert torch.equal(found, steps.expected(row))


def test_an_unfinished_step_that_writes_at_once_may_not_be_continued() -> None:
    steps = Steps()
    steps.run([Row(0, 0, 3)], ends=False)
    with pytest.raises(RuntimeError, match="a row starts at 3"):
        steps.run([Row(0, 3, 4)])


def test_a_row_in_flight_may_continue_a_lost_state_and_its_end_stays_lost() -> None:
    steps = Steps()
    steps.run([Row(0, 0, 3)])
    steps.states.tensors.lose([0])
    steps.run([Row(0, 3, 4)])
    assert steps.states.tensors.ends[0] == LOST
    steps.run([Row(0, 0, 2)])
    assert steps.states.tensors.ends[0] == 2


def test_mixers_take_a_cache_and_have_a_convolution() -> None:
    layer = nn.ModuleDict({"mixer": Summing(), "other": nn.Linear(2, 2)})
    assert mixers_of(layer) == [layer["mixer"]]


def test_a_mixer_outside_of_a_step_computes_as_it_is() -> None:
    steps = Steps()
    assert torch.equal(steps.mixer(hidden_states=steps.tokens[:1]), steps.tokens[:1].cumsum(1))
