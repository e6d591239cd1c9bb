import random

import pytest

from headrace.core.prediction.step_cost import StepCost
from headrace.core.prediction.step_times import StepTimes


def staircase(tokens: int) -> float:
    return 0.010 + 0.004 * (tokens // 9) + (0.003 if tokens > 1 else 0.0)


def observed(steps: int) -> StepTimes:
    """Times of an engine whose steps take what `staircase` says."""
    rng, times = random.Random(3), StepTimes()
    for _ in range(steps):
        tokens = rng.choice((1, 1, 1, 2, 4, 6, 12, 30, 60))
        times.observe(1, tokens, tokens * 100, staircase(tokens))
    return times


def test_the_table_says_what_the_step_times_say_and_never_falls() -> None:
    times = observed(2000)
    stairs = times.verify_times(1, 100, 90)
    assert stairs[0] == times.decode_seconds(1, 100)
    assert list(stairs) == sorted(stairs)
    highest = stairs[0]
    for drafted in range(1, 91):
        highest = max(highest, times.verify_seconds(1, 1 + drafted, 100 * (1 + drafted)))
        assert stairs[drafted] == pytest.approx(highest, rel=0.02)


def test_a_table_is_kept_while_little_changes() -> None:
    times = StepTimes(StepCost(fixed_tokens=10.0, context_tokens=1000.0))
    kept = times.verify_times(1, 1000, 8)
    assert times.verify_times(1, 1010, 4) is kept
    assert times.verify_times(1, 2000, 4) is not kept
    assert times.verify_times(2, 1000, 4) is not kept
    kept = times.verify_times(1, 1000, 8)
    for _ in range(20):
        times.observe(1, 1, 100, 0.02)
    assert times.verify_times(1, 1000, 8) is not kept


def test_what_is_new_is_in_the_next_table() -> None:
    times = observed(0)
    for _ in range(40):
        times.observe(1, 1, 100, 0.01)
    before = times.verify_times(1, 100, 8)[8]
    times.observe(1, 9, 900, 0.09, drafted=True)
    assert times.verify_times(1, 100, 8)[8] == pytest.approx(times.verify_seconds(1, 9, 900))
    assert times.verify_times(1, 100, 8)[8] != before


def test_tables_of_many_numbers_of_rows_are_not_all_kept() -> None:
    times = observed(100)
    for rows in range(1, 200):
        times.verify_times(rows, 100 * rows, 16)
    assert len(times._verify_times) <= 16
