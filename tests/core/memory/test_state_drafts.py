"""Drafts of models with recurrent states: a state never passes a token that may be rejected."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from headrace.core.drafting.proposal import DraftRow, Proposal, StepLoad
from headrace.core.engine import Engine
from headrace.core.events import Admitted, Checkpointed, Preempted, Verified
from headrace.core.knobs import Knobs
from headrace.core.request import FinishReason
from headrace.testing.engines import Record, drain, hashing_engine, make_checkpoints
from headrace.testing.hashing_runner import VOCAB, HashingRunner, LyingDrafter, expected_tokens, hashed_truth
from tests.doubles.scenes import plans, request, step

STORY = tuple(range(100, 120))


class Right(LyingDrafter):
    """Proposes ``count`` tokens, of which the first ``right`` are right."""

    def __init__(self, count: int, right: int) -> None:
        super().__init__(hashed_truth, 0, VOCAB)
        self.count, self.right = count, right

    def draft(self, draft_rows: Sequence[DraftRow], load: StepLoad) -> Sequence[Proposal | None]:
        return [self._of(row) for row in draft_rows]

    def _of(self, row: DraftRow) -> Proposal:
        tokens = list(hashed_truth(row, self.count))
        tokens = [token if at < self.right else token + 1 for at, token in enumerate(tokens)]
        return Proposal(tuple(tokens), (0.5,) * len(tokens), "right")


def scene(drafter: LyingDrafter, cells: int = 8, **settings) -> tuple[Engine, HashingRunner, Record]:
    given = {"num_blocks": 64, **settings}
    engine, runner = hashing_engine(**given, drafter=drafter, checkpoints=make_checkpoints(cells))
    return engine, runner, Record()


def ask(engine: Engine, record: Record, name: str, tokens: tuple[int, ...], count: int) -> list[int]:
    engine.submit(request(name, tokens=tokens, max_tokens=count), 0.0)
    drain(engine, record)
    engine.check_consistency()
    assert record.tokens[name] == expected_tokens(tokens, 0, count, frozenset())
    return record.tokens[name]


@pytest.mark.parametrize("right", range(4))
@pytest.mark.parametrize("length", range(1, 10))
@pytest.mark.parametrize("cells", [0, 8])
def test_accepted_drafts_are_computed_once_more(right: int, length: int, cells: int) -> None:
    engine, _, record = scene(Right(3, right), cells)
    seen = plans(engine)
    ask(engine, record, "a", STORY[:length], 24)
    assert sum(each.accepted for each in record.of(Verified)) >= 4 * right
    rows = [(row, plan.ahead.get(i, 0)) for plan in seen for i, row in enumerate(plan.rows)]
    for (before, ahead), (row, _) in pairwise(rows):
        assert row.start == before.start + before.length - ahead, "a row does not begin at the state"
    assert all(ahead >= len(row.drafts) for row, ahead in rows)
    if not cells:  # no more than the drafts: nothing is saved
        assert all(ahead == len(row.drafts) for row, ahead in rows)


@pytest.mark.parametrize("length", range(1, 13))
def test_a_prompt_takes_no_step_for_its_checkpoint_unless_it_ends_at_a_block(length: int) -> None:
    engine, _, record = scene(Right(0, 0))
    seen = plans(engine)
    ask(engine, record, "a", STORY[:length], 1)
    assert [len(plan.rows) for plan in seen if plan.rows] == [1] * (1 + (length in (8, 12)))
    saved = [event.tokens for event in record.of(Checkpointed)]
    assert saved == [*([(length - 1) // 4 * 4] if length > 4 else []), *([length] if not length % 4 else [])]


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("count", range(6, 22))
def test_the_next_turn_continues_at_the_last_checkpoint_of_a_drafted_answer(overlap: int, count: int) -> None:
    engine, _, record = scene(Right(3, 2), overlap=overlap)
    answer = ask(engine, record, "a", STORY[:6], count)
    ask(engine, record, "b", (*STORY[:6], *answer, 1, 2, 3), 1)
    cached = next(event.cached_tokens for event in record.of(Admitted) if event.request_id == "b")
    computed = 6 + count - 1
    assert cached >= computed // 4 * 4 - 4, "at most a block less than without drafts"


def test_a_row_that_does_not_fit_in_a_step_is_computed_like_a_prompt() -> None:
    engine, _, record = scene(Right(3, 3), block_size=8, knobs=Knobs(batched_tokens=2))
    for name in "ab":
        engine.submit(request(name, tokens=(*STORY[:7], ord(name)), max_tokens=12), 0.0)
    drain(engine, record)
    for name in "ab":
        assert record.tokens[name] == expected_tokens((*STORY[:7], ord(name)), 0, 12, frozenset())


def test_a_drafted_request_restarts_from_a_checkpoint() -> None:
    engine, _, record = scene(Right(3, 2), num_blocks=6, max_num_seqs=2, max_model_len=24)
    for name in "ab":
        engine.submit(request(name, tokens=(*STORY[:6], ord(name)), max_tokens=14), 0.0)
    drain(engine, record)
    for name in "ab":
        assert record.tokens[name] == expected_tokens((*STORY[:6], ord(name)), 0, 14, frozenset())
    assert record.of(Preempted)


def test_a_cancelled_request_leaves_no_state_behind_its_drafts() -> None:
    engine, _, record = scene(Right(3, 0), block_size=4)
    engine.submit(request("a", tokens=STORY[:6], max_tokens=20), 0.0)
    step(engine, record, 3)
    engine.cancel("a", FinishReason.CANCELLED, 0.0)
    drain(engine, record)
    known = (*STORY[:6], *record.tokens["a"])
    ask(engine, record, "b", (*known, 1, 2, 3, 4, 5), 3)
