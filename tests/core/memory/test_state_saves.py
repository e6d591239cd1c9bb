"""Where checkpoints of recurrent states are made, and what requests save by them."""

from __future__ import annotations

import pytest

from headrace.core.engine import Engine
from headrace.core.events import (
    Admitted,
    Checkpointed,
    Chunked,
    ChunkReason,
    Preempted,
    PreemptReason,
    Recomputed,
    RecomputeReason,
    StateRestored,
)
from headrace.core.knobs import Knobs
from headrace.core.plan import Tier
from headrace.core.queueing.fair_queue import FairQueue, TenantQueue
from headrace.core.request import FinishReason, Retention
from headrace.core.tenancy.fair_share import ShareLedger
from headrace.core.tenancy.tenants import CLASSES
from headrace.testing.engines import Record, drain, hashing_engine, make_checkpoints
from headrace.testing.hashing_runner import HashingRunner, expected_tokens
from tests.doubles.scenes import request, skips, step

STORY = tuple(range(100, 120))  # five full blocks of four tokens


def scene(cells: int = 8, interval: int = 0, **settings) -> tuple[Engine, HashingRunner, Record]:
    engine, runner = hashing_engine(
        **{"num_blocks": 32, **settings}, checkpoints=make_checkpoints(cells, interval)
    )
    return engine, runner, Record()


def ask(engine: Engine, record: Record, name: str, tokens: tuple[int, ...], count: int = 1) -> list[int]:
    """Run one request to its end; its output, which must be that of a cold run."""
    engine.submit(request(name, tokens=tokens, max_tokens=count), 0.0)
    drain(engine, record)
    engine.check_consistency()
    answer = record.tokens[name]
    assert answer == expected_tokens(tokens, 0, count, frozenset())
    return answer


def cached(record: Record, name: str) -> int:
    return next(event.cached_tokens for event in record.of(Admitted) if event.request_id == name)


def saved(record: Record, name: str) -> list[int]:
    return [event.tokens for event in record.of(Checkpointed) if event.request_id == name]


@pytest.mark.parametrize("length", range(1, 14))
@pytest.mark.parametrize("more", range(6))
@pytest.mark.parametrize("overlap", [0, 1])
def test_a_prompt_continues_at_the_last_block_boundary(length: int, more: int, overlap: int) -> None:
    engine, runner, record = scene(overlap=overlap)
    ask(engine, record, "a", STORY[:length])
    runner.computed_tokens = 0
    ask(engine, record, "b", STORY[:length] + (7,) * more)
    assert cached(record, "b") == (length if more else length - 1) // 4 * 4
    assert runner.computed_tokens == length + more - cached(record, "b")


@pytest.mark.parametrize("count", range(1, 14))
@pytest.mark.parametrize("overlap", [0, 1])
def test_the_next_turn_continues_at_the_end_of_the_answer(count: int, overlap: int) -> None:
    engine, _, record = scene(overlap=overlap)
    answer = ask(engine, record, "a", STORY[:6], count)
    ask(engine, record, "b", (*STORY[:6], *answer, 1, 2, 3))
    computed = 6 + count - 1  # the last token of an answer is never computed
    assert computed // 4 * 4 - 4 * (overlap and not computed % 4) <= cached(record, "b") <= computed // 4 * 4


def test_only_the_last_checkpoint_of_an_answer_is_kept() -> None:
    engine, _, record = scene()
    ask(engine, record, "a", STORY[:6], 16)
    assert saved(record, "a") == [4, 8, 12, 16, 20]
    assert engine.scheduler.pool.checkpoints is not None
    assert len(engine.scheduler.pool.checkpoints) == 2


def test_a_checkpoint_is_made_where_a_prompt_leaves_a_cached_one() -> None:
    engine, _, record = scene()
    ask(engine, record, "a", (*STORY, 1, 2, 3, 4, 5))
    ask(engine, record, "b", (*STORY, 9, 9, 9, 9, 9))
    assert (cached(record, "b"), saved(record, "b")) == (0, [20, 24])
    assert record.of(Recomputed) == [Recomputed("b", 20, RecomputeReason.NO_CHECKPOINT)]
    ask(engine, record, "c", (*STORY, 8, 8, 8))
    assert cached(record, "c") == 20


def test_a_checkpoint_is_made_where_a_waiting_request_leaves_the_prompt() -> None:
    engine, runner, record = scene()
    for name, last in (("a", 1), ("b", 2), ("c", 3)):
        engine.submit(request(name, tokens=(*STORY, *(last,) * 5), max_tokens=1), 0.0)
    drain(engine, record)
    assert saved(record, "a") == [20, 24]
    assert [cached(record, name) for name in "abc"] == [0, 20, 20]
    assert runner.computed_tokens == 20 + 3 * 5
    assert "prefix_in_flight" in skips(record, "b")


def test_a_long_prompt_has_checkpoints_at_intervals() -> None:
    engine, _, record = scene(interval=8, num_blocks=64, cells=16)
    ask(engine, record, "a", tuple(range(30)))
    assert saved(record, "a") == [8, 16, 24, 28]
    ask(engine, record, "b", (*range(19), 9, 9))
    assert cached(record, "b") == 16
    few, _, rare = scene(interval=8, num_blocks=64, cells=4)
    ask(few, rare, "a", tuple(range(30)))
    assert saved(rare, "a") == [16, 28]


def test_chunks_end_at_checkpoints_and_say_so() -> None:
    engine, _, record = scene(knobs=Knobs(batched_tokens=7))
    ask(engine, record, "a", STORY[:11])
    chunks = [(event.start, event.length, event.reason) for event in record.of(Chunked)]
    assert chunks == [
        (0, 7, ChunkReason.BUDGET),
        (7, 4, ChunkReason.REST),  # its state stays before the last three
    ]
    few, _, rare = scene(knobs=Knobs(batched_tokens=7), interval=4, cells=16)
    ask(few, rare, "a", STORY[:13])
    chunks = [(event.start, event.length, event.reason) for event in rare.of(Chunked)]
    assert chunks == [
        (0, 4, ChunkReason.CHECKPOINT),
        (4, 4, ChunkReason.CHECKPOINT),
        (8, 5, ChunkReason.REST),
    ]


def test_an_evicted_checkpoint_is_named() -> None:
    engine, _, record = scene(cells=1)
    ask(engine, record, "a", STORY[:9])
    ask(engine, record, "b", tuple(range(9)))
    ask(engine, record, "c", STORY[:9])
    assert record.of(Recomputed) == [Recomputed("c", 8, RecomputeReason.EVICTED)]
    ask(engine, record, "d", STORY[:20])
    assert cached(record, "d") == 8


def test_without_cells_nothing_is_reused() -> None:
    engine, runner, record = scene(cells=0)
    ask(engine, record, "a", STORY, 5)
    ask(engine, record, "b", STORY, 5)
    assert cached(record, "b") == 0
    assert not record.of(Checkpointed)
    assert runner.computed_tokens == 2 * (20 + 4)


def test_a_preempted_request_restarts_from_its_last_checkpoint() -> None:
    engine, _, record = scene(num_blocks=6, max_num_seqs=2, max_model_len=24)
    for name in "ab":
        engine.submit(request(name, tokens=(*STORY[:6], ord(name)), max_tokens=14), 0.0)
    drain(engine, record)
    for name in "ab":
        assert record.tokens[name] == expected_tokens((*STORY[:6], ord(name)), 0, 14, frozenset())
    resumed = [event for event in record.of(Admitted) if event.reason == "resumed"]
    assert resumed
    assert all(event.cached_tokens >= 4 for event in resumed)


def test_a_failed_row_leaves_no_checkpoint() -> None:
    engine, runner, record = scene(overlap=1)
    runner.poison.add("a")
    engine.submit(request("a", tokens=STORY[:9], max_tokens=1), 0.0)
    drain(engine, record)
    assert record.ends["a"][0].reason is FinishReason.FAILED
    assert not record.of(Checkpointed)
    engine.check_consistency()
    ask(engine, record, "b", STORY[:9])
    assert cached(record, "b") == 0


def test_a_request_that_is_cancelled_with_a_row_in_flight_saves_no_state() -> None:
    engine, _, record = scene(overlap=1, knobs=Knobs(batched_tokens=8))
    engine.submit(request("a", tokens=STORY, max_tokens=1), 0.0)
    step(engine, record, 2)  # [0, 8) has been committed, [8, 16) is in flight: the slot stands behind 16
    assert engine.scheduler.live["a"].computed == 8
    engine.cancel("a", FinishReason.CANCELLED, 0.0)
    drain(engine, record)
    ask(engine, record, "b", (*STORY[:8], 7, 7, 7))
    ask(engine, record, "c", (*STORY[:16], 7, 7, 7))
    assert cached(record, "b") == 0


def test_a_cell_of_a_failed_row_belongs_to_the_next_request_of_its_slot() -> None:
    engine, runner, record = scene(cells=1, overlap=1, max_num_seqs=1)
    engine.submit(request("a", tokens=STORY[:6], max_tokens=9), 0.0)
    engine.submit(request("b", tokens=(*range(9), 5), max_tokens=1), 0.0)
    while engine.scheduler.live["a"].planned < 7:
        step(engine, record)
    runner.poison.add(
        "a"
    )  # the state behind 8 is saved before it is known that the row up to there has failed
    drain(engine, record)
    ask(engine, record, "c", (*range(9), 5, 6))
    assert cached(record, "c") == 8


@pytest.mark.parametrize("cells", [1, 2])
def test_making_room_keeps_the_checkpoint_that_the_next_request_starts_from(cells: int) -> None:
    queue = FairQueue(ShareLedger(CLASSES, {}), TenantQueue)
    engine, _, record = scene(cells=cells, num_blocks=4, max_model_len=16, queue=queue)
    ask(engine, record, "a", STORY[:9])
    engine.submit(request("idle", tokens=(1, 2, 3), max_tokens=9, service_class="background"), 0.0)
    step(engine, record, 2)  # it stands behind its first block, whose state is not saved yet
    assert engine.scheduler.live["idle"].computed == 4
    ask(engine, record, "b", STORY[:13])  # it takes the block of the paused request, which leaves its state
    assert [event.reason for event in record.of(Preempted)] == [PreemptReason.YIELD]
    assert cached(record, "b") == 8


def test_a_state_is_saved_before_another_sequence_takes_its_slot() -> None:
    engine, _, record = scene(max_num_seqs=1)
    engine.submit(request("a", tokens=STORY[:5], max_tokens=4), 0.0)  # ends at a block boundary
    engine.submit(request("b", tokens=(1, 2, 3), max_tokens=4), 0.0)
    drain(engine, record)
    ask(engine, record, "c", (*STORY[:5], *record.tokens["a"], 5))
    assert cached(record, "c") == 8


def test_a_state_is_saved_before_another_one_is_restored_to_its_slot() -> None:
    engine, _, record = scene(max_num_seqs=1)
    ask(engine, record, "x", (*range(9), 5))
    engine.submit(request("a", tokens=STORY[:5], max_tokens=4), 0.0)  # ends at a block boundary
    engine.submit(request("b", tokens=(*range(9), 6), max_tokens=1), 0.0)
    drain(engine, record)
    assert cached(record, "b") == 8
    ask(engine, record, "c", (*STORY[:5], *record.tokens["a"], 5))
    assert cached(record, "c") == 8


def test_a_step_that_was_interrupted_saves_no_state() -> None:
    queue = FairQueue(ShareLedger(CLASSES, {}), TenantQueue)
    engine, runner, record = scene(knobs=Knobs(batched_tokens=6), queue=queue)
    runner.interrupts = lambda plan: plan.rows[0].start == 6
    engine.submit(request("idle", tokens=STORY[:11], max_tokens=1, service_class="background"), 0.0)
    step(engine, record, 2)  # [0, 6) is computed; [6, 8), up to a checkpoint, is interrupted
    assert engine.scheduler.live["idle"].planned == 6
    runner.interrupts = lambda plan: False
    step(engine, record)
    engine.cancel("idle", FinishReason.CANCELLED, 0.0)
    drain(engine, record)
    ask(engine, record, "b", (*STORY[:4], 7, 7, 7))
    ask(engine, record, "c", (*STORY[:8], 7, 7, 7))
    assert (cached(record, "b"), cached(record, "c")) == (0, 8)


def test_checkpoints_have_the_retention_of_their_request() -> None:
    engine, _, record = scene(cells=2)
    kept = request("a", tokens=STORY[:9], max_tokens=1, retention=(Retention(0, None, 90),))
    engine.submit(kept, 0.0)
    drain(engine, record)
    for number in range(4):
        ask(engine, record, f"x{number}", (number,) * 9)
    ask(engine, record, "b", STORY[:9])
    assert cached(record, "b") == 8


def test_fresh_ends_of_answers_outlive_ends_of_prompts() -> None:
    engine, _, record = scene(cells=4, num_blocks=256)
    sessions = {number: tuple(range(number * 100, number * 100 + 10)) for number in range(3)}
    for turn in range(4):
        for number, history in sessions.items():
            name = f"{number}.{turn}"
            answer = ask(engine, record, name, history, 7)
            sessions[number] = (*history, *answer, turn, turn)
            if turn:
                assert cached(record, name) == (len(history) - 3) // 4 * 4
    assert len(record.of(StateRestored)) == 9


def test_a_reset_forgets_all_checkpoints() -> None:
    engine, _, record = scene()
    ask(engine, record, "a", STORY[:9])
    engine.reset_prefix_cache()
    engine.check_consistency()
    ask(engine, record, "b", STORY[:9])
    assert cached(record, "b") == 0


def test_moves_of_states_name_slots_and_cells() -> None:
    assert [tier for tier in Tier if tier.holds_states] == [Tier.SLOT, Tier.CHECKPOINT]
