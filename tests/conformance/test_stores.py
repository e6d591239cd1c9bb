"""What every store of answers must do."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from headrace.core.cache.response.tags import EVERYTHING
from headrace.serve.cache.stores.memcached import MemcachedStore
from headrace.serve.cache.stores.memory import MemoryStore
from headrace.serve.cache.stores.redis import RedisStore
from headrace.serve.cache.stores.sqlite import SQLiteStore

KINDS = ["memory", "sqlite", "redis", "memcached"]
KEYS = [bytes([i]) * 32 for i in range(4)]
A, B, BOTH = ("tag:a", EVERYTHING), ("tag:b", EVERYTHING), ("tag:a", "tag:b", EVERYTHING)


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def make(kind, request, tmp_path):
    """Opens a store; a second one sees what the first one keeps, but for the one in memory."""
    if kind == "memory":
        store = MemoryStore(1 << 20)
        return lambda: store
    if kind == "sqlite":
        return lambda: SQLiteStore(tmp_path / "answers.db", 1 << 24)
    if kind == "redis":
        port = request.getfixturevalue("redis_port")
        return lambda: RedisStore(f"redis://127.0.0.1:{port}/0")
    port = request.getfixturevalue("memcached_port")
    return lambda: MemcachedStore("127.0.0.1", port)


@asynccontextmanager
async def opened(make, count=1):
    async with AsyncExitStack() as stack:
        stores = []
        for _ in range(count):
            store = make()
            stack.push_async_callback(store.close)
            await store.versions()
            stores.append(store)
        await stores[0].clear(EVERYTHING)  # servers are shared by the tests
        for store in stores:
            await store.versions()
        yield stores


async def all_of(store):
    return [await store.get(key) for key in KEYS]


def test_what_is_put_is_got_until_it_is_deleted(make):
    async def run():
        async with opened(make) as (store,):
            assert await store.get(KEYS[0]) is None
            for value in (b"one", b"\0\xff\r\n" * 9, b""):
                await store.put(KEYS[0], value, 60.0, A)
                assert await store.get(KEYS[0]) == value
            await store.put(KEYS[1], b"x" * 500_000, 60.0, A)
            if store.name != "memory":  # where it would take too large a share
                assert await store.get(KEYS[1]) == b"x" * 500_000
            await store.delete(KEYS[0])
            await store.delete(KEYS[0])
            assert await store.get(KEYS[0]) is None

    asyncio.run(run())


def test_a_tag_is_cleared_and_its_version_raised(make, kind):
    async def run():
        async with opened(make) as (store,):
            before = await store.versions()
            for key, tags in zip(KEYS, (A, B, BOTH, ("tag", EVERYTHING)), strict=True):
                await store.put(key, b"v", 60.0, tags)
            await store.clear("tag:a")
            if kind == "memcached":  # it cannot delete by tag: its versions have to do
                assert (await store.versions())["tag:a"] == before.get("tag:a", 0) + 1
                return
            assert await all_of(store) == [None, b"v", None, b"v"]
            if kind != "memory":
                assert (await store.versions())["tag:a"] == before.get("tag:a", 0) + 1
                assert (await store.versions()).get("tag:b", 0) == before.get("tag:b", 0)

    asyncio.run(run())


def test_everything_is_cleared(make):
    async def run():
        async with opened(make) as (store,):
            for key in KEYS:
                await store.put(key, b"v", 60.0, A)
            await store.clear(EVERYTHING)
            await store.versions()
            assert await all_of(store) == [None] * 4

    asyncio.run(run())


def test_time_ends_a_value(make):
    async def run():
        async with opened(make) as (store,):
            seconds = 1.0 if store.name == "memcached" else 0.05
            await store.put(KEYS[0], b"v", seconds, A)
            await store.put(KEYS[1], b"v", 60.0, A)
            while await store.get(KEYS[0]) is not None:
                await asyncio.sleep(0.02)
            assert await store.get(KEYS[1]) == b"v"

    asyncio.run(run())


@pytest.mark.parametrize("kind", KINDS[1:], indirect=True)
def test_two_who_share_a_store_see_each_others_answers_and_clearings(make):
    async def run():
        async with opened(make, 2) as (one, other):
            await one.put(KEYS[0], b"v", 60.0, A)
            assert await other.get(KEYS[0]) == b"v"
            before = (await one.versions()).get("tag:a", 0)
            await other.clear("tag:a")
            assert (await one.versions())["tag:a"] == before + 1
            await asyncio.gather(*(each.clear("tag:b") for each in (one, other) * 3))
            assert (await one.versions())["tag:b"] >= 6

    asyncio.run(run())


@pytest.mark.parametrize("kind", KINDS[1:], indirect=True)
def test_versions_are_advanced_and_nothing_is_deleted(make):
    async def run():
        async with opened(make) as (store,):
            await store.clear("tag:a")
            before = await store.versions()
            await store.put(KEYS[0], b"v", 60.0, A)
            await store.advance({"tag:a": 3, "tag:é": 2})
            after = await store.versions()
            assert after["tag:a"] == before["tag:a"] + 3
            assert after["tag:é"] == before.get("tag:é", 0) + 2
            assert await store.get(KEYS[0]) == b"v"

    asyncio.run(run())


def test_many_at_once_do_not_mix(make):
    async def run():
        async with opened(make) as (store,):
            keys = [i.to_bytes(32, "big") for i in range(300)]
            await asyncio.gather(*(store.put(key, key * 3, 60.0, A) for key in keys))
            got = await asyncio.gather(*(store.get(key) for key in keys))
            assert got == [key * 3 for key in keys]

    asyncio.run(run())


def test_a_store_says_how_full_it_is_if_it_knows(make, kind):
    async def run():
        async with opened(make) as (store,):
            await store.put(KEYS[0], b"v" * 5000, 60.0, A)
            facts = store.facts()
            assert facts.evictions == 0
            if kind in ("memory", "sqlite"):
                assert facts.entries is not None
                assert facts.nbytes >= 5000

    asyncio.run(run())
