import itertools
import math
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.core.drafting.draft_budget import MARGIN, TPOT_SHARE, Candidate, Cut, DraftBudget, DraftChoice
from headrace.core.drafting.proposal import StepLoad
from headrace.core.prediction.step_times import StepTimes


class OnTheLine(StepTimes):
    """Steps that take exactly what the line says."""

    def verify_seconds(self, rows: int, tokens: int, contexts: int) -> float:
        return self.predict(rows, tokens, contexts)

    def max_drafted(self, rows: int) -> int:
        return 1 << 20


class Stairs(OnTheLine):
    """Up to 8 tokens a step takes as long as one; above, the line holds."""

    def verify_seconds(self, rows: int, tokens: int, contexts: int) -> float:
        return self.predict(rows, rows if tokens <= 8 else tokens, contexts)


class Jump(OnTheLine):
    """Any drafts make a step much longer, and each further token a little."""

    def verify_seconds(self, rows: int, tokens: int, contexts: int) -> float:
        return 0.025 + 0.001 * (tokens - rows)


def times(fixed: float, token: float, context: float = 0.0, row: float = 0.0) -> StepTimes:
    known = OnTheLine()
    known._coefficients = [fixed, row, token, context]
    return known


def load(rows: int, known: StepTimes | None, budget: int = 1000, contexts: int = 0) -> StepLoad:
    return StepLoad(rows, rows, contexts, budget, known)


def survivals(chance: float, count: int) -> tuple[float, ...]:
    return tuple(chance**at for at in range(1, count + 1))


def ratio(candidates: list[Candidate], counts: list[int], step: StepLoad) -> float:
    """Expected tokens per second of a choice."""
    assert step.times is not None
    _, _, token, context = step.times.coefficients
    seconds = step.times.predict(step.rows, step.tokens, step.contexts)
    gain = float(step.rows)
    for candidate, count in zip(candidates, counts, strict=True):
        for at in range(candidate.in_flight, count):
            gain += candidate.survivals[at]
            seconds += token + context * (candidate.context + at)
    return gain / seconds


ROWS = st.lists(
    st.tuples(
        st.lists(st.floats(0.05, 0.99), max_size=4),
        st.integers(1, 3000),
        st.integers(0, 1),
    ),
    min_size=1,
    max_size=4,
)


NEARLY = 0.99
"""Costs that differ by less than `EQUAL_COST` are taken as equal, which loses less than a hundredth of the best."""


@pytest.mark.parametrize(("second", "tokens"), [(0.64, 1), (0.66, 2)])
def test_a_token_must_gain_more_than_its_cost_by_the_margin(second: float, tokens: int) -> None:
    """A second token pays from 1.9 / 3 = 0.633, and with a margin of 1.05 from 1.95 / 3."""
    [choice] = DraftBudget().choose([Candidate((0.9, second), 0, 0)], load(1, times(1.0, 1.0)))
    assert choice.tokens == tokens


@settings(max_examples=300)
@given(rows=ROWS, token=st.floats(1e-5, 1e-2), context=st.floats(0, 1e-6))
@example(rows=[([0.775], 3000, 1), ([0.1181, 0.2151], 1, 0)], token=9.285e-5, context=1e-6)
@example(rows=[([0.5], 415, 0), ([0.5, 0.5, 0.0625], 1, 0)], token=1e-5, context=8.098109829320203e-07)
def test_no_other_choice_is_much_better(
    rows: list[tuple[list[float], int, int]], token: float, context: float
) -> None:
    candidates = []
    for chances, length, in_flight in rows:
        kept = tuple(itertools.accumulate(chances, lambda a, b: a * b))
        candidates.append(Candidate(kept, length, min(in_flight, len(kept)), tokens_per_step=math.inf))
    step = load(
        len(candidates),
        times(0.02, token, context),
        contexts=sum(candidate.context for candidate in candidates),
    )
    chosen = [choice.tokens for choice in DraftBudget().choose(candidates, step)]
    reached = ratio(candidates, chosen, step)
    nothing = ratio(candidates, [0] * len(candidates), step)
    assert reached >= NEARLY * nothing
    every = itertools.product(*(range(len(candidate.survivals) + 1) for candidate in candidates))
    best = max(ratio(candidates, list(counts), step) for counts in every)
    assert reached >= NEARLY * best / MARGIN
    for candidate, count in zip(candidates, chosen, strict=True):
        assert count == 0 or count > candidate.in_flight


@settings(max_examples=200)
@given(rows=ROWS, budget=st.integers(0, 6))
def test_the_budget_of_the_step_is_the_best_use_of_it(
    rows: list[tuple[list[float], int, int]], budget: int
) -> None:
    """With tokens of equal cost."""
    candidates = [
        Candidate(tuple(itertools.accumulate(chances, lambda a, b: a * b)), 1) for chances, _, _ in rows
    ]
    step = load(len(candidates), times(0.02, 1e-5), budget)
    choices = DraftBudget().choose(candidates, step)
    chosen = [choice.tokens for choice in choices]
    assert sum(chosen) <= budget
    fitting = [
        list(counts)
        for counts in itertools.product(*(range(len(candidate.survivals) + 1) for candidate in candidates))
        if sum(counts) <= budget
    ]
    assert (
        ratio(candidates, chosen, step)
        >= max(ratio(candidates, each, step) for each in fitting) / MARGIN - 1e-9
    )
    for candidate, choice in zip(candidates, choices, strict=True):
        if choice.cut is Cut.BUDGET:
            assert sum(chosen) == budget
            assert choice.tokens < len(candidate.survivals)


def test_under_load_nothing_is_drafted() -> None:
    """A token costs 1 ms: alone it is 5 % of the step; with 64 rows a step of as many tokens is full of them."""
    known = times(0.02, 0.001)
    for rows, drafted in ((1, 4), (4, 4), (64, 0)):
        candidates = [Candidate(survivals(0.6, 4), 100) for _ in range(rows)]
        chosen = [choice.tokens for choice in DraftBudget().choose(candidates, load(rows, known))]
        assert (max(chosen) > 0) == (drafted > 0), rows
    assert {choice.cut for choice in DraftBudget().choose(candidates, load(64, known))} == {Cut.NOT_WORTH}


def test_a_stair_is_filled_and_the_next_one_is_not_begun_for_a_doubtful_token() -> None:
    known = Stairs()
    known._coefficients = [0.02, 0.0, 0.0005, 0.0]
    candidates = [Candidate(survivals(0.4, 5), 100) for _ in range(4)]
    chosen = [choice.tokens for choice in DraftBudget().choose(candidates, load(4, known))]
    assert sum(chosen) == 4, chosen
    candidates = [Candidate(survivals(0.99, 5), 100) for _ in range(4)]
    chosen = [choice.tokens for choice in DraftBudget().choose(candidates, load(4, known))]
    assert sum(chosen) == 20


def test_the_predictable_rows_are_drafted_for_first() -> None:
    candidates = [Candidate(survivals(chance, 8), 100, tokens_per_step=4.0) for chance in (0.95, 0.3, 0.7)]
    first, second, third = DraftBudget().choose(candidates, load(3, times(0.02, 0.003)))
    assert first.tokens > third.tokens > second.tokens


def test_tokens_in_flight_cost_and_gain_nothing() -> None:
    step = load(1, times(0.02, 0.001))
    (choice,) = DraftBudget().choose([Candidate((0.5, 0.45, 0.4), 100, in_flight=1)], step)
    assert choice == DraftChoice(3, Cut.WHOLE)
    (choice,) = DraftBudget().choose([Candidate((0.5,), 100, in_flight=1)], step)
    assert choice.tokens == 0
    (choice,) = DraftBudget(2).choose([Candidate((0.5, 0.4, 0.3, 0.2), 100, in_flight=1)], step)
    assert choice == DraftChoice(3, Cut.FIXED)


def test_without_step_times_nothing_is_drafted() -> None:
    assert DraftBudget().choose([Candidate((0.9,), 1)], load(1, None)) == [DraftChoice(0, Cut.TIMES_UNKNOWN)]
    assert DraftBudget().choose([Candidate((), 1)], load(1, None)) == [DraftChoice(0, Cut.NOTHING_PROPOSED)]


def test_fixed() -> None:
    candidates = [Candidate(survivals(0.1, 5), 1), Candidate((), 1), Candidate(survivals(0.9, 2), 1)]
    assert DraftBudget(3).choose(candidates, load(3, None)) == [
        DraftChoice(3, Cut.FIXED),
        DraftChoice(0, Cut.NOTHING_PROPOSED),
        DraftChoice(2, Cut.WHOLE),
    ]
    assert [choice.tokens for choice in DraftBudget(3).choose(candidates, load(3, None, budget=3))] == [
        1,
        0,
        1,
    ]
    assert DraftBudget(3).choose(candidates, load(3, None, budget=0))[0] == DraftChoice(0, Cut.BUDGET)


def test_drafts_of_some_rows_slow_down_a_quarter_of_the_others_at_most() -> None:
    known = times(0.010, 0.001)
    drafted, plain = Candidate(survivals(0.95, 8), 1), Candidate((), 1)
    (first, *_) = DraftBudget().choose([drafted, plain, plain, plain], load(4, known))
    assert first == DraftChoice(1, Cut.OTHERS), "1.4 ms of the 14 ms of a step without drafts"
    helped = plain._replace(tokens_per_step=3.0)
    (first, *_) = DraftBudget().choose([drafted, helped, helped, plain], load(4, known))
    assert first.tokens == 8, "drafts have helped the others before"
    (first,) = DraftBudget().choose([drafted], load(4, known)._replace(other_tokens_per_step=(1.0, 1.0, 1.0)))
    assert first == DraftChoice(1, Cut.OTHERS), "rows that are not asked for count, too"


def test_so_few_drafts_that_they_do_not_pay_are_not_verified() -> None:
    """Above its first stair a step is quick, but a target of another row ends it there."""
    known = Jump()
    known._coefficients = [0.010, 0.0, 0.0, 0.0]
    candidates = [Candidate(survivals(0.95, 8), 1), Candidate((), 1, tokens_per_step=9.0)]
    assert DraftBudget().choose(candidates, load(2, known))[0].tokens == 8
    target = known.verify_seconds(2, 6, 0) / TPOT_SHARE
    choice = DraftBudget().choose([candidates[0], Candidate((), 1, 0, target, 9.0)], load(2, known))[0]
    assert choice == DraftChoice(0, Cut.TPOT)


def test_drafts_of_one_row_keep_the_tpot_target_of_another() -> None:
    known = times(0.010, 0.001)
    seconds = known.predict(2, 2, 0)
    drafted = Candidate(survivals(0.95, 8), 1)
    target = (seconds + 0.0035) / TPOT_SHARE
    first, other = DraftBudget().choose([drafted, Candidate((), 1, 0, target, 9.0)], load(2, known))
    assert first == DraftChoice(3, Cut.TPOT)
    assert other.tokens == 0
    missed = Candidate((), 1, 0, 0.5 * seconds, 9.0)
    first, _ = DraftBudget().choose([drafted, missed], load(2, known))
    assert first.tokens == 8, "a target that is missed anyway bounds nothing"


def test_a_rows_own_drafts_lengthen_what_its_target_allows() -> None:
    known = times(0.010, 0.001)
    target = (known.predict(1, 1, 0) + 0.0005) / TPOT_SHARE
    (choice,) = DraftBudget().choose([Candidate(survivals(0.95, 8), 1, tpot_seconds=target)], load(1, known))
    assert choice.tokens == 8


def test_free_tokens_are_taken_down_to_the_floor() -> None:
    (choice,) = DraftBudget().choose([Candidate(survivals(0.5, 12), 1)], load(1, times(0.01, 0.0)))
    assert choice.tokens == int(math.log(0.02) / math.log(0.5))


@pytest.mark.parametrize("seed", range(20))
def test_targets_hold_in_random_steps(seed: int) -> None:
    rng = random.Random(seed)
    known = times(0.01, 0.0005, 1e-7)
    candidates = [
        Candidate(
            survivals(rng.random(), rng.randrange(9)),
            rng.randrange(1, 5000),
            tpot_seconds=rng.choice((math.inf, 0.02, 0.03)),
        )
        for _ in range(rng.randrange(1, 20))
    ]
    step = load(
        len(candidates), known, rng.randrange(100), sum(candidate.context for candidate in candidates)
    )
    chosen = [choice.tokens for choice in DraftBudget().choose(candidates, step)]
    base = known.predict(step.rows, step.tokens, step.contexts)
    seconds = base + sum(
        0.0005 + 1e-7 * (candidate.context + at)
        for candidate, n in zip(candidates, chosen, strict=True)
        for at in range(n)
    )
    for candidate, count in zip(candidates, chosen, strict=True):
        limit = TPOT_SHARE * candidate.tpot_seconds
        if base <= limit:
            assert seconds <= limit * (1 + sum(candidate.survivals[:count])) + 1e-12
