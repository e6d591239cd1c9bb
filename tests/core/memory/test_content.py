"""What a content listener hears is what the prefix cache of the device holds, after any history."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from headrace.core.block_keys import chained_keys, root_key
from headrace.core.memory.block_pool import BlockPool
from headrace.core.memory.eviction import LeastRecentlyUsed

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
    pool.news.listeners.append(mirror)
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
