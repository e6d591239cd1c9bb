from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.core.plan import Move, Row, StepPlan, Tier
from headrace.lab.plan.roofline import DeviceSpec, ModelShape, Replica
from headrace.lab.simulate.runner import Roofline, StepWork, work_of

ROWS = (
    Row(0, 9, 1, (), True),  # decodes at a context of 10
    Row(1, 0, 4, (3,), False),  # 1 + 2 + 3 + 4
    Row(2, 8, 2, (), True),  # 9 + 10
    Row(3, 4, 1, (), True),  # a prompt whose last token alone is computed: 5
)


def test_the_sums_of_a_plan_by_hand():
    moves = (
        Move(1, 2),
        Move(3, 4, Tier.HOST, Tier.DEVICE),
        Move(5, 6, Tier.DEVICE, Tier.HOST),
        Move(7, 8, Tier.DISK, Tier.HOST),
        Move(1, 2, Tier.SLOT, Tier.CHECKPOINT),
        Move(2, 0, Tier.CHECKPOINT, Tier.SLOT),
    )
    assert work_of(StepPlan(0, (), moves, ROWS)) == StepWork(
        rows=4,
        tokens=8,
        contexts=10 + 10 + 19 + 5,
        read_tokens=10 + 4 + 10 + 5,
        samples=3,
        copies=1,
        transfers=2,
        states=2,
    )


def test_sums_agree_with_counting_every_position():
    rows = tuple(Row(i, 7 * i % 13, 1 + 5 * i % 4, (), i % 3 > 0) for i in range(40))
    work = work_of(StepPlan(0, (), (), rows))
    assert work.contexts == sum(p + 1 for row in rows for p in range(row.start, row.start + row.length))
    assert work.read_tokens == sum(row.start + row.length for row in rows)
    assert work.tokens == sum(row.length for row in rows)


SHAPE = ModelShape("tiny", 2, 8, 2, 1, 4, 16, 32, tied_embeddings=True)
DEVICE = DeviceSpec("d", 1e6, 2e6, 1 << 20, 1e4, 1e3, 0.5, 0.5, 0.001, 1.0)


def test_a_step_takes_as_long_as_its_arithmetic_or_its_reading():
    # Matrices of a layer: 8 x 4 x (2 x 2 heads + 2 x 1) + 3 x 8 x 16 = 576; keys and values of a position: 2 layers
    # x 2 x 1 head x 4 x 2 bytes = 32. Reached: 5e5 operations and 5e3 bytes a second.
    replica = Replica(SHAPE, DEVICE)
    device = Roofline(replica, block_size=4, row_seconds=0.0)
    decode = StepWork(rows=1, tokens=1, contexts=10, read_tokens=10, samples=1)
    read = (2 * 576 * 2 + 32 * 8 * 2 + 10 * 32) / 5e3
    assert device.seconds(decode) == pytest.approx(read + 0.001)
    prefill = StepWork(rows=1, tokens=1000, contexts=500_500, read_tokens=1000, samples=0)
    arithmetic = (2 * 1152 * 1000 + 4 * 2 * 2 * 4 * 500_500) / 5e5
    assert device.seconds(prefill) == pytest.approx(arithmetic + 0.001)


def test_moved_blocks_take_their_own_time_and_rows_the_hosts():
    device = Roofline(Replica(SHAPE, DEVICE), block_size=4, row_seconds=0.5)
    still = StepWork(rows=3, tokens=3, contexts=30, read_tokens=30, samples=3)
    block = 4 * 32
    moved = still._replace(copies=2, transfers=5)
    assert device.seconds(moved) - device.seconds(still) == pytest.approx(
        2 * 2 * block / 5e3 + 5 * block / 1e3
    )
    assert device.host_seconds(still) == 1.5
    nothing = StepWork(0, 0, 0, 0, 0, transfers=1)
    assert device.seconds(nothing) == pytest.approx(block / 1e3), "a step that only moves reads no weights"


def test_saved_states_take_the_time_of_their_bytes():
    device = Roofline(Replica(replace(SHAPE, state_bytes=100), DEVICE), block_size=4)
    still = StepWork(rows=3, tokens=3, contexts=30, read_tokens=30, samples=3)
    assert device.seconds(still._replace(states=5)) - device.seconds(still) == pytest.approx(
        5 * 2 * 100 / 5e3
    )
