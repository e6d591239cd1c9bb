"""What a content listener hears is what the prefix cache of the device holds, after any history."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from headrace.core.block_keys import chained_keys, root_key
from headrace.core.events import Moved, MoveReason
from headrace.core.memory.block_pool import BlockPool
from headrace.core.memory.content import ContentNotifier
from headrace.core.memory.eviction import LeastRecentlyUsed
from headrace.testing.engines import Record, drain, hashing_engine
from headrace.testing.hashing_runner import HashingRunner
from headrace.testing.requests import make_request

SIZE = 4
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
