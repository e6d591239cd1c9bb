import pytest

from headrace.core.drafting.acceptance import Acceptance
from headrace.core.drafting.draft_budget import DraftBudget
from headrace.core.drafting.drafter import BudgetedDrafter
from headrace.core.drafting.proposal import DraftRow
from headrace.core.events import Verified
from headrace.core.request import Request
from headrace.lab import forced_acceptance
from headrace.lab.forced_acceptance import (
    BadRates,
    ForcedAcceptance,
    measured_rates,
    rates_of,
)
from headrace.testing.engines import Record, drain, hashing_engine
from headrace.testing.hashing_runner import expected_tokens
from tests.doubles.scenes import request


def test_the_given_share_is_accepted_and_the_answers_stay():
    made = [request(f"r{each}", 4 + each, max_tokens=60) for each in range(20)]
    truth = {each.tokens: expected_tokens(each.tokens, 0, 60, frozenset()) for each in made}
    forced = ForcedAcceptance(truth, 0.7, 4)
    engine, _ = hashing_engine(
        num_blocks=800, drafter=BudgetedDrafter([forced], Acceptance(), DraftBudget(4))
    )
    record = Record()
    for each in made:
        engine.submit(each, 0.0)
    drain(engine, record)
    assert {each.id: truth[each.tokens] for each in made} == record.tokens
    full = [event for event in record.of(Verified) if event.drafted == 4]
    first = sum(event.accepted > 0 for event in full) / len(full)
    assert len(full) > 300
    assert 0.6 < first < 0.8


def test_unknown_prompts_and_ended_answers_get_no_drafts():
    forced = ForcedAcceptance({(1, 2): [5, 6]}, 1.0, 4)
    known, unknown = Request("a", (1, 2)), Request("b", (1, 3))
    (draft,) = forced.propose([DraftRow(known, [1, 2, 5], 4)])
    assert draft is not None
    assert draft.tokens == (6,)
    assert forced.propose([DraftRow(known, [1, 2, 5, 6], 4), DraftRow(unknown, [1, 3], 4)]) == [None, None]


def test_rates_by_position_and_the_time_of_each_pass():
    answers = {"a": range(100, 200), "b": range(300, 303)}
    passes: list[int] = []

    def cost(draft_rows: list[DraftRow]) -> float:
        passes.append(len(draft_rows))
        return 0.5

    forced = ForcedAcceptance(answers, (1.0, 0.0), 4, key=lambda request: request.id, cost=cost)
    draft_rows = [DraftRow(Request(name, (1, 2)), [1, 2], 8) for name in "ab"]
    first, second = forced.propose(draft_rows)
    assert first is not None
    assert second is not None
    assert first.tokens[0] == 100
    assert all(drafted != true for drafted, true in zip(first.tokens[1:], answers["a"][1:4], strict=True))
    assert first.confidences == (0.75,) * 4
    assert len(second.tokens) == 3
    assert passes == [2, 2, 2, 1]
    assert forced.seconds == 2.0


def test_rates_are_measured_by_position():
    drafts = [(3, 3), (3, 1), (2, 0), (1, 1)]
    assert measured_rates(drafts) == (3 / 4, 1 / 2, 1.0)
    assert measured_rates([]) == ()
    expected = forced_acceptance.expected_tokens
    assert expected((0.8, 0.5), 3) == pytest.approx(1 + 0.8 + 0.4 + 0.2)
    assert expected((0.8,), 0) == 1.0


def test_rates_from_text():
    assert rates_of("0.7") == (0.7,)
    assert rates_of("0.8,0.5, 0") == (0.8, 0.5, 0.0)
    for text in ("", "much", "1.2", "-0.1", "0.5,", "nan"):
        with pytest.raises(BadRates, match=r"expected numbers from 0 to 1"):
            rates_of(text)
