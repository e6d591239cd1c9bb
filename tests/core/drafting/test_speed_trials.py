import random
from collections.abc import Callable

import pytest

from headrace.core.drafting.speed_trials import (
    MAX_INTERVAL,
    MAX_SKIP,
    MIN_INTERVAL,
    SECOND_TRIAL,
    TRIAL_STEPS,
    WARMUP_STEPS,
    SpeedTrials,
)

Steps = Callable[[bool], tuple[int, float]]
"""What a step draws, and its seconds, with drafts or without."""


def run(trials: SpeedTrials, steps: int, step: Steps, rows: int = 4) -> tuple[int, float]:
    """Tokens and seconds of steps that have drafts whenever they may."""
    tokens, total = 0, 0.0
    for _ in range(steps):
        drafted = not trials.steps_without_drafts(rows)
        drawn, seconds = step(drafted)
        trials.observed(rows, drawn, seconds, drafted)
        tokens, total = tokens + drawn, total + seconds
    return tokens, total


def even(drawn: int, slower: float, rows: int = 4) -> Steps:
    """Steps with drafts draw ``drawn`` tokens and take ``slower`` times as long."""
    return lambda drafted: (drawn, 0.001 * slower) if drafted else (rows, 0.001)


def noisy(inner: Steps, seed: int = 3) -> Steps:
    """Seconds vary as those of a busy machine do; some steps are interrupted."""
    rng = random.Random(seed)

    def step(drafted: bool) -> tuple[int, float]:
        drawn, seconds = inner(drafted)
        return drawn, seconds * rng.uniform(0.75, 1.35) * (40.0 if rng.random() < 0.01 else 1.0)

    return step


def test_drafts_are_usual_at_first_and_stay_so_while_they_are_faster() -> None:
    trials = SpeedTrials()
    assert trials.steps_without_drafts(4) == 0
    tokens, seconds = run(trials, 4000, noisy(even(12, 1.5)))
    assert trials.prefers_drafts(4)
    assert tokens / seconds > 0.9 * 12 / 0.0015 / 1.4, "trials of steps without drafts cost little"


@pytest.mark.parametrize("slower", [3.2, 5.0, 20.0])
def test_drafts_that_are_slower_than_predicted_end_after_one_trial(slower: float) -> None:
    trials = SpeedTrials()
    run(trials, MIN_INTERVAL + WARMUP_STEPS + TRIAL_STEPS, even(12, slower))
    assert not trials.prefers_drafts(4)
    assert 0 < trials.steps_without_drafts(4) <= MAX_SKIP
    tokens, seconds = run(trials, 20_000, even(12, slower))
    assert tokens / seconds > 0.96 * 4 / 0.001
    assert trials.prefers_drafts(3), "other numbers of rows are judged by themselves"


def test_noise_does_not_end_what_is_clearly_faster_or_keep_what_is_clearly_slower() -> None:
    for seed in range(20):
        fast, slow = SpeedTrials(), SpeedTrials()
        run(fast, 3000, noisy(even(12, 1.5), seed))
        run(slow, 3000, noisy(even(12, 6.0), seed))
        assert fast.prefers_drafts(4)
        assert not slow.prefers_drafts(4)


def test_drafts_that_became_faster_are_found_again() -> None:
    trials = SpeedTrials()
    run(trials, 2000, even(12, 6.0))
    assert not trials.prefers_drafts(4)
    run(trials, 5 * MAX_INTERVAL, even(12, 1.5))
    assert trials.prefers_drafts(4)


def test_drafts_that_are_slow_only_while_they_are_learned_are_soon_tried_again() -> None:
    trials, drafted = SpeedTrials(), 0

    def step(drafts: bool) -> tuple[int, float]:
        nonlocal drafted
        drafted += drafts
        return (12, 0.001 * (4.5 if drafted <= MIN_INTERVAL else 1.5)) if drafts else (4, 0.001)

    run(trials, 2 * (MIN_INTERVAL + WARMUP_STEPS + TRIAL_STEPS) + SECOND_TRIAL, step)
    assert trials.prefers_drafts(4)


def test_steps_for_which_nothing_was_proposed_are_no_reason_for_a_trial() -> None:
    trials = SpeedTrials()
    for _ in range(3000):
        assert trials.steps_without_drafts(4) == 0
        trials.observed(4, 4, 0.001, drafted=False)


def test_a_step_that_took_no_time_is_not_counted() -> None:
    trials = SpeedTrials()
    for _ in range(3000):
        assert trials.steps_without_drafts(4) == 0
        trials.observed(4, 8, 0.0, drafted=True)
