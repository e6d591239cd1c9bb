"""Checkpoints of recurrent states while KV blocks move between tiers."""

from __future__ import annotations

from headrace.core.engine import Engine
from headrace.core.events import Admitted, CheckpointDropped, Checkpointed, DropReason
from headrace.core.memory.lower_tier import Saved
from headrace.core.plan import Tier
from headrace.testing.engines import Record, drain, hashing_engine, make_checkpoints
from headrace.testing.hashing_runner import HashingRunner, expected_tokens
from tests.doubles.scenes import request

STORY = tuple(range(100, 120))


def scene(**settings) -> tuple[Engine, HashingRunner, Record]:
    given = {"num_blocks": 8, "max_model_len": 32, **settings}
    engine, runner = hashing_engine(**given, checkpoints=make_checkpoints(16))
    return engine, runner, Record()


def ask(engine: Engine, record: Record, name: str, tokens: tuple[int, ...], count: int = 1) -> int:
    """Run one request; how many of its tokens were cached."""
    engine.submit(request(name, tokens=tokens, max_tokens=count), 0.0)
    drain(engine, record)
    engine.check_consistency()
    assert record.tokens[name] == expected_tokens(tokens, 0, count, frozenset())
    return next(event.cached_tokens for event in record.of(Admitted) if event.request_id == name)


def test_a_checkpoint_outlives_its_block_on_the_device() -> None:
    engine, _, record = scene(host_blocks=20)
    ask(engine, record, "a", STORY)
    ask(engine, record, "x", tuple(range(30)))  # takes all blocks
    ask(engine, record, "y", tuple(range(30, 60)))
    assert ask(engine, record, "b", (*STORY[:18], 7, 7)) == 16
    assert ask(engine, record, "c", (*STORY[:18], 7, 7)) == 16


def test_a_checkpoint_is_dropped_with_its_block_in_the_last_tier() -> None:
    engine, _, record = scene(host_blocks=1)
    ask(engine, record, "a", STORY)
    for number in range(3):
        ask(engine, record, f"x{number}", tuple(range(30 * number, 30 * number + 30)))
    assert CheckpointDropped(DropReason.BLOCK) in record.events
    assert ask(engine, record, "b", STORY) == 0


def test_a_hit_fetches_no_block_behind_its_checkpoint() -> None:
    engine, runner, record = scene(host_blocks=20)
    ask(engine, record, "a", (*STORY, 1, 2))  # checkpoint behind 20
    ask(engine, record, "x", tuple(range(30)))
    ask(engine, record, "y", tuple(range(30, 60)))
    runner.computed_tokens = 0
    assert ask(engine, record, "b", (*STORY[:13], 9, 9, 9)) == 0
    assert runner.computed_tokens == 16


def test_checkpoints_of_an_earlier_process_are_adopted_with_their_blocks() -> None:
    engine, runner, record = scene(host_blocks=8, disk_blocks=20)
    ask(engine, record, "a", STORY, 5)
    saved = engine.save_cache(0.0)
    cells = {
        key: (blocks, runner.cells[cell]) for key, blocks, cell in engine.scheduler.pool.saved_checkpoints()
    }
    assert cells
    later, second, news = scene(host_blocks=8, disk_blocks=20)
    second.tiers[Tier.DISK][:] = [list(page) for page in runner.tiers[Tier.DISK]]
    later.adopt_cache(saved)
    pool = later.scheduler.pool
    assert pool.adopt_checkpoint(b"unknown", 3) is None
    for key, (blocks, state) in cells.items():
        cell = pool.adopt_checkpoint(key, blocks)
        assert cell is not None
        second.cells[cell] = state
        assert pool.adopt_checkpoint(key, blocks) is None, "it is there already"
    news.fold(later.take_events())
    assert len(news.of(Checkpointed)) == len(cells)
    assert ask(later, news, "b", (*STORY, *record.tokens["a"], 3)) == 24


def test_a_checkpoint_of_a_block_that_is_not_on_disk_is_not_adopted() -> None:
    engine, _, _ = scene(host_blocks=8, disk_blocks=20)
    engine.adopt_cache([Saved(0, b"p", b"k" * 32, (1, 2, 3, 4))])
    assert engine.scheduler.pool.adopt_checkpoint(b"k" * 32, 1) is not None
    assert engine.scheduler.pool.adopt_checkpoint(b"q" * 32, 1) is None
