"""What grammars force is verified first, as far as it pays; other rows get what another drafter says."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from headrace.core.drafting.draft_budget import Cut
from headrace.core.drafting.forced import MAX_UNTIMED, SOURCE, ForcedTokenDrafter
from headrace.core.drafting.proposal import DraftRow, Proposal, StepLoad
from headrace.core.request import Request, Slo
from tests.core.drafting.test_drafter import Source, draft_row, drafter, load, times


class Forced:
    """Says what it is told to, by request."""

    def __init__(self, **runs: Sequence[int]) -> None:
        self.known = {name: tuple(run) for name, run in runs.items()}
        self.asked = 0

    @property
    def idle(self) -> bool:
        return not self.known

    def forced_tokens(self, draft_rows: Sequence[DraftRow]) -> list[tuple[int, ...]]:
        self.asked += 1
        return [self.known.get(each.request.id, ()) for each in draft_rows]

    def ended(self, request_id: str) -> None:
        self.known.pop(request_id, None)


def test_a_forced_run_is_verified_as_a_whole_and_other_rows_have_nothing() -> None:
    first = ForcedTokenDrafter(Forced(a=(5, 6, 7)))
    drafts = first.draft([draft_row("b"), draft_row("a")], load(2))
    assert drafts == [None, Proposal((5, 6, 7), (1.0, 1.0, 1.0), SOURCE, Cut.WHOLE)]


def test_it_is_idle_while_no_request_has_a_grammar_and_none_drafts() -> None:
    assert ForcedTokenDrafter(Forced()).idle
    assert not ForcedTokenDrafter(Forced(a=())).idle
    assert not ForcedTokenDrafter(Forced(), drafter(Source("free", (1,)))).idle


def test_tokens_in_flight_are_no_drafts() -> None:
    first = ForcedTokenDrafter(Forced(a=(5, 6), b=(5,)))
    drafts = first.draft([draft_row("a", in_flight=1), draft_row("b", in_flight=1)], load(2))
    assert drafts == [Proposal((5, 6), (1.0, 1.0), SOURCE, Cut.WHOLE), None]


def test_a_run_is_cut_to_what_is_asked_for() -> None:
    (draft,) = ForcedTokenDrafter(Forced(a=range(9))).draft([draft_row("a", max_tokens=4)], load(1))
    assert draft is not None
    assert draft.tokens == (0, 1, 2, 3)


def test_before_step_times_are_known_a_run_is_verified_up_to_a_limit() -> None:
    unknown = StepLoad(1, 1, 0, 1000, None)
    (draft,) = ForcedTokenDrafter(Forced(a=range(MAX_UNTIMED + 9))).draft(
        [draft_row("a", max_tokens=MAX_UNTIMED + 9)], unknown
    )
    assert draft is not None
    assert len(draft.tokens) == MAX_UNTIMED


@pytest.mark.parametrize(("fixed", "worth"), [(0.1, True), (0.02, False), (0.0, False)])
def test_where_a_token_costs_nearly_as_much_in_any_step_little_is_gained(fixed: float, worth: bool) -> None:
    draft_rows = [draft_row("a"), *(draft_row(f"r{number}") for number in range(31))]
    draft = ForcedTokenDrafter(Forced(a=(1, 2, 3))).draft(draft_rows, load(32, times(fixed=fixed)))[0]
    assert draft is not None
    assert bool(draft.tokens) == worth
    assert draft.cut == (Cut.WHOLE if worth else Cut.NOT_WORTH)


def test_a_latency_target_of_another_row_bounds_it() -> None:
    hurried = DraftRow(Request("b", (1,), slo=Slo(tpot_seconds=0.0288)), [1], 8)  # a step may take 23 ms
    draft, _ = ForcedTokenDrafter(Forced(a=(1, 2, 3), b=())).draft([draft_row("a"), hurried], load(2))
    assert draft is not None
    assert draft.tokens == (1,)
    assert draft.cut is Cut.TPOT


def test_other_rows_get_the_drafts_of_another_drafter_in_what_is_left_of_the_step() -> None:
    free = Source("free", (8, 9), confidence=0.9)
    first = ForcedTokenDrafter(Forced(a=(5, 6, 7)), drafter(free))
    drafts = first.draft([draft_row("b"), draft_row("a"), draft_row("c")], load(3)._replace(budget=5))
    assert [name for name, _ in free.asked] == ["b", "c"]
    assert [draft and draft.source for draft in drafts] == ["free", SOURCE, "free"]
    assert sum(len(draft.tokens) for draft in drafts if draft) == 5


def test_a_grammar_that_forces_nothing_leaves_its_row_to_the_other_drafter() -> None:
    free = Source("free", (8, 9), confidence=0.9)
    first = ForcedTokenDrafter(Forced(a=()), drafter(free))
    (draft,) = first.draft([draft_row("a")], load(1))
    assert draft is not None
    assert draft.source == "free"


def test_the_end_of_a_request_reaches_both_drafters() -> None:
    forced, free = Forced(a=(1,)), Source("free", (8,))
    first = ForcedTokenDrafter(forced, drafter(free))
    first.ended(Request("a", (1,)), [1, 2])
    assert forced.idle
    assert free.ends == ["a"]
