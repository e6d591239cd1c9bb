"""Plans as bytes: what comes out is what went in, and the size does not depend on the context."""

from __future__ import annotations

import random

import numpy as np

from headrace.core.plan import Entry, Move, Row, StepPlan, Tier
from headrace.core.request import SamplingParams
from headrace.fleet.messages import Kind, packed, step_message, step_of, unpacked

PARAMS = SamplingParams()


def drawn(rng: random.Random) -> tuple[StepPlan, list[np.ndarray], np.ndarray]:
    """A plan of any shape; its entries as they come out, without parameters."""

    def ids(most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(1 << 20) for _ in range(rng.randrange(most)))

    entries = tuple(
        Entry(slot, "", (), 0, PARAMS, 0, frozenset(), ids(4)) for slot in range(rng.randrange(4))
    )
    tokens = [np.array(ids(50), dtype=np.int64) for _ in entries]
    moves = tuple(
        Move(rng.randrange(99), rng.randrange(99), rng.choice(list(Tier)), rng.choice(list(Tier)))
        for _ in range(rng.randrange(3))
    )
    rows = tuple(
        Row(slot, rng.randrange(999), rng.randrange(1, 9), ids(3), rng.random() < 0.5, ids(4))
        for slot in range(rng.randrange(5))
    )
    return StepPlan(0, entries, moves, rows), tokens, np.array(ids(9), dtype=np.int64)


def test_a_plan_comes_out_as_it_went_in() -> None:
    rng = random.Random(3)
    for _ in range(200):
        plan, tokens, wanted = drawn(rng)
        kind, arrays = unpacked(step_message(plan, tokens, wanted))
        step = step_of(arrays)
        assert kind is Kind.STEP
        assert step.plan == plan
        assert [each.tolist() for each in step.tokens] == [each.tolist() for each in tokens]
        assert step.wanted.tolist() == wanted.tolist()


def test_a_decode_row_takes_the_same_bytes_at_any_context() -> None:
    def size(rows: int, start: int) -> int:
        plan = StepPlan(7, (), (), tuple(Row(slot, start, 1, (), True) for slot in range(rows)))
        return len(step_message(plan, [], np.arange(rows)))

    assert size(64, 100_000) == size(64, 0)
    assert size(64, 0) - size(63, 0) == 28


def test_arrays_may_be_empty() -> None:
    kind, arrays = unpacked(packed(Kind.TOKENS, [], [1, 2]))
    assert kind is Kind.TOKENS
    assert [each.tolist() for each in arrays] == [[], [1, 2]]
