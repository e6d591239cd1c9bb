from __future__ import annotations

import pytest

from headrace.core.block_keys import chained_keys, root_key
from headrace.core.capacity import WindowGroups
from headrace.core.events import Admitted
from headrace.core.knobs import Knobs
from headrace.core.memory.block_pool import BlockPool
from headrace.core.memory.block_table import add_part, release_parts, share_parts
from headrace.core.memory.checkpoints import Checkpoints
from headrace.core.memory.eviction import LeastRecentlyUsed
from headrace.core.memory.prefix_hit import PrefixHit
from headrace.core.memory.window_blocks import FOUND_OFTEN, WindowBlocks
from headrace.testing.engines import Record, drain, hashing_engine
from headrace.testing.hashing_runner import expected_tokens
from tests.doubles.scenes import request

SIZE = 4
ROOT = root_key("", "")
GROUPS = WindowGroups(2, 6, 8)


def pool_of(num_blocks: int, groups: WindowGroups = GROUPS) -> tuple[BlockPool, WindowBlocks]:
    pool = BlockPool(num_blocks, SIZE, LeastRecentlyUsed(), lambda event: None, windows=groups)
    assert pool.windows is not None
    return pool, pool.windows


def fill(pool: BlockPool, windows: WindowBlocks, tokens: tuple[int, ...]) -> list[int]:
    """Allocate and register whole blocks with their parts."""
    table = pool.allocate(len(tokens) // SIZE)
    for block in table:
        add_part(pool, windows, block)
    pool.register_chain(table, ROOT, tokens, chained_keys(ROOT, tokens, SIZE), 0)
    return table


def match(pool: BlockPool, tokens: tuple[int, ...]) -> PrefixHit:
    return pool.match(ROOT, chained_keys(ROOT, tokens, SIZE), tokens, len(tokens))


@pytest.mark.parametrize(
    ("window", "missing", "usable"),
    [
        (1, {0, 1, 2, 3, 4}, 5),  # a token attends to itself only
        (2, {3}, 5),
        (2, {4}, 4),
        (6, {3}, 3),  # two blocks before the next position
        (6, {2}, 5),
        (6, {4}, 4),
        (6, {1, 4}, 4),
        (6, {2, 4}, 2),
        (6, {0, 2, 4}, 0),
        (99, set(), 5),
        (99, {0}, 0),
    ],
)
def test_a_prefix_ends_where_the_window_of_the_next_position_is_whole(
    window: int, missing: set[int], usable: int
) -> None:
    windows = WindowBlocks(WindowGroups(1, window, 8))
    for block in set(range(5)) - missing:
        windows.add(block, (block + 10,))
    assert windows.usable([0, 1, 2, 3, 4], SIZE) == usable


def test_parts_that_a_window_has_passed_are_evicted_before_cached_blocks_and_others_with_them() -> None:
    pool, windows = pool_of(9)
    table = fill(pool, windows, tuple(range(12)))
    release_parts(pool, windows, table[:1], ended=False)
    release_parts(pool, windows, table[1:], ended=True)
    pool.release(table)
    pool.check()
    assert (pool.num_free, pool.num_cached, windows.num_idle) == (9, 3, 6)
    taken = pool.allocate(2)
    assert table[0] not in windows
    assert pool.num_cached == 3
    assert len(match(pool, tuple(range(12))).blocks) == 3  # the window of the next position is whole
    taken += pool.allocate(3)  # the last block with its part
    assert (pool.num_cached, table[2] in windows, table[1] in windows) == (2, False, True)
    assert match(pool, tuple(range(12))) == PrefixHit((), 0, 0, beyond=2)  # its first block has no part
    pool.check()
    taken += pool.allocate(4)
    assert (pool.num_cached, pool.num_free, windows.num_idle) == (0, 0, 0)
    with pytest.raises(IndexError):
        pool.allocate(1)
    pool.release(taken)
    pool.check()


def test_a_part_that_was_found_often_is_evicted_with_its_block() -> None:
    pool, windows = pool_of(6)
    table = fill(pool, windows, tuple(range(8)))
    for _ in range(FOUND_OFTEN):
        share_parts(pool, windows, table[1:])
        release_parts(pool, windows, table[1:], ended=False)
    release_parts(pool, windows, table, ended=False)
    assert pool.num_free == 4
    pool.allocate(2)
    assert [block in windows for block in table] == [False, True]
    pool.allocate(2)  # the blocks are held, so nothing else is left
    assert [block in windows for block in table] == [False, False]
    assert pool.num_free == 0
    pool.check()


def test_a_block_without_a_part_is_replaced_by_an_equal_one_that_has_it() -> None:
    pool, windows = pool_of(12)
    tokens = tuple(range(8))
    old = fill(pool, windows, tokens)
    release_parts(pool, windows, old, ended=False)
    pool.release(old)
    pool.allocate(12 - pool.num_cached - 2)  # one part is left
    assert match(pool, tokens).blocks == ()
    pool.check()
    pool, windows = pool_of(12)
    old = fill(pool, windows, tokens)
    release_parts(pool, windows, old, ended=False)
    pool.release(old)
    held = pool.allocate(10)
    assert [block in windows for block in old] == [False, False]
    pool.release(held)
    new = fill(pool, windows, tokens)
    assert match(pool, tokens).blocks == tuple(new)
    assert pool.num_cached == 0
    pool.check()


def test_a_forgotten_cache_gives_all_blocks_back() -> None:
    pool, windows = pool_of(12)
    table = fill(pool, windows, tuple(range(8)))
    release_parts(pool, windows, table, ended=True)
    pool.reset()  # while the blocks are held
    pool.release(table)
    again = fill(pool, windows, tuple(range(8)))
    release_parts(pool, windows, again, ended=True)
    pool.release(again)
    pool.reset()
    assert (pool.num_free, pool.num_cached, windows.num_idle) == (12, 0, 0)
    pool.check()


def test_neither_lower_tiers_nor_states_beside_groups() -> None:
    states = Checkpoints(1, 0, LeastRecentlyUsed(), lambda event: None)
    with pytest.raises(ValueError, match="neither lower tiers nor recurrent states"):
        BlockPool(4, SIZE, LeastRecentlyUsed(), lambda event: None, None, states, GROUPS)


def test_a_sequence_holds_what_its_window_reaches_and_a_prompt_continues_from_it() -> None:
    windows = WindowGroups(2, 6, 8)
    engine, _ = hashing_engine(
        num_blocks=60, windows=windows, knobs=Knobs(batched_tokens=8), max_model_len=128
    )
    record, asked = Record(), request("a", tokens=64, max_tokens=20)
    engine.submit(asked, 0.0)
    held: list[int] = []
    for step in range(60):
        record.fold(engine.step(float(step)))
        engine.check_consistency()
        live = engine.scheduler.live.get("a")
        if live is not None and live.slot >= 0:
            held.append(live.window_end - live.window_first)
    assert max(held) <= windows.most_blocks(84, SIZE) // 2 < 84 // SIZE
    answer = record.tokens["a"]
    assert answer == expected_tokens(asked.tokens, 0, 20, frozenset(), windows=windows)
    again = request("b", tokens=(*asked.tokens, *answer, 5), max_tokens=4)
    engine.submit(again, 70.0)
    drain(engine, record, 70.0)
    admitted = record.of(Admitted)[-1]
    assert admitted.cached_tokens == 80
    assert record.tokens["b"] == expected_tokens(again.tokens, 0, 4, frozenset(), windows=windows)
