import asyncio
import tracemalloc

import pytest

from headrace.core.ports import ValueTooLarge
from headrace.response_cache.stores.memory import MemoryStore

TAGS = ("*",)


def test_the_least_recently_used_go_when_the_bytes_are_spent():
    async def run():
        store = MemoryStore(20_000)
        keys = [bytes([i]) * 32 for i in range(14)]
        for key in keys[:8]:
            await store.put(key, b"v" * 1500, 60.0, TAGS)
        await store.get(keys[0])
        for key in keys[8:]:
            await store.put(key, b"v" * 1500, 60.0, TAGS)
        kept = [key for key in keys if await store.get(key) is not None]
        assert keys[0] in kept
        assert keys[1] not in kept
        assert keys[-1] in kept
        assert store.facts().nbytes <= 20_000
        assert store.facts().evictions == 14 - len(kept)

    asyncio.run(run())


def test_one_huge_value_does_not_push_out_the_others():
    async def run():
        store = MemoryStore(20_000)
        await store.put(b"a" * 32, b"v" * 1000, 60.0, TAGS)
        with pytest.raises(ValueTooLarge, match="the limit is 2,500"):
            await store.put(b"b" * 32, b"v" * 10_000, 60.0, TAGS)
        assert await store.get(b"b" * 32) is None
        assert await store.get(b"a" * 32) is not None

    asyncio.run(run())


def test_its_count_of_bytes_is_honest():
    async def run():
        store = MemoryStore(1 << 30)
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        for i in range(5000):
            await store.put(i.to_bytes(32, "big"), bytes(500 + i % 7), 60.0, (f"tenant:{i}", "*"))
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert 0.8 < grown / store.facts().nbytes < 1.1

    asyncio.run(run())


def test_what_has_ended_frees_its_bytes():
    async def run():
        now = [0.0]
        store = MemoryStore(1 << 20, lambda: now[0])
        await store.put(b"a" * 32, b"v", 10.0, TAGS)
        now[0] = 10.0
        assert await store.get(b"a" * 32) is None
        assert store.facts()[:2] == (0, 0)

    asyncio.run(run())
