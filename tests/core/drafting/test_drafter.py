""""""

import itertools
import random
from collections.abc import Callable, Sequence

import pytest

from headrace.core.drafting.acceptance import Acceptance
from headrace.core.drafting.costly_sources import PROBE_BURST
from headrace.core.drafting.draft_budget import Cut, DraftBudget
from headrace.core.drafting.drafter import (
    MAX_INTERVAL,
    MAX_SKIP,
    MIN_INTERVAL,
    SECOND_TRIAL,
    TRIAL_STEPS,
    WARMUP_STEPS,
    BudgetedDrafter,
    SpeedTrials,
)
from headrace.core.drafting.proposal import DraftRow, Proposal, StepLoad
from headrace.core.prediction.step_times import StepTimes
from headrace.core.request import Request, RequestSettings
from tests.core.drafting.test_draft_budget import OnTheLine


def times(fixed: float = 0.02, token: float = 0.001) -> StepTimes:
    known = OnTheLine()
    known._coefficients = [fixed, 0.0, token, 0.0]
    return known


class Source:
    """Proposes what it is told to; counts how often it is asked."""

    def __init__(self, name: str, tokens: Sequence[int], confidence: float = 0.7) -> None:
        self.name = name
        self.tokens = tuple(tokens)
        self.confidence = confidence
        self.asked: list[tuple[str, int]] = []
        self.ends: list[str] = []
        self.seconds = 0.0
        self.token_seconds = 0.0

    def propose(self, draft_rows: Sequence[DraftRow]) -> Sequence[Proposal | None]:
        self.asked += [(draft_row.request.id, draft_row.max_tokens) for draft_row in draft_rows]
        self.seconds += self.token_seconds * max(draft_row.max_tokens for draft_row in draft_rows)
        return [
            Proposal(
                self.tokens[: draft_row.max_tokens],
                (self.confidence,) * len(self.tokens[: draft_row.max_tokens]),
                self.name,
            )
            if self.tokens
            else None
            for draft_row in draft_rows
        ]

    def ended(self, request: Request, tokens: list[int]) -> None:
        self.ends.append(request.id)


STEPS = itertools.count()


def load(rows: int, known: StepTimes | None = None) -> StepLoad:
    """The load of the next step."""
    return StepLoad(rows, rows, 0, 1000, known or times(), next(STEPS))


def draft_row(
    name: str = "r", tokens: Sequence[int] = (1,), max_tokens: int = 8, in_flight: int = 0
) -> DraftRow:
    return DraftRow(Request(name, (1,)), list(tokens), max_tokens, in_flight)


def drafter(*sources: Source, fixed: int | None = None, **costs: float) -> BudgetedDrafter:
    free = [each for each in sources if each.name not in costs]
    costly = [(each, costs[each.name]) for each in sources if each.name in costs]
    return BudgetedDrafter(free, Acceptance(), DraftBudget(fixed), costly)


def test_the_proposal_with_most_expected_tokens_wins() -> None:
    short, long = Source("a", (5,), 0.9), Source("b", (6, 7, 8), 0.9)
    (draft,) = drafter(short, long).draft([draft_row()], load(1))
    assert draft is not None
    assert (draft.source, draft.tokens, draft.cut) == ("b", (6, 7, 8), Cut.WHOLE)
    assert all(0.8 < each < 0.95 for each in draft.confidences)
    assert drafter().draft([draft_row()], load(1)) == [None]


def test_learned_acceptance_decides_between_sources() -> None:
    liar, honest = Source("liar", (9, 9, 9), 0.95), Source("honest", (1, 1, 1), 0.6)
    chooses, tokens, sources = drafter(liar, honest), [1], []
    for _ in range(8):
        (draft,) = chooses.draft([draft_row(tokens=tokens)], load(1))
        assert draft is not None
        sources.append(draft.source)
        tokens += [1]
    assert sources[0] == "liar"
    assert sources[-1] == "honest"


def test_proposals_that_are_not_verified_are_learned_from() -> None:
    """Under load nothing is drafted. The source became good meanwhile: with the load gone it is used soon."""
    source = Source("a", (9, 9))
    chooses, tokens = drafter(source), [1]

    def drafts(steps: int, token_seconds: float) -> list[Proposal | None]:
        found = []
        for _ in range(steps):
            found += chooses.draft([draft_row(tokens=tokens)], load(1, times(token=token_seconds)))
            tokens.append(1)
        return found

    drafts(30, 0.001)
    tried = [draft for draft in drafts(4, 0.004) if draft is not None]
    assert {(draft.tokens, draft.cut) for draft in tried} == {((), Cut.NOT_WORTH)}
    source.tokens = (1, 1)
    assert not any(draft.tokens for draft in drafts(40, 1.0) if draft is not None)
    assert any(draft.tokens == (1, 1) for draft in drafts(4, 0.004) if draft is not None)


def test_the_last_proposal_of_a_request_is_learned_from() -> None:
    source = Source("a", (9,), 0.9)
    chooses = drafter(source)
    for each in range(60):
        request = Request(str(each), (1,))
        chooses.draft([DraftRow(request, [1], 4)], load(1))
        chooses.ended(request, [1, 2])
    (draft,) = chooses.draft([draft_row("new")], load(1, times(token=0.01)))
    assert draft is not None
    assert not draft.tokens
    assert source.ends == [str(each) for each in range(60)]
    assert list(chooses._states) == ["new"]


QUICK = times(fixed=0.0005, token=1e-6)


def test_a_useless_source_is_asked_as_often_as_the_steps_have_time_for() -> None:
    def asked(rows: int, known: StepTimes) -> float:
        useless, useful = Source("a", ()), Source("b", (2, 2), 0.9)
        chooses = drafter(useless, useful)
        draft_rows = [draft_row(str(each)) for each in range(rows)]
        for _ in range(64):
            for each in draft_rows:
                each.tokens.append(2)
            chooses.draft(draft_rows, load(rows, known))
        assert len(useful.asked) == 64 * rows
        return len(useless.asked) / rows / 64

    assert asked(1, times()) == 1.0
    assert asked(1, QUICK) == asked(20, QUICK) == 7 / 64, "after rests that double"


def test_a_row_need_not_be_asked_for_until_a_source_is_due_again() -> None:
    useless = Source("a", ())
    chooses, row, asked = drafter(useless), draft_row(), []
    due = 0
    for step in range(300):
        row.tokens.append(1)
        if step >= due:
            asked.append(step)
            chooses.draft([row], StepLoad(16, 16, 0, 1000, QUICK, step))
            due = chooses.next_draft_step(row.request)
            assert due > step
    assert asked == [0, 1, 3, 7, 15, 31, 63, 128, 256]
    assert len(useless.asked) == len(asked)


def test_long_rests_end_together() -> None:
    useless = Source("a", ())
    chooses = drafter(useless)
    draft_rows = [draft_row(str(each)) for each in range(20)]
    due, asked = dict.fromkeys(range(20), 0), set()
    for step in range(2000):
        late = [row for row in range(20) if step >= row and due[row] <= step]
        if late:
            chooses.draft([draft_rows[row] for row in late], StepLoad(20, 20, 0, 1000, QUICK, step))
            due |= {row: chooses.next_draft_step(draft_rows[row].request) for row in late}
            asked.add(step)
    assert 3 <= sum(step >= 1000 for step in asked) <= 4, "all rows are asked for at the same few steps"


def test_a_new_request_rests_as_long_as_is_usual() -> None:
    useless = Source("a", ())
    chooses = drafter(useless)
    for each in range(40):
        for step in range(64):
            chooses.draft([draft_row(str(each))], StepLoad(16, 16, 0, 1000, QUICK, step))
    before = len(useless.asked)
    for step in range(64):
        chooses.draft([draft_row("new")], StepLoad(16, 16, 0, 1000, QUICK, step))
    assert len(useless.asked) - before <= 3, "a first one in a thousand would be asked six times"
    useless.tokens = (1, 1)
    (draft,) = chooses.draft([draft_row("other")], StepLoad(16, 16, 0, 1000, QUICK, 1000))
    assert draft is not None, "the first answer of a new request is always heard"


def test_tokens_in_flight_are_not_counted_as_gain() -> None:
    source = Source("a", (5, 6, 7), 0.9)
    (draft,) = drafter(source).draft([draft_row(in_flight=1)], load(1))
    assert draft is not None
    assert draft.tokens == (5, 6, 7)
    source = Source("a", (5,), 0.9)
    (draft,) = drafter(source).draft([draft_row(in_flight=1)], load(1))
    assert draft is not None
    assert draft.tokens == ()


def test_fixed_length_drafts_without_step_times() -> None:
    chooses = drafter(Source("a", (5, 6, 7), 0.1), fixed=2)
    (draft,) = chooses.draft([draft_row()], StepLoad(1, 1, 0, 100, None))
    assert draft is not None
    assert (draft.tokens, draft.cut) == ((5, 6), Cut.FIXED)


def test_a_costly_source_is_asked_only_where_it_promises_more() -> None:
    free, model = Source("free", (5,) * 8, 0.97), Source("model", (6,) * 8, 0.8)
    chooses = drafter(free, model, model=0.1)
    free.tokens = ()
    chooses.draft([draft_row()], load(1))
    ((_, max_tokens),) = model.asked
    assert 2 <= max_tokens <= 8
    free.tokens = (5,) * 8
    (draft,) = chooses.draft([draft_row(tokens=[1, 2])], load(1))
    assert draft is not None
    assert draft.source == "free"


def test_a_costly_source_is_not_asked_if_it_costs_more_than_it_gives() -> None:
    model = Source("model", (6,) * 8, 0.5)
    chooses = drafter(model, model=0.9)
    chooses.draft([draft_row()], load(1))
    assert not model.asked
    chooses.draft([draft_row()], StepLoad(1, 1, 0, 100, None))
    assert not model.asked, "step times are unknown"


def test_a_useless_model_is_probed_and_found_again() -> None:
    model = Source("model", (9,) * 8, 0.8)
    model.token_seconds = 0.1 * times().predict(1, 1, 0)
    chooses, tokens = drafter(model, model=0.1), [1]
    asked = []
    for _ in range(600):
        before = len(model.asked)
        chooses.draft([draft_row(tokens=tokens)], load(1))
        asked.append(sum(max_tokens for _, max_tokens in model.asked[before:]))
        tokens += [1]
    late = asked[300:]
    assert 0 < sum(late) <= 0.01 * len(late) / 0.1 * 1.2, "probes take one percent of the time"
    model.tokens = (1,) * 8
    for _ in range(300):
        (draft,) = chooses.draft([draft_row(tokens=tokens)], load(1))
        tokens += [1]
    assert draft is not None
    assert len(draft.tokens) >= 2


def test_probes_come_in_bursts_and_are_verified() -> None:
    model = Source("model", (9,) * 8, 0.8)
    model.token_seconds = 0.1 * times().predict(1, 1, 0)
    chooses, tokens = drafter(model, model=0.1), [1]
    asked, verified = [], []
    for step in range(600):
        before = len(model.asked)
        (draft,) = chooses.draft([draft_row(tokens=tokens)], StepLoad(1, 1, 0, 1000, times(), step))
        if len(model.asked) > before:
            asked.append(step)
            verified.append(bool(draft and draft.tokens))
        tokens += [1]
    late = [step for step in asked if step > 300]
    assert len(late) >= PROBE_BURST
    assert all((step + 1 in late) or (step - 1 in late) for step in late[1:-1])
    assert all(verified), "what a verified draft costs is measured, too"


def test_what_a_model_costs_is_learned_from_successive_proposals_only() -> None:
    model = Source("model", (1,) * 8, 0.9)
    chooses, tokens = drafter(model, model=0.05), [1]
    source = chooses._costly[0]
    for step in range(0, 60, 2):  # never at successive steps
        model.token_seconds = 1.0
        chooses.draft([draft_row(tokens=tokens)], StepLoad(1, 1, 0, 1000, times(), step))
        tokens += [1]
    assert model.asked
    assert source._cost_share == 0.05
    for step in range(60, 64):
        chooses.draft([draft_row(tokens=tokens)], StepLoad(1, 1, 0, 1000, times(), step))
        tokens += [1]
    assert source._cost_share > 0.05


@pytest.mark.parametrize(("rows", "counts"), [(1, False), (2, True)])
def test_probes_of_a_lone_row_do_not_count_as_its_pace_with_drafts(rows: int, counts: bool) -> None:
    chooses = drafter(Source("model", (6,) * 8, 0.8), model=0.1)
    chooses._costly[0].probing = True
    for _ in range(MIN_INTERVAL):
        chooses.observed(rows, rows, 0.01, drafted=True)
    assert (chooses._trials.steps_without_drafts(rows) > 0) == counts


def test_a_fixed_length_asks_a_costly_source_where_nothing_else_is_proposed() -> None:
    free, model = Source("free", (5,), 0.1), Source("model", (6,) * 8, 0.1)
    chooses = drafter(free, model, fixed=3, model=0.9)
    chooses.draft([draft_row()], load(1))
    assert not model.asked
    free.tokens = ()
    (draft,) = chooses.draft([draft_row()], load(1))
    assert model.asked == [("r", 3)]
    assert draft is not None
    assert draft.tokens == (6, 6, 6)


@pytest.mark.parametrize("count", [1, 3])
def test_every_ask_gets_an_answer(count: int) -> None:
    chooses = drafter(Source("a", (5,)), Source("b", ()))
    assert len(chooses.draft([draft_row(str(each)) for each in range(count)], load(count))) == count


def test_the_cost_of_a_costly_source_is_learned() -> None:
    model = Source("model", (1,) * 8, 0.9)
    model.token_seconds = 2.0 * times().predict(1, 1, 0)  # slower than the target
    chooses, tokens, asked = drafter(model, model=0.05), [1], []
    for _ in range(200):
        before = len(model.asked)
        chooses.draft([draft_row(tokens=tokens)], load(1))
        asked.append(len(model.asked) > before)
        tokens += [1]
    assert all(asked[:3])
    assert sum(asked[100:]) < 20


def test_the_time_of_drafting_is_no_part_of_the_observed_step() -> None:
    model = Source("model", (1,) * 8, 0.9)
    model.token_seconds = 1.0
    known = times()
    drafter(model, fixed=2, model=0.1).draft([draft_row()], load(1, known))
    for _ in range(3):
        known.observe(1, 1, 1, 0.021)
    plain = times()
    plain.observe(1, 1, 1, 0.0)  # it was all drafting
    for _ in range(2):
        plain.observe(1, 1, 1, 0.021)
    assert known.coefficients == plain.coefficients


def test_each_request_may_name_its_method_and_its_most_tokens() -> None:
    free, model = Source("ngram", (5, 6, 7), 0.9), Source("draft_model", (5, 6, 7, 8, 9), 0.95)
    chooses = drafter(free, model, fixed=3, draft_model=0.01)
    settings = [RequestSettings(draft_method=method) for method in ("all", "ngram", "draft_model", "none")]
    draft_rows = [DraftRow(Request(str(n), (1,), settings=each), [1], 8) for n, each in enumerate(settings)]
    drafts = chooses.draft(draft_rows, load(4))
    assert [each and each.source for each in drafts] == ["ngram", "ngram", "draft_model", None]
    assert {name for name, _ in free.asked} == {"0", "1"}
    assert {name for name, _ in model.asked} == {"2"}
    assert [RequestSettings(draft_tokens=max_tokens).limit_drafted(4) for max_tokens in (0, 2, 9)] == [
        0,
        2,
        4,
    ]
    assert [each.limit_drafted(4) for each in settings] == [4, 4, 4, 0]


def test_the_time_of_a_draft_model_belongs_to_the_rows_that_it_drafted_for() -> None:
    free, model = Source("ngram", (5, 6, 7), 0.9), Source("draft_model", (5, 6, 7), 0.9)
    model.token_seconds = 0.5
    chooses = drafter(free, model, fixed=3, draft_model=0.01)
    settings = [RequestSettings(draft_method=method) for method in ("ngram", "draft_model", "draft_model")]
    draft_rows = [
        DraftRow(Request(str(n), (1,), settings=each), [1], max_tokens)
        for n, (each, max_tokens) in enumerate(zip(settings, (8, 3, 1), strict=True))
    ]
    chooses.draft(draft_rows, load(3))
    assert chooses.seconds == {"1": pytest.approx(1.125), "2": pytest.approx(0.375)}
    chooses.draft(draft_rows[:1], load(1))
    assert chooses.seconds == {}


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
