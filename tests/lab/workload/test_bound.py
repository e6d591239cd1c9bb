from __future__ import annotations

import random

import pytest

from headrace.lab.workload.bound import bound


def brute_refill(lengths: list[int], rows: int) -> int:
    """Steps with every free row refilled in order, one step at a time."""
    waiting, running, steps = list(lengths), [], 0
    while waiting or running:
        while waiting and len(running) < rows:
            running.append(waiting.pop(0))
        steps += 1
        running = [left - 1 for left in running if left > 1]
    return steps


def test_equal_lengths_gain_nothing() -> None:
    limits = bound([10] * 8, batch=4)
    assert (limits.static, limits.padded, limits.refilled, limits.floor) == (20, 20, 20, 20)
    assert limits.gain == limits.most == 1.0


def test_by_hand() -> None:
    # Static: max(1,9) + max(1,1). Refilled: the second row stays with 9, the first does the rest beside it.
    limits = bound([1, 9, 1, 1], batch=2)
    assert (limits.static, limits.refilled, limits.floor) == (10, 9, 9)


@pytest.mark.parametrize("rows", [1, 2, 5, 50])
def test_refilled_is_the_step_by_step_count(rows: int) -> None:
    rng = random.Random(rows)
    lengths = [rng.randint(1, 30) for _ in range(40)]
    limits = bound(lengths, batch=rows)
    assert limits.refilled == brute_refill(lengths, rows)
    assert limits.floor <= limits.refilled <= limits.static <= limits.padded


def test_a_cost_per_row_makes_empty_rows_cheap_and_padding_dear() -> None:
    limits = bound([1, 9], batch=2, step_cost=lambda rows: float(rows))
    assert (limits.static, limits.padded, limits.refilled) == (10, 18, 10)


@pytest.mark.parametrize(("lengths", "batch"), [([], 1), ([0], 1), ([1], 0)])
def test_nonsense_is_refused(lengths: list[int], batch: int) -> None:
    with pytest.raises(ValueError, match="at least"):
        bound(lengths, batch)
