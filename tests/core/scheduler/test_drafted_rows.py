"""Drafts of rows: what they may take, what they cost, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from headrace.core.drafting.proposal import DraftRow, Proposal, StepLoad
from headrace.core.events import (
    DraftDeclined,
    DraftedStep,
    DraftingFailed,
    Emitted,
    Preempted,
    Stepped,
    Verified,
)
from headrace.core.knobs import Knobs
from headrace.core.plan import StepPlan
from headrace.core.prediction.step_times import StepTimes
from headrace.core.queueing.fair_queue import FairQueue, TenantQueue
from headrace.core.request import FinishReason, Request, SamplingParams
from headrace.core.tenancy.fair_share import ShareLedger
from headrace.core.tenancy.tenants import CLASSES
from headrace.testing.engines import Record, drain, hashing_engine
from headrace.testing.hashing_runner import expected_tokens, hashed_truth
from tests.doubles.scenes import plans, request, step

Propose = Callable[[DraftRow], Sequence[int] | None]


class Drafting:
    """Drafts what ``propose`` says, as it is."""

    idle = False

    def __init__(self, propose: Propose) -> None:
        self.propose = propose
        self.draft_rows: list[DraftRow] = []
        self.loads: list[StepLoad] = []
        self.reported: list[tuple[str, tuple[int, ...], int]] = []
        self.ends: list[tuple[str, int]] = []
        self.seconds: dict[str, float] = {}
        self.steps: list[tuple[int, int, float, bool]] = []

    def draft(self, draft_rows: Sequence[DraftRow], load: StepLoad) -> Sequence[Proposal | None]:
        self.draft_rows += [each._replace(tokens=list(each.tokens)) for each in draft_rows]
        self.loads.append(load)
        reported = [self.propose(draft_row) for draft_row in draft_rows]
        return [None if t is None else Proposal(tuple(t), (0.9,) * len(t), "test") for t in reported]

    def next_draft_step(self, request: Request) -> int:
        return 0

    def observed(self, rows: int, drawn: int, seconds: float, drafted: bool) -> None:
        self.steps.append((rows, drawn, seconds, drafted))

    def verified(self, request_id: str, proposal: Proposal, accepted: int) -> None:
        self.reported.append((request_id, proposal.tokens, accepted))

    def ended(self, request: Request, tokens: list[int]) -> None:
        self.ends.append((request.id, len(tokens)))


def right(count: int) -> Propose:
    return lambda draft_row: hashed_truth(draft_row, count)


def wrong(count: int) -> Propose:
    return lambda draft_row: [(token + 1) % 97 for token in hashed_truth(draft_row, count)]


def drafted(plan: StepPlan) -> dict[int, tuple[int, ...]]:
    return {row.slot: row.drafts for row in plan.rows if row.drafts}


def rows(seen: list[StepPlan]) -> list[list[tuple[int, int]]]:
    """Length of each row and of its drafts, per plan."""
    return [[(row.length, len(row.drafts)) for row in plan.rows] for plan in seen]


def test_right_drafts_come_out_at_once():
    drafter = Drafting(right(3))
    engine, _ = hashing_engine(drafter=drafter)
    record, seen = Record(), plans(engine)
    engine.submit(request("r", 5, max_tokens=9), 0.0)
    drain(engine, record)
    assert [len(event.tokens) for event in record.of(Emitted)] == [1, 4, 4]
    assert rows(seen) == [[(5, 0)], [(4, 3)], [(4, 3)]]
    assert [event[:4] for event in record.of(Verified)] == [("r", "test", 3, 3)] * 2
    assert [(name, accepted) for name, _, accepted in drafter.reported] == [("r", 3)] * 2
    assert drafter.ends == [("r", 14)]
    assert [event.computed_tokens for event in record.of(Stepped)] == [5, 4, 4]
    assert [event.decode_rows for event in record.of(Stepped)] == [0, 1, 1]


def test_wrong_drafts_cost_positions_and_nothing_else():
    engine, runner = hashing_engine(drafter=Drafting(wrong(3)), block_size=2)
    record = Record()
    engine.submit(request("r", 5, max_tokens=9), 0.0)
    drain(engine, record)
    assert [len(event.tokens) for event in record.of(Emitted)] == [1] * 9
    # A draft ends where the answer must: of its last tokens none is worth drafting for.
    assert runner.computed_tokens == 5 + 8 + 5 * 3 + 2 + 1


def test_an_ask_has_all_known_tokens_and_room_for_the_last_drawn_one():
    drafter = Drafting(lambda draft_row: None)
    engine, _ = hashing_engine(drafter=drafter)
    record = Record()
    made = request("r", 5, max_tokens=4)
    engine.submit(made, 0.0)
    drain(engine, record)
    answer = record.tokens["r"]
    assert [draft_row.tokens for draft_row in drafter.draft_rows] == [
        [*made.tokens, *answer[:1]],
        [*made.tokens, *answer[:2]],
    ]
    assert [draft_row.max_tokens for draft_row in drafter.draft_rows] == [2, 1]
    assert not record.of(Verified)


def test_a_draft_ends_before_a_token_that_ends_the_answer():
    made = Request("r", (3, 1, 4), SamplingParams(max_tokens=30), eos_token_ids=frozenset({7}))
    long = expected_tokens(made.tokens, 0, 30, frozenset())
    made = Request("r", (3, 1, 4), SamplingParams(max_tokens=30), eos_token_ids=frozenset({long[4]}))
    drafter = Drafting(right(20))
    engine, _ = hashing_engine(drafter=drafter)
    record, seen = Record(), plans(engine)
    engine.submit(made, 0.0)
    drain(engine, record)
    at = long.index(long[4])
    assert record.tokens["r"] == long[: at + 1]
    (end,) = record.ends["r"]
    assert (end.reason, end.output_tokens, end.stop_token) == (FinishReason.STOP, at + 1, long[4])
    assert seen[1].rows[0].drafts == tuple(long[1:at])


@pytest.mark.parametrize("limit", range(1, 8))
def test_max_tokens_ends_inside_a_draft(limit):
    engine, _ = hashing_engine(drafter=Drafting(lambda draft_row: hashed_truth(draft_row, 20)))
    record = Record()
    engine.submit(request("r", 5, max_tokens=limit), 0.0)
    drain(engine, record)
    (end,) = record.ends["r"]
    assert (end.reason, end.output_tokens, len(record.tokens["r"])) == (FinishReason.LENGTH, limit, limit)


def test_the_context_ends_inside_a_draft():
    engine, _ = hashing_engine(
        drafter=Drafting(lambda draft_row: hashed_truth(draft_row, 40)), max_model_len=16
    )
    record = Record()
    engine.submit(request("r", 5, max_tokens=None), 0.0)
    drain(engine, record)
    assert len(record.tokens["r"]) == 11


def test_a_draft_is_cut_at_the_last_free_block_and_preempts_no_request():
    """Six blocks of four tokens: the first request holds four of them when both decode."""
    engine, _ = hashing_engine(
        drafter=Drafting(right(12)), num_blocks=7, block_size=4, max_model_len=24, prefix_caching=False
    )
    record, seen = Record(), plans(engine)
    engine.submit(request("a", 11, max_tokens=13), 0.0)
    engine.submit(request("b", 7, max_tokens=5), 0.0)
    step(engine, record, 2)
    assert not record.of(Preempted)
    # Two of seven blocks are free and each of two sequences may need one next: drafts stay in the blocks they have.
    assert rows(seen)[1] == [(1, 0), (1, 0)]
    drain(engine, record)
    assert {name: len(tokens) for name, tokens in record.tokens.items()} == {"a": 13, "b": 5}
    assert any(drafts for plan in rows(seen) for _, drafts in plan), "alone, it drafts"


def test_blocks_of_rejected_positions_stay_and_are_used():
    engine, _ = hashing_engine(drafter=Drafting(wrong(6)), block_size=2, num_blocks=20)
    record, seen = Record(), plans(engine)
    engine.submit(request("r", 4, max_tokens=12), 0.0)
    step(engine, record, 2)
    assert len(seen[1].rows[0].new_blocks) == 4
    step(engine, record, 3)
    assert [len(plan.rows[0].new_blocks) for plan in seen[2:]] == [0, 1, 0]
    drain(engine, record)
    assert record.tokens["r"] == expected_tokens(request("r", 4).tokens, 0, 12, frozenset())


def test_only_accepted_tokens_are_found_in_the_prefix_cache():
    drafter = Drafting(wrong(6))
    engine, _ = hashing_engine(drafter=drafter, block_size=2)
    record = Record()
    first = request("r", 4, max_tokens=6)
    engine.submit(first, 0.0)
    drain(engine, record)
    answer = record.tokens["r"]
    assert engine.scheduler.pool.num_cached == 5, "nine computed positions, of the last block a part"
    drafter.propose = lambda draft_row: None
    engine.submit(Request("again", (*first.tokens, *answer), SamplingParams(max_tokens=2)), 0.0)
    other = [(token + 1) % 97 for token in answer]
    engine.submit(Request("other", (*first.tokens, *other), SamplingParams(max_tokens=2)), 0.0)
    drain(engine, record)
    assert record.ends["again"][0].cached_tokens == 9
    assert record.ends["other"][0].cached_tokens == 4


def test_drafted_positions_are_charged():
    def served(propose: Propose) -> float:
        ledger = ShareLedger(CLASSES, {})
        engine, _ = hashing_engine(drafter=Drafting(propose), queue=FairQueue(ledger, TenantQueue))
        record = Record()
        engine.submit(request("r", 5, max_tokens=9), 0.0)
        engine.submit(request("later", 5, max_tokens=90), 0.0)
        while "r" not in record.ends:
            step(engine, record)
        return ledger.classes["default"].virtual

    alone, drafting = (
        served(lambda draft_row: None),
        served(lambda draft_row: wrong(3)(draft_row) if draft_row.request.id == "r" else None),
    )
    assert drafting == pytest.approx(alone + served_more(), rel=0.01)


def served_more() -> float:
    """Positions that three wrong drafts add to nine tokens, by the weight of the default class."""
    return float(5 * 3 + 2 + 1)


def test_drafts_keep_to_the_budget_and_leave_half_of_it_to_prompts():
    drafter = Drafting(right(30))
    engine, _ = hashing_engine(drafter=drafter, knobs=Knobs(batched_tokens=12))
    record, seen = Record(), plans(engine)
    engine.submit(request("r", 5, max_tokens=90), 0.0)
    step(engine, record, 2)
    assert rows(seen)[1] == [(12, 11)]
    engine.submit(request("next", 50, max_tokens=2), 0.0)
    step(engine, record)
    assert rows(seen)[2] == [(6, 5), (6, 0)]
    assert [load.budget for load in drafter.loads] == [11, 5]


def test_rows_of_one_token_come_before_those_with_drafts():
    engine, _ = hashing_engine(
        drafter=Drafting(lambda draft_row: right(2)(draft_row) if draft_row.request.id != "b" else None)
    )
    record, seen = Record(), plans(engine)
    for name in "abc":
        engine.submit(request(name, 5, max_tokens=20), 0.0)
    step(engine, record, 2)
    assert rows(seen)[1] == [(1, 0), (3, 2), (3, 2)]
    drain(engine, record)
    assert all(
        tokens == expected_tokens(request(name, 5).tokens, 0, 20, frozenset())
        for name, tokens in record.tokens.items()
    )


def test_step_times_see_drafted_positions():
    times = StepTimes()
    seen: list[tuple[int, int, int, bool]] = []
    observe = times.observe
    times.observe = lambda rows, tokens, contexts, seconds, drafted: (  # type: ignore[method-assign]
        seen.append((rows, tokens, contexts, drafted)),
        observe(rows, tokens, contexts, seconds, drafted),
    )[1]
    drafter = Drafting(right(3))
    engine, _ = hashing_engine(drafter=drafter, times=times)
    record = Record()
    engine.submit(request("r", 5, max_tokens=12), 0.0)
    step(engine, record, 4)
    reported = [(rows, drawn, drafted) for rows, drawn, _, drafted in drafter.steps]
    assert reported == [(1, 4, True), (1, 4, True)], "steps of decode rows only"
    drafts = [(1, 4, 5 + 6 + 7 + 8, True), (1, 4, 9 + 10 + 11 + 12, True)]
    assert seen == [(1, 5, 12, False), *drafts]


@pytest.mark.parametrize("overlap", [1, 3])
def test_with_overlap_a_step_with_drafts_is_committed_before_the_next_is_planned(overlap):
    drafter = Drafting(right(6))
    engine, _ = hashing_engine(drafter=drafter, overlap=overlap)
    record, seen = Record(), plans(engine)
    engine.submit(request("r", 5, max_tokens=30), 0.0)
    drain(engine, record)
    assert record.tokens["r"] == expected_tokens(request("r", 5).tokens, 0, 30, frozenset())
    # Its first token is not known when it is drafted for: the first of six is not verified, the others are.
    assert rows(seen)[1] == [(6, 5)]
    assert all(reported.accepted == reported.drafted for reported in record.of(Verified))
    assert len(seen) == 6


def test_with_overlap_a_proposal_that_begins_wrong_is_rejected():
    drafter = Drafting(lambda draft_row: [96, *right(3)(draft_row)[1:]])
    engine, _ = hashing_engine(drafter=drafter, overlap=1)
    record = Record()
    engine.submit(request("r", 5, max_tokens=30), 0.0)
    drain(engine, record)
    assert record.tokens["r"] == expected_tokens(request("r", 5).tokens, 0, 30, frozenset())


@pytest.mark.parametrize("moment", ["draft", "verified", "ended"])
def test_a_drafter_that_raises_is_not_asked_again(moment, monkeypatch):
    drafter = Drafting(right(3))

    def broken(*_: object) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(drafter, moment, broken)
    engine, _ = hashing_engine(drafter=drafter)
    record = Record()
    for name in "ab":
        engine.submit(request(name, 5, max_tokens=9), 0.0)
        drain(engine, record)
    assert record.of(DraftingFailed) == [DraftingFailed("RuntimeError: out of order")]
    assert {len(tokens) for tokens in record.tokens.values()} == {9}
    assert all(end.reason is FinishReason.LENGTH for (end,) in record.ends.values())


def test_too_few_proposals_count_as_a_failure():
    drafter = Drafting(right(3))
    drafter.draft = lambda draft_rows, load: []  # type: ignore[method-assign]
    engine, _ = hashing_engine(drafter=drafter)
    record = Record()
    engine.submit(request("r", 5, max_tokens=9), 0.0)
    drain(engine, record)
    assert len(record.of(DraftingFailed)) == 1
    assert len(record.tokens["r"]) == 9


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_request_may_end_while_its_drafts_are_in_flight(overlap):
    engine, runner = hashing_engine(drafter=Drafting(right(3)), overlap=overlap)
    record = Record()
    for name in "ab":
        engine.submit(request(name, 5, max_tokens=20), 0.0)
    step(engine, record, 2)
    plan = engine.scheduler.plan(0.0, engine.knobs)
    if plan.has_work:  # otherwise it is in flight already
        runner.launch(plan, 0.0)
    else:
        plan = engine._in_flight.popleft()
    engine.cancel("a", FinishReason.CANCELLED, 0.0)
    engine.check_consistency()
    engine.scheduler.commit(plan, runner.collect())
    drain(engine, record)
    engine.check_consistency()
    assert record.tokens["b"] == expected_tokens(request("b", 5).tokens, 0, 20, frozenset())
    assert record.ends["a"][0].reason is FinishReason.CANCELLED


def test_a_broken_off_step_with_drafts_is_planned_again():
    engine, runner = hashing_engine(
        drafter=Drafting(right(3)), queue=FairQueue(ShareLedger(CLASSES, {}), TenantQueue)
    )
    record, seen = Record(), plans(engine)
    engine.submit(request("r", 5, service_class="background", max_tokens=20), 0.0)
    runner.interrupts = lambda plan: bool(drafted(plan)) and plan.step % 2 == 0
    drain(engine, record)
    engine.check_consistency()
    assert any(drafted(plan) and plan.step % 2 == 0 for plan in seen)
    assert record.tokens["r"] == expected_tokens(request("r", 5).tokens, 0, 20, frozenset())


class Reasoned(Drafting):
    """As `Drafting`, with estimates and a reason; ``cut`` alone proposes nothing to verify."""

    cut = "not_worth"

    def draft(self, draft_rows: Sequence[DraftRow], load: StepLoad) -> Sequence[Proposal | None]:
        reported = [self.propose(draft_row) for draft_row in draft_rows]
        return [
            None if t is None else Proposal(tuple(t), (0.5,) * len(t), "test", self.cut) for t in reported
        ]


def test_events_say_what_was_expected_and_what_bounded_the_draft():
    engine, _ = hashing_engine(drafter=Reasoned(right(3)))
    record = Record()
    engine.submit(request("r", 5, max_tokens=5), 0.0)
    drain(engine, record)
    assert record.of(Verified) == [Verified("r", "test", 3, 3, 0.5 + 0.25 + 0.125, "not_worth")]
    assert not record.of(DraftedStep), "no times are known"


def test_a_declined_draft_is_reported_when_its_reason_changes():
    drafter = Reasoned(lambda draft_row: ())
    engine, _ = hashing_engine(drafter=drafter)
    record = Record()
    engine.submit(request("r", 5, max_tokens=20), 0.0)
    step(engine, record, 5)
    drafter.cut = "tpot"
    step(engine, record, 4)
    drafter.propose = right(1)
    step(engine, record, 2)
    drafter.propose = lambda draft_row: ()
    drain(engine, record)
    assert record.of(DraftDeclined) == [
        DraftDeclined("r", "test", "not_worth"),
        DraftDeclined("r", "test", "tpot"),
        DraftDeclined("r", "test", "tpot"),
    ]


def test_a_step_with_drafts_says_what_it_gained():
    times = StepTimes()
    for _ in range(40):
        times.observe(1, 1, 10, 0.011)
    for _ in range(40):
        times.observe(1, 5, 50, 0.015, drafted=True)
    engine, _ = hashing_engine(drafter=Reasoned(right(4)), times=times)
    record = Record()
    engine.submit(request("r", 5, max_tokens=6), 0.0)
    drain(engine, record)
    (gained,) = record.of(DraftedStep)
    assert gained.seconds == pytest.approx(0.015, rel=0.1)
    assert gained.without == pytest.approx(5 * 0.011, rel=0.1)
    assert gained.expected == pytest.approx((1 + 0.9375) * 0.011, rel=0.1)
