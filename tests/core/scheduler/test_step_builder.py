from __future__ import annotations

import pytest

from headrace.core.knobs import Knobs
from headrace.core.prediction.step_curve import TOKENS_ONLY, StepCost
from headrace.core.prediction.step_times import StepTimes
from headrace.core.scheduler.step_builder import (
    BACKGROUND_SECONDS,
    BACKGROUND_STRETCH,
    LEAST_PREFILL,
    SMOOTH_SECONDS,
    StepBuilder,
)

HALF = Knobs(mixed_prefill_ratio=0.5)


@pytest.mark.parametrize(
    ("remaining", "decodes", "planned", "knobs", "share"),
    [
        (10, 0, 0, Knobs(), (10, "whole")),
        (20, 0, 0, Knobs(), (16, "budget")),
        (10, 8, 0, HALF, (4, "budget")),
        (10, 0, 0, HALF, (10, "whole")),
        (10, 8, 3, HALF, (1, "budget")),
        (10, 8, 4, HALF, (0, "budget")),
        (10, 1, 0, HALF, (1, "budget")),
        (10, 1, 1, HALF, (0, "budget")),
        (10, 0, 0, Knobs(long_prefill_tokens=3), (3, "long_prompt")),
        (3, 0, 0, Knobs(long_prefill_tokens=3), (3, "whole")),
        (16, 0, 0, Knobs(chunked_prefill=False, long_prefill_tokens=3), (16, "whole")),
        (17, 0, 0, Knobs(chunked_prefill=False), (0, "budget")),
    ],
)
def test_share(remaining, decodes, planned, knobs, share):
    draft = StepBuilder(0, budget=16, cost=TOKENS_ONLY)
    draft.decodes, draft.prefill_cost = decodes, planned
    assert draft.share(0, remaining, knobs) == share


def test_a_chunk_shrinks_as_its_context_grows_and_grows_with_what_decodes():
    draft = StepBuilder(0, budget=1000, cost=StepCost(fixed_tokens=4, context_tokens=100))
    draft.decodes, draft.decode_contexts = 16, 16 * 100
    lengths = [draft.share(start, 1000, Knobs(mixed_prefill_ratio=1.0))[0] for start in (0, 100, 400, 4000)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 16
    assert 0 < lengths[-1] <= 36 / 41 + 1
    draft.decodes *= 2
    draft.decode_contexts *= 2
    assert draft.share(400, 1000, Knobs(mixed_prefill_ratio=1.0))[0] > lengths[2]


def test_a_queue_of_prompts_may_add_more_than_one():
    draft = StepBuilder(0, budget=1000, cost=TOKENS_ONLY)
    draft.decodes, draft.prompts = 8, 81
    assert draft.share(0, 1000, HALF) == (12, "budget")


def predicting(decodes: int, times: StepTimes, budget: int = 10_000) -> StepBuilder:
    """A draft in which so many decode, and steps have been seen."""
    draft = StepBuilder(0, budget=budget, cost=TOKENS_ONLY)
    draft.rows = [None] * decodes
    draft.decodes = draft.tokens = decodes
    draft.predict(times)
    return draft


def test_what_steps_have_taken_says_what_a_prompt_adds():
    """A fixed part of 40 tokens of a millisecond: one that decodes takes 41 ms, and half of them are 20 tokens."""
    times = StepTimes(StepCost(fixed_tokens=40), token_seconds=0.001)
    assert predicting(1, times).share(0, 1000, HALF) == (20, "budget")
    assert predicting(21, times).share(0, 1000, HALF) == (30, "budget")


def test_a_short_mixed_step_takes_the_prefill_that_fits():
    times = StepTimes(StepCost(fixed_tokens=10.5), token_seconds=SMOOTH_SECONDS / 1000)
    assert predicting(1, times).share(0, 2000, HALF) == (988, "budget")
    assert predicting(1, times).share(0, 500, HALF) == (500, "whole")


@pytest.mark.parametrize(
    ("token_seconds", "tokens"),
    [(BACKGROUND_SECONDS / 10, 10), (BACKGROUND_SECONDS, BACKGROUND_STRETCH), (1.0, BACKGROUND_STRETCH)],
)
def test_a_background_step_is_short_and_never_empty(token_seconds, tokens):
    draft = StepBuilder(0, budget=1000, cost=TOKENS_ONLY)
    draft.limit_background(StepTimes(token_seconds=token_seconds * 0.999))
    rows = 0
    while draft.fits_row(100, 0):
        draft.rows.append(None)
        rows += 1
    draft.tokens = rows
    assert rows == tokens
    assert draft.share(0, 100, Knobs()) == (0, "budget")
    empty = StepBuilder(0, budget=1000, cost=TOKENS_ONLY)
    empty.limit_background(StepTimes(token_seconds=token_seconds * 0.999))
    assert empty.share(0, 100, Knobs()) == (max(tokens, LEAST_PREFILL), "budget")
