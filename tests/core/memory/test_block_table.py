"""Requests over tiers below the device: who waits for the disk, how long, and what a preempted one comes back to."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from headrace.core.block_keys import chained_keys, root_key
from headrace.core.engine import Engine
from headrace.core.events import (
    AdmitReason,
    Admitted,
    Finished,
    Moved,
    MoveReason,
    Preempted,
    RestoreDeclined,
    TransferFailed,
)
from headrace.core.memory.block_table import (
    RESTORE_SECONDS,
    UNSET_RETENTION,
    BlockRetention,
    Fence,
    block_retention,
)
from headrace.core.memory.eviction import CostAwareEviction
from headrace.core.memory.restore import AlwaysRestore
from headrace.core.plan import Tier
from headrace.core.request import Retention
from headrace.testing.engines import Record, drain, hashing_engine
from headrace.testing.hashing_runner import HashingRunner, expected_tokens
from tests.doubles.scenes import request, skips, step

STORY = tuple(range(100, 117))  # four full blocks and a token


def scene(**settings) -> tuple[Engine, HashingRunner, Record]:
    """A pool of eight blocks of four tokens that has forgotten `STORY`, which lies below it."""
    engine, runner = hashing_engine(
        **{"num_blocks": 8, "max_model_len": 32, "host_blocks": 40, "max_num_seqs": 2} | settings
    )
    record = Record()
    engine.scheduler.pool.lower._max_writes = 8  # so small a host tier would let the disk have one at a time
    ask(engine, record, "first", STORY)
    for i in range(3):
        ask(engine, record, f"other{i}", tuple(range(1000 * i, 1000 * i + 25)))
    assert not engine.scheduler.pool.leading(_keys(engine))
    return engine, runner, record


def _keys(engine: Engine) -> list[bytes]:
    return chained_keys(root_key("", ""), STORY, 4)


def ask(engine: Engine, record: Record, name: str, tokens: Sequence[int], **fields) -> None:
    """Let one request run alone until it has ended."""
    engine.submit(request(name, tuple(tokens), max_tokens=3, **fields), 0.0)
    drain(engine, record)
    engine.check_consistency()
    assert record.tokens[name] == expected_tokens(tuple(tokens), 0, 3, frozenset())


def cached(record: Record, name: str) -> list[int]:
    return [event.cached_tokens for event in record.of(Admitted) if event.request_id == name]


def test_what_lies_in_the_host_tier_comes_within_the_step_that_starts_the_request():
    engine, _, record = scene()
    engine.submit(request("again", STORY, max_tokens=3), 0.0)
    step(engine, record)
    assert cached(record, "again") == [16]
    assert Moved(Tier.HOST, Tier.DEVICE, 4, 4000, MoveReason.RESTORED, "again") in record.events
    assert not skips(record, "again")
    drain(engine, record)
    assert record.tokens["again"] == expected_tokens(STORY, 0, 3, frozenset())


def on_disk(**settings) -> tuple[Engine, HashingRunner, Record]:
    """The same, but the host tier has forgotten it too."""
    return scene(**{"host_blocks": 8, "disk_blocks": 60} | settings)


def test_a_request_waits_for_the_disk_while_others_run():
    engine, runner, record = on_disk()
    runner.disk_steps = 6
    engine.submit(request("again", STORY, max_tokens=3), 0.0)
    engine.submit(request("fresh", 6, max_tokens=20), 0.0)
    for _ in range(4):
        step(engine, record)
    assert skips(record, "again") == ["restoring"]
    assert len(record.tokens["fresh"]) >= 3, "it does not wait for somebody else's blocks"
    drain(engine, record)
    assert cached(record, "again") == [16]
    assert record.tokens["again"] == expected_tokens(STORY, 0, 3, frozenset())


def test_with_nothing_else_to_do_the_engine_waits_for_the_disk_and_does_not_stall():
    engine, runner, record = on_disk()
    runner.disk_steps = 30
    ask(engine, record, "again", STORY)
    assert cached(record, "again") == [16]


def test_what_does_not_come_in_time_is_computed():
    engine, runner, record = on_disk()
    runner.disk_steps = 10_000
    engine.submit(request("again", STORY, max_tokens=3), 0.0)
    step(engine, record, 5, now=1.0)
    assert not cached(record, "again")
    step(engine, record, now=1.0 + RESTORE_SECONDS)
    assert cached(record, "again") == [0]
    drain(engine, record, 1.0 + RESTORE_SECONDS)
    assert record.tokens["again"] == expected_tokens(STORY, 0, 3, frozenset())


def test_what_cannot_be_read_is_computed():
    engine, runner, record = on_disk()
    runner.breaks = lambda move: move.source_tier is Tier.DISK
    ask(engine, record, "again", STORY)
    assert cached(record, "again") == [0]
    assert record.of(TransferFailed)


def test_a_request_that_is_cancelled_while_it_waits_leaves_nothing_behind():
    engine, runner, record = on_disk()
    runner.disk_steps = 5
    engine.submit(request("again", STORY, max_tokens=3), 0.0)
    step(engine, record)
    engine.cancel("again", "cancelled", 0.0)
    for i in range(4):
        ask(engine, record, f"later{i}", (7, i))
    assert all(move.target_tier is Tier.DISK for move in engine.scheduler.pool.lower._under_way)


def test_resetting_the_cache_reaches_every_tier():
    engine, _, record = on_disk()
    engine.reset_prefix_cache()
    ask(engine, record, "again", STORY)
    assert cached(record, "again") == [0]


class Never(AlwaysRestore):
    def choose(self, start: int, tiers: Sequence[Tier]) -> int:
        return 0


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize(("restore", "chosen"), [(AlwaysRestore, Moved), (Never, RestoreDeclined)])
def test_a_preempted_request_is_swapped_or_computed_again(restore, chosen, overlap):
    """Two answers outgrow the pool: one gives way, its blocks go down, and it comes back one way or the other."""
    engine, _ = hashing_engine(
        num_blocks=12, max_model_len=40, host_blocks=20, max_num_seqs=2, overlap=overlap, restore=restore()
    )
    record = Record()
    for name in ("a", "b"):
        engine.submit(request(name, 12, max_tokens=20), 0.0)
    drain(engine, record)
    engine.check_consistency()
    assert record.of(Preempted)
    (back,) = [event for event in record.of(Admitted) if event.reason is AdmitReason.RESUMED]
    mine = [e for e in record.of(chosen) if e.request_id == back.request_id]
    assert len(mine) == 1
    assert bool([e for e in record.of(Moved) if e.reason is MoveReason.RESTORED]) == (chosen is Moved)
    for name in ("a", "b"):
        (end,) = [event for event in record.of(Finished) if event.request_id == name]
        assert end.output_tokens == 20


def test_what_a_request_asked_to_be_kept_outlives_what_came_later():
    engine, _ = hashing_engine(num_blocks=16, max_model_len=32, eviction=CostAwareEviction(16))
    record = Record()
    ask(engine, record, "first", STORY, retention=(Retention(0, 16, 90),))
    for i in range(8):
        ask(engine, record, f"other{i}", tuple(range(1000 * i, 1000 * i + 17)))
    ask(engine, record, "again", STORY)
    ask(engine, record, "other0-again", tuple(range(17)))
    assert cached(record, "again") == [16]
    assert cached(record, "other0-again") == [0]


def test_blocks_of_a_waiting_request_outlive_later_used_ones():
    """One slot: while a long answer evicts block after block, the one who waits keeps its prefix."""
    engine, _ = hashing_engine(
        num_blocks=16, max_model_len=48, max_num_seqs=1, eviction=CostAwareEviction(16)
    )
    record = Record()
    ask(engine, record, "first", STORY)
    ask(engine, record, "other", tuple(range(1000, 1017)))
    engine.submit(request("long", 20, max_tokens=26), 0.0)
    step(engine, record)
    engine.submit(request("again", STORY, max_tokens=3), 0.0)
    drain(engine, record)
    ask(engine, record, "other-again", tuple(range(1000, 1017)))
    assert cached(record, "again") == [16]
    assert cached(record, "other-again")[0] < 16


def test_a_table_is_free_when_its_last_step_has_been_committed():
    fence = Fence()
    fence.hold([1, 2], until_step=4)
    fence.hold([3], until_step=5)
    assert fence.lift(3) == []
    assert fence.num_blocks == 3
    assert fence.lift(4) == [[1, 2]]
    assert fence.num_blocks == 1
    assert fence.lift(9) == [[3]]
    assert (fence.num_blocks, fence.tables) == (0, [])


def kept(*retention: Retention, tokens: int = 16, blocks: int = 5) -> list[BlockRetention]:
    return block_retention(request("r", tokens, retention=retention), 4, blocks)


def test_without_retention_every_block_has_the_default():
    assert kept() == [UNSET_RETENTION] * 5


def test_a_range_keeps_its_blocks_and_all_before_them():
    assert kept(Retention(8, 12, 80)) == [BlockRetention(80)] * 3 + [UNSET_RETENTION] * 2


def test_a_block_that_touches_the_range_belongs_to_it():
    assert kept(Retention(0, 5, 80)) == [BlockRetention(80)] * 2 + [UNSET_RETENTION] * 3
    assert kept(Retention(7, 8, 80)) == [BlockRetention(80)] * 2 + [UNSET_RETENTION] * 3


def test_the_answer_follows_the_end_of_the_prompt():
    assert kept(Retention(0, None, 5)) == [BlockRetention(5)] * 5
    assert kept(Retention(12, None, 90, 60.0)) == [BlockRetention(90, 60.0)] * 5


@pytest.mark.parametrize("end", [4, 8])
def test_what_comes_before_something_kept_cannot_be_given_up(end):
    assert kept(Retention(0, end, 5)) == [UNSET_RETENTION] * 5, "the rest has the default, and needs its head"


def test_higher_then_longer_wins():
    assert kept(Retention(0, 4, 80, 5.0), Retention(8, 12, 50), Retention(0, 4, 80, 9.0)) == [
        BlockRetention(80, 9.0),
        BlockRetention(50),
        BlockRetention(50),
        UNSET_RETENTION,
        UNSET_RETENTION,
    ]
    assert kept(Retention(0, 4, 80, 5.0), Retention(0, 4, 80))[0] == BlockRetention(80)


def test_a_range_beyond_the_prompt_means_nothing():
    assert kept(Retention(16, 40, 80)) == [UNSET_RETENTION] * 5


def test_fewer_blocks_than_the_prompt_has():
    assert kept(Retention(12, None, 80), blocks=2) == [UNSET_RETENTION] * 2, "its end is not there"
    assert kept(Retention(0, 8, 80), blocks=0) == []
