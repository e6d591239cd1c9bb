""""""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from headrace.core.block_keys import chained_key, chained_keys, root_key
from headrace.core.events import Event, Evicted, EvictReason, Moved, MoveReason
from headrace.core.memory.block_pool import CANDIDATES, BlockPool
from headrace.core.memory.content import ContentNotifier
from headrace.core.memory.eviction import LeastRecentlyUsed
from headrace.core.memory.prefix_hit import NO_HIT, PrefixHit
from headrace.testing.checks import make_request
from headrace.testing.engines import Record, drain, hashing_engine
from headrace.testing.hashing_runner import HashingRunner

ROOT = root_key("", "")
SIZE = 4


def pool_of(num_blocks: int, size: int = SIZE) -> tuple[BlockPool, list[Event]]:
    events: list[Event] = []
    return BlockPool(num_blocks, size, LeastRecentlyUsed(), events.append), events


def keys_of(tokens: tuple[int, ...], root: bytes = ROOT) -> list[bytes]:
    keys: list[bytes] = []
    for i in range(len(tokens) // SIZE):
        keys.append(chained_key(keys[-1] if keys else root, tokens[i * SIZE : (i + 1) * SIZE]))
    return keys


def fill(pool: BlockPool, tokens: tuple[int, ...], root: bytes = ROOT) -> list[int]:
    """Hold and register the blocks of ``tokens``, the last one in part if need be."""
    table = pool.allocate(-(-len(tokens) // SIZE))
    parent = root
    for i, block in enumerate(table):
        parent = pool.register(block, parent, tokens[i * SIZE : (i + 1) * SIZE])
    return table


def match(
    pool: BlockPool, tokens: tuple[int, ...], limit: int | None = None, root: bytes = ROOT
) -> PrefixHit:
    return pool.match(root, keys_of(tokens, root), tokens, len(tokens) if limit is None else limit)


# -- keys ----------------------------------------------------------------------------------------------


def test_a_key_covers_its_tokens_and_all_before_them():
    one, two = chained_key(ROOT, (1, 2, 3, 4)), chained_key(ROOT, (1, 2, 3, 5))
    assert one != two
    assert chained_key(one, (9, 9, 9, 9)) != chained_key(two, (9, 9, 9, 9))
    assert chained_key(ROOT, [1, 2, 3, 4]) == one
    assert chained_keys(ROOT, [1, 2, 3, 4, 9, 9, 9, 9, 5, 5], 4) == [one, chained_key(one, (9, 9, 9, 9))]


def test_roots_cannot_be_forged_by_moving_a_letter():
    roots = {root_key(salt, adapter) for salt, adapter in [("", ""), ("ab", ""), ("a", "b"), ("", "ab")]}
    assert len(roots) == 4


def test_large_token_ids_do_not_run_into_each_other():
    assert chained_key(ROOT, (1, 0)) != chained_key(ROOT, (1 << 32, 0)) != chained_key(ROOT, (0, 1))


# -- finding -------------------------------------------------------------------------------------------


def test_match_finds_whole_blocks_then_a_part_token_exact():
    pool, _ = pool_of(8)
    tokens = tuple(range(10))
    a, b, c = fill(pool, tokens)
    assert match(pool, tokens) == PrefixHit((a, b), c, 2)
    assert match(pool, (*tokens[:9], 77, 78)) == PrefixHit((a, b), c, 1)
    assert match(pool, (*tokens[:6], 77, 78)) == PrefixHit((a,), b, 2)
    assert match(pool, (7, *tokens[1:])) == NO_HIT
    assert match(pool, tokens).tokens(SIZE) == 10


@pytest.mark.parametrize("limit", range(12))
def test_match_never_exceeds_its_limit(limit):
    pool, _ = pool_of(8)
    tokens = tuple(range(12))
    table = fill(pool, tokens)
    hit = match(pool, tokens, limit)
    assert hit.tokens(SIZE) == limit
    assert hit.blocks == tuple(table[: limit // SIZE])


def test_a_part_is_found_among_the_latest_candidates_only():
    pool, _ = pool_of(64)
    for last in range(CANDIDATES + 1):
        fill(pool, (1, 2, last))
    assert match(pool, (1, 2, 0)).copied == 2, "the oldest is not compared any more"
    assert match(pool, (1, 2, 1)).copied == 3


def test_salt_and_adapter_part_the_cache():
    pool, _ = pool_of(16)
    tokens = tuple(range(7))
    fill(pool, tokens, root_key("a", ""))
    for other in (root_key("b", ""), root_key("", ""), root_key("a", "x"), root_key("", "a")):
        assert match(pool, tokens, root=other) == NO_HIT
    assert match(pool, tokens, root=root_key("a", "")).tokens(SIZE) == 7


def test_a_part_registered_first_gives_way_to_the_whole():
    pool, _ = pool_of(4)
    (block,) = pool.allocate(1)
    pool.register(block, ROOT, (1, 2))
    assert match(pool, (1, 2, 3, 4)) == PrefixHit((), block, 2)
    pool.register(block, ROOT, (1, 2, 3, 4))
    assert match(pool, (1, 2, 3, 4)) == PrefixHit((block,), 0, 0)
    pool.release([block])
    pool.check()
    assert pool.num_cached == 1


def test_of_two_equal_blocks_the_first_stays_findable():
    pool, _ = pool_of(4)
    first, second = fill(pool, (1, 2, 3, 4)), fill(pool, (1, 2, 3, 4))
    assert match(pool, (1, 2, 3, 4)).blocks == tuple(first)
    pool.release(second)
    assert pool.num_cached == 0, "the second has nothing that the first has not"
    pool.release(first)
    pool.check()


# -- taking, giving back, evicting ---------------------------------------------------------------------


def test_a_released_block_stays_findable_and_can_be_shared_again():
    pool, _ = pool_of(4)
    table = fill(pool, tuple(range(8)))
    pool.release(table)
    assert (pool.num_free, pool.num_cached) == (4, 2)
    hit = match(pool, tuple(range(8)))
    pool.share(hit.blocks)
    assert (pool.num_free, pool.num_cached) == (2, 0)
    assert [pool.references()[block] for block in table] == [1, 1]
    pool.share(hit.blocks)
    pool.release(table)
    assert pool.num_cached == 0
    pool.release(table)
    assert pool.num_cached == 2
    pool.check()


def test_blank_blocks_go_first_then_the_tail_of_what_was_used_longest_ago():
    pool, events = pool_of(6)
    old, new = fill(pool, tuple(range(8))), fill(pool, tuple(range(50, 58)))
    pool.release(old)
    pool.release(new)
    assert not events
    pool.allocate(2)
    assert not events, "two blocks were blank"
    taken = pool.allocate(4)
    assert taken == [old[1], old[0], new[1], new[0]]
    assert events == [Evicted(tuple(taken), EvictReason.ALLOCATION)]
    assert match(pool, tuple(range(8))) == NO_HIT


def test_use_makes_a_block_young_again():
    pool, _ = pool_of(4)
    old, new = fill(pool, tuple(range(4))), fill(pool, tuple(range(50, 54)))
    pool.release(old)
    pool.release(new)
    pool.share(old)
    pool.release(old)
    pool.allocate(2)
    assert pool.allocate(1) == new


def test_sharing_what_is_cached_for_ever_does_not_grow_the_books():
    pool, _ = pool_of(8)
    table = fill(pool, tuple(range(16)))
    pool.release(table)
    for _ in range(5000):
        pool.share(table)
        pool.release(table)
    assert pool._cached._entries < 100
    assert pool.allocate(8)[-1] == table[0], "the order of eviction has survived"


def test_the_heads_of_a_long_table_outlive_a_sweep_of_the_books():
    pool, _ = pool_of(256)
    table = fill(pool, tuple(range(1000)))
    pool.release(table)
    for _ in range(50):
        pool.share(table)
        pool.release(table)
    pool.check()
    assert pool.allocate(256)[6:] == table[::-1]


def test_idle_blocks_are_those_without_references():
    pool, _ = pool_of(4)
    table = fill(pool, tuple(range(8)))
    assert pool.references_of(table).count(0) == 0
    pool.release(table)
    assert pool.references_of(table).count(0) == len(table)
    pool.share(table[:1])
    assert pool.references_of(table).count(0) == len(table) - 1


def test_allocating_or_releasing_too_much_is_an_error():
    pool, _ = pool_of(2)
    with pytest.raises(IndexError, match="3 blocks requested, 2 free"):
        pool.allocate(3)
    (block,) = pool.allocate(1)
    pool.release([block])
    with pytest.raises(ValueError, match="has no reference"):
        pool.release([block])


@pytest.mark.parametrize(("num_blocks", "size"), [(0, 4), (4, 0)])
def test_a_pool_needs_blocks(num_blocks, size):
    with pytest.raises(ValueError, match="must be at least 1"):
        pool_of(num_blocks, size)


# -- promises and reset --------------------------------------------------------------------------------


def test_a_promise_ends_when_kept_or_when_each_maker_has_withdrawn():
    pool, _ = pool_of(4)
    (key,) = keys_of((1, 2, 3, 4))
    pool.announce([key])
    pool.announce([key])
    pool.withdraw([key])
    assert pool.is_announced(key)
    pool.withdraw([key])
    assert not pool.is_announced(key)
    pool.announce([key])
    fill(pool, (1, 2, 3, 4))
    assert not pool.is_announced(key)
    pool.announce([key])
    assert not pool.is_announced(key), "what can be found need not be promised"


def test_reset_forgets_all_and_leaves_held_blocks_to_their_holders():
    pool, events = pool_of(6)
    held, cached = fill(pool, tuple(range(8))), fill(pool, tuple(range(50, 54)))
    pool.release(cached)
    pool.reset()
    assert match(pool, tuple(range(8))) == match(pool, tuple(range(50, 54))) == NO_HIT
    assert events == [Evicted((cached[0],), EvictReason.RESET)]
    assert (pool.num_free, pool.num_cached) == (4, 0)
    pool.check()
    pool.release(held)
    assert (pool.num_free, pool.num_cached) == (6, 0)
    fill(pool, tuple(range(8)))
    assert match(pool, tuple(range(8))).tokens(SIZE) == 8
    pool.check()


def test_a_large_pool_makes_no_block_before_it_is_needed():
    pool, _ = pool_of(10**9)
    assert pool.num_free == pool.num_blocks == 10**9
    assert pool.allocate(2) == [0, 1]
    pool.release([1])
    assert pool.num_free == 10**9 - 1
    assert pool.allocate(2) == [1, 2]


def test_a_chain_begins_with_its_first_block_or_not_at_all():
    pool = BlockPool(8, SIZE, LeastRecentlyUsed(), lambda event: None)
    keys = chained_keys(ROOT, tuple(range(3 * SIZE)), SIZE)
    pool.announce(keys[1:])
    assert pool.leading(keys) == pool.leading([]) == 0
    pool.announce(keys[:1])
    assert pool.leading(keys) == 3


def test_retention_set_by_key_replaces_what_requests_asked_for():
    pool, _ = pool_of(8)
    first, second = tuple(range(8)), tuple(range(20, 28))
    tables = [fill(pool, first), fill(pool, second)]
    for block in tables[0]:
        pool.keep(block, 90, None)
    pool.release(tables[0])
    pool.retain([*keys_of(first), b"unknown"], 3)
    pool.retain(keys_of(second), 7)  # held: it counts when the block becomes idle
    pool.release(tables[1])
    assert {block.retention for block in pool.full_blocks() if block.id in tables[0]} == {3}
    assert {block.retention for block in pool.full_blocks() if block.id in tables[1]} == {7}
    assert all(block.seconds is None for block in pool.full_blocks())
    pool.check()


ROOTS = [root_key("", ""), root_key("tenant", "")]


class Mirror:
    """The cache as a listener knows it."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, tuple[bytes | None, tuple[int, ...]]] = {}

    def stored(self, parent: bytes | None, key: bytes, tokens: Sequence[int], block: int) -> None:
        assert key not in self.blocks, "a block is told twice"
        self.blocks[key] = (parent, tuple(tokens))

    def removed(self, key: bytes) -> None:
        del self.blocks[key]

    def cleared(self) -> None:
        self.blocks.clear()


def hold(pool: BlockPool, root: bytes, tokens: Sequence[int], random: Random) -> list[int]:
    """Hold and register the full blocks of ``tokens``, in pieces of random length."""
    keys = chained_keys(root, tokens, SIZE)
    hit = pool.match(root, keys, tokens, len(tokens))
    pool.share(hit.blocks)
    table = [*hit.blocks, *pool.allocate(len(keys) - len(hit.blocks))]
    at = len(hit.blocks)
    while at < len(keys):
        upto = random.randint(at + 1, len(keys))
        parent = keys[at - 1] if at else root
        pool.register_chain(table[at:upto], parent, tokens[at * SIZE : upto * SIZE], keys[at:upto], at)
        at = upto
    return table


@pytest.mark.parametrize("seed", range(5))
def test_a_listener_mirrors_the_pool(seed: int) -> None:
    random, mirror = Random(seed), Mirror()
    pool = BlockPool(40, SIZE, LeastRecentlyUsed(), lambda event: None)
    pool.notifier.listeners.append(mirror)
    tables: list[list[int]] = []
    for _ in range(1500):
        tokens = [random.randrange(2) for _ in range(SIZE * random.randint(1, 5))]
        if random.random() < 0.01:
            pool.reset()
        elif len(tables) < 6:
            tables.append(hold(pool, random.choice(ROOTS), tokens, random))
        else:
            pool.release(tables.pop(random.randrange(len(tables))))
        assert {block.key for block in pool.full_blocks()} == set(mirror.blocks)
    pool.check()
    for block in pool.full_blocks():
        assert block.key is not None
        parent, tokens_told = mirror.blocks[block.key]
        assert tokens_told == block.tokens
        assert (parent is None) == (block.parent in ROOTS)
        assert parent is None or parent == block.parent


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_restored_block_is_news_when_its_content_has_come(overlap: int) -> None:
    """The pool finds it at once, because moves run before rows; others read at any time."""
    engine, runner = hashing_engine(num_blocks=8, max_model_len=32, host_blocks=40, overlap=overlap)
    mirror, record = ReadingMirror(runner), Record()
    engine.scheduler.pool.notifier.listeners.append(mirror)
    story = tuple(range(100, 117))
    for number in range(4):
        engine.submit(make_request(f"story{number}", story, max_tokens=2), 0.0)
        drain(engine, record)
        engine.submit(make_request(f"other{number}", tuple(range(900 * number, 900 * number + 25))), 0.0)
        drain(engine, record)
    assert any(isinstance(event, Moved) and event.reason is MoveReason.RESTORED for event in record.events)
    assert mirror.read > 20


def test_a_restored_block_that_is_lost_before_its_content_came_is_no_news() -> None:
    news, mirror = ContentNotifier(), Mirror()
    news.listeners.append(mirror)
    with news.restoring():
        news.stored(None, b"a", (1,), 5)
        news.stored(b"a", b"b", (2,), 6)
    news.removed(b"b", 6)
    assert not mirror.blocks
    news.restored([5, 6, 7])
    assert mirror.blocks.keys() == {b"a"}
    news.removed(b"a", 5)
    with news.restoring():
        news.stored(None, b"a", (1,), 5)
    news.cleared()
    news.restored([5])
    assert not mirror.blocks


class ReadingMirror(Mirror):
    """Reads each block at the moment at which it hears of it, as a peer might."""

    def __init__(self, runner: HashingRunner) -> None:
        super().__init__()
        self._runner = runner
        self._contents: dict[bytes, list[int]] = {}
        self.read = 0

    def stored(self, parent: bytes | None, key: bytes, tokens: Sequence[int], block: int) -> None:
        super().stored(parent, key, tokens, block)
        content = list(self._runner.pages[block])
        assert self._contents.setdefault(key, content) == content, "the content has not come yet"
        self.read += 1
