from headrace.core.drafting.acceptance import Acceptance
from headrace.core.drafting.draft_budget import DraftBudget
from headrace.core.drafting.drafter import BudgetedDrafter
from headrace.core.drafting.proposal import DraftAsk
from headrace.core.events import Verified
from headrace.core.request import Request
from headrace.lab.forced_acceptance import ForcedAcceptance
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
    (draft,) = forced.propose([DraftAsk(known, [1, 2, 5], 4)])
    assert draft is not None
    assert draft.tokens == (6,)
    assert forced.propose([DraftAsk(known, [1, 2, 5, 6], 4), DraftAsk(unknown, [1, 3], 4)]) == [None, None]
