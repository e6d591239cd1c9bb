"""Every built-in store of responses passes the checks that are shipped in `headrace.testing`."""

from __future__ import annotations

import asyncio

import pytest

from headrace.response_cache.stores.memcached import MemcachedStore
from headrace.response_cache.stores.memory import MemoryStore
from headrace.response_cache.stores.redis import RedisStore
from headrace.response_cache.stores.sqlite import SQLiteStore
from headrace.testing import STORE_CHECKS, StoreTraits
from tests.doubles.shared_stores import patience

TRAITS = {
    "memory": StoreTraits(shared=False),
    "sqlite": StoreTraits(),
    "redis": StoreTraits(),
    "memcached": StoreTraits(deletes_by_tag=False, shortest_ttl=1.0),
}


@pytest.fixture(autouse=True, scope="module")
def _patience():
    with patience():
        yield


@pytest.fixture(params=TRAITS)
def kind(request):
    return request.param


@pytest.fixture
def make(kind, request, tmp_path):
    if kind == "memory":
        store = MemoryStore(8 << 20)
        return lambda: store
    if kind == "sqlite":
        return lambda: SQLiteStore(tmp_path / "answers.db", 1 << 24)
    if kind == "redis":
        port = request.getfixturevalue("redis_port")
        return lambda: RedisStore(f"redis://127.0.0.1:{port}/0")
    port = request.getfixturevalue("memcached_port")
    return lambda: MemcachedStore("127.0.0.1", port)


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
def test_store(make, kind, check):
    check(make, TRAITS[kind])


@pytest.mark.parametrize("kind", ["memory", "sqlite"], indirect=True)
def test_stores_in_the_process_and_in_a_file_count_what_they_hold(make):
    async def run():
        store = make()
        await store.put(bytes(32), b"v" * 5000, 60.0, ("*",))
        facts = store.facts()
        await store.close()
        return facts

    facts = asyncio.run(run())
    assert facts.entries is not None
    assert facts.nbytes >= 5000
