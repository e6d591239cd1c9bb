from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.core.block_keys import chained_key, root_key
from headrace.core.events import Evicted
from headrace.core.memory.block_pool import BlockPool
from headrace.core.memory.eviction import (
    STALE,
    SWEEP_FACTOR,
    Block,
    CostAwareEviction,
    EvictionOrder,
    LeastRecentlyUsed,
)
from headrace.core.request import DEFAULT_RETENTION

ROOT = root_key("", "")


def pool_of(num_blocks: int, context_blocks: float = math.inf) -> tuple[BlockPool, list]:
    events: list = []
    return BlockPool(num_blocks, 2, CostAwareEviction(num_blocks, context_blocks), events.append), events


def keys_of(*tokens: int) -> list[bytes]:
    keys = [ROOT]
    for i in range(0, len(tokens) - 1, 2):
        keys.append(chained_key(keys[-1], tokens[i : i + 2]))
    return keys[1:]


def hold(pool: BlockPool, *tokens: int) -> list[int]:
    """Compute ``tokens``: a held table of registered blocks."""
    table, keys = pool.allocate(-(-len(tokens) // 2)), [ROOT, *keys_of(*tokens)]
    for i, block in enumerate(table):
        pool.register(block, keys[i], tokens[2 * i : 2 * i + 2])
    return table


def leave(pool: BlockPool, *tokens: int, retention: int | None = None, seconds: float | None = None) -> int:
    """Compute a prompt of one block and leave it to the cache."""
    (block,) = hold(pool, *tokens)
    if retention is not None:
        pool.keep(block, retention, seconds)
    pool.release([block])
    return block


def evicted(pool: BlockPool, events: list, count: int) -> list[int]:
    """The blocks that go when so many are needed, in their order."""
    events.clear()
    pool.release(pool.allocate(count))
    pool.check()
    return [block for event in events if isinstance(event, Evicted) for block in event.blocks]


# -- the order: heap, stamps, time ---------------------------------------------------------------------


def idle(number: int) -> Block:
    block = Block(number)
    block.tokens = (number,)
    return block


def test_the_order_gives_back_each_member_once_lowest_first():
    order = EvictionOrder(LeastRecentlyUsed())
    blocks = [idle(i) for i in range(5)]
    for block in blocks:
        order.add(block)
    order.discard(blocks[1])
    assert blocks[1] not in order
    assert len(order) == 4
    assert [block.id for _ in range(2) for block in order.pop(2)] == [0, 2, 3, 4]
    with pytest.raises(IndexError):
        order.pop(1)


@pytest.fixture(
    params=[(STALE, SWEEP_FACTOR), (0, SWEEP_FACTOR), (0, 1)], ids=["unswept", "swept", "always sweeping"]
)
def sweeping(request, monkeypatch):
    stale, swept = request.param
    monkeypatch.setattr("headrace.core.memory.eviction.STALE", stale)
    monkeypatch.setattr("headrace.core.memory.eviction.SWEEP_FACTOR", swept)


@pytest.mark.usefixtures("sweeping")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_however_many_are_taken_out_at_once_they_come_in_one_order(data: st.DataObject):
    class ByRetention:
        def priority(self, block: Block) -> float:
            return block.retention

    order = EvictionOrder(ByRetention())
    idle_ones: list[Block] = []
    retentions = st.integers(0, 5)
    for number in range(data.draw(st.integers(1, 12))):
        blocks = [idle(100 * number + i) for i in range(data.draw(st.integers(1, 4)))]
        for block in blocks:
            block.retention = data.draw(retentions)
        order.add_all(blocks)
        idle_ones += blocks
        for changed in data.draw(st.lists(st.sampled_from(idle_ones), unique_by=id, max_size=6)):
            if data.draw(st.booleans()):
                order.discard(changed)
                idle_ones.remove(changed)
            else:
                changed.retention = data.draw(retentions)
                order.update([changed])
        idle_ones.sort(key=lambda block: (block.rank, block.stamp, block.used))
        count = data.draw(st.integers(0, len(idle_ones)))
        expected, idle_ones = idle_ones[:count], idle_ones[count:]
        assert order.pop(count) == expected
        assert len(order) == len(idle_ones)
        if not idle_ones:
            break


def test_what_changes_moves_and_what_is_not_idle_does_not_come_in():
    class ByRetention:
        def priority(self, block: Block) -> float:
            return block.retention

    order = EvictionOrder(ByRetention())
    blocks = [idle(i) for i in range(3)]
    for block in blocks:
        order.add(block)
    blocks[0].retention = 99
    order.update([blocks[0]])
    order.discard(blocks[1])
    order.update([blocks[1]])
    assert len(order) == 2
    assert [block.id for block in order.pop(2)] == [2, 0]


def test_changing_for_ever_does_not_grow_the_books():
    order = EvictionOrder(LeastRecentlyUsed())
    blocks = [idle(i) for i in range(4)]
    for turn in range(2000):
        for block in blocks:
            block.seconds = 1.0 + turn
            order.add(block)
            order.update([block])
            order.discard(block)
    assert order._entries <= 2 * STALE
    assert len(order._runs) + len(order._unswept) <= 2 * STALE
    assert len(order._ends) <= 2 * STALE


class Watched(Block):
    """Counts how often an order looks whether it is still in its run."""

    looks = 0

    @property
    def stamp(self) -> int:
        Watched.looks += 1
        return self._stamp

    @stamp.setter
    def stamp(self, stamp: int) -> None:
        self._stamp = stamp


def test_no_change_waits_for_a_sweep_of_everything():
    order = EvictionOrder(LeastRecentlyUsed())
    blocks = [Watched(i) for i in range(3000)]
    for block in blocks:
        order.add(block)
    worst = entries = 0
    for _ in range(5):
        for block in blocks:
            Watched.looks = 0
            order.update([block])
            worst, entries = max(worst, Watched.looks), max(entries, order._entries)
    assert worst <= 2 * SWEEP_FACTOR
    assert entries <= 3 * len(blocks) + STALE
    assert order.pop(len(blocks)) == blocks


# -- retention -----------------------------------------------------------------------------------------


def test_low_retention_goes_first_and_high_last():
    pool, events = pool_of(4)
    high = leave(pool, 1, 1, retention=80)
    plain = leave(pool, 2, 2)
    low = leave(pool, 3, 3, retention=10)
    newest = leave(pool, 4, 4)
    assert evicted(pool, events, 4) == [low, plain, newest, high]


def test_retention_ends_so_many_seconds_after_the_last_use():
    pool, events = pool_of(2)
    pool.advance(100.0)
    kept = leave(pool, 1, 1, retention=80, seconds=5.0)
    pool.advance(104.0)
    pool.share([kept])
    pool.advance(120.0)
    pool.release([kept])  # in use until now: the five seconds begin here
    plain = leave(pool, 2, 2)
    pool.advance(124.9)
    pool.share([plain])
    pool.release([plain])
    assert evicted(pool, events, 1) == [plain]
    assert leave(pool, 3, 3) == plain
    pool.advance(125.0)
    assert evicted(pool, events, 1) == [kept], "its time is over, and it is the older one"


def test_a_retention_does_not_end_after_an_earlier_use():
    pool, events = pool_of(2)
    pool.advance(100.0)
    kept = leave(pool, 1, 1, retention=80, seconds=5.0)
    pool.advance(103.0)
    plain = leave(pool, 2, 2)
    for block in (kept, plain):
        pool.share([block])
        pool.release([block])
    pool.advance(106.0)
    assert evicted(pool, events, 1) == [plain]


def test_a_low_retention_ends_too():
    pool, events = pool_of(2)
    older = leave(pool, 1, 1)
    low = leave(pool, 2, 2, retention=0, seconds=1.0)
    pool.advance(2.0)
    assert evicted(pool, events, 2) == [older, low]


@pytest.mark.parametrize(
    ("asked", "settled"),
    [
        ([(10, None)], (10, None)),
        ([(10, None), (80, 5.0)], (80, 5.0)),
        ([(80, 5.0), (10, None)], (80, 5.0)),
        ([(80, 5.0), (80, 9.0)], (80, 9.0)),
        ([(80, 9.0), (80, 5.0)], (80, 9.0)),
        ([(80, 5.0), (80, None)], (80, None)),
        ([(80, None), (80, 5.0)], (80, None)),
    ],
)
def test_of_several_retentions_the_higher_and_longer_counts(asked, settled):
    block = Block(0)
    assert (block.retention, block.seconds) == (DEFAULT_RETENTION, None)
    for retention, seconds in asked:
        block.keep(retention, seconds)
    assert (block.retention, block.seconds) == settled


def test_new_content_does_not_inherit_what_was_asked_for_the_old():
    pool, _events = pool_of(1)
    leave(pool, 1, 1, retention=80)
    block = leave(pool, 2, 2)
    assert pool._blocks[block].retention == DEFAULT_RETENTION


# -- wanted --------------------------------------------------------------------------------------------


def test_blocks_of_a_waiting_request_are_evicted_last():
    pool, events = pool_of(3)
    wanted, other, newest = leave(pool, 1, 1), leave(pool, 2, 2), leave(pool, 3, 3)
    pool.want(keys_of(1, 1))
    assert evicted(pool, events, 2) == [other, newest]
    pool.check()
    pool.unwant(keys_of(1, 1))
    leave(pool, 2, 2), leave(pool, 3, 3)
    assert evicted(pool, events, 1) == [wanted]


def test_wanted_as_long_as_one_of_several_waits():
    pool, events = pool_of(2)
    _wanted, other = leave(pool, 1, 1), leave(pool, 2, 2)
    pool.want(keys_of(1, 1))
    pool.want(keys_of(1, 1))
    pool.unwant(keys_of(1, 1))
    assert evicted(pool, events, 1) == [other]
    pool.unwant(keys_of(1, 1))
    assert not pool._wanted


def test_wanted_before_it_is_computed():
    pool, events = pool_of(2)
    pool.want(keys_of(1, 1))
    wanted, other = leave(pool, 1, 1), leave(pool, 2, 2)
    assert evicted(pool, events, 2) == [other, wanted]


def test_retention_counts_more_than_being_wanted():
    pool, events = pool_of(2)
    kept, wanted = leave(pool, 1, 1, retention=80), leave(pool, 2, 2)
    pool.want(keys_of(2, 2))
    assert evicted(pool, events, 2) == [wanted, kept]


# -- age against cost ----------------------------------------------------------------------------------


def test_what_was_found_again_stays_for_a_turnover_longer():
    pool, events = pool_of(4)
    found = leave(pool, 1, 1)
    pool.share([found])
    pool.release([found])
    rest = [leave(pool, i, i) for i in range(2, 5)]
    assert evicted(pool, events, 3) == rest
    for i in range(12, 15):
        leave(pool, i, i)
    assert evicted(pool, events, 1) == [found], "only for one turnover"


def test_a_part_goes_before_an_older_whole():
    pool, events = pool_of(2)
    whole, part = leave(pool, 1, 1), leave(pool, 2)
    assert evicted(pool, events, 2) == [part, whole]


@pytest.mark.parametrize("context", [0.01, 1.0, 4.0, 1e9])
def test_no_head_goes_before_its_tail(context):
    pool, events = pool_of(32, context / 2)
    long, short = hold(pool, *range(30)), hold(pool, *range(100, 110))
    pool.release(long)
    pool.release(short)
    pool.share(long[:3])  # a shorter one that shares the head
    pool.release(long[:3])
    order = evicted(pool, events, 32)
    assert [block for block in order if block in long] == long[::-1]
    assert [block for block in order if block in short] == short[::-1]


def test_of_two_chains_the_one_that_costs_more_stays_where_context_costs():
    for context, first in ((1e9, "long"), (1.0, "short")):
        pool, events = pool_of(24, context / 2)
        chains = {"long": hold(pool, *range(40)), "short": hold(pool, 100, 101)}
        pool.release(chains["long"])
        pool.release(chains["short"])
        pool.allocate(3)
        assert evicted(pool, events, 1) == [chains[first][-1]]
