"""A Memcached whose items are small: what it refuses is reported with the limit, and what it takes is stored."""

import asyncio

import pytest

from headrace.core.ports import ValueTooLarge
from headrace.response_cache.stores.memcached import MemcachedStore
from tests.doubles.shared_stores import memcached_server, patience

KEY = b"k" * 32


@pytest.mark.parametrize("limit", [512 << 10, 4 << 20])
def test_the_item_limit_of_the_server_counts(limit):
    async def stored(nbytes):
        await store.put(KEY, b"x" * nbytes, 60.0, ())
        found = await store.get(KEY)
        return found is not None and len(found) == nbytes

    async def run():
        await store.versions()
        assert await stored(100)
        assert await stored(limit - 1024)  # of 4 MiB: more than the default limit
        for nbytes in (limit - 1, limit + 1, 2 * limit):  # its own bytes count too
            with pytest.raises(
                ValueTooLarge, match=f"{nbytes:,} bytes is not stored: the limit is {limit:,}"
            ):
                await store.put(KEY, b"x" * nbytes, 60.0, ())
        await store.close()

    with patience(), memcached_server(0, "-I", str(limit)) as server:
        store = MemcachedStore("127.0.0.1", server.port)
        asyncio.run(run())
