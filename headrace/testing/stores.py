"""Checks that every store of responses must pass. They clear the store that they are given.

```
import pytest
from headrace.testing import STORE_CHECKS, StoreTraits
from my_package import MyStore

@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
def test_my_store(check):
    check(MyStore, StoreTraits(shared=False))
```
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from headrace.core.ports import Store
from headrace.response_cache.rules.tags import EVERYTHING

MakeStore = Callable[[], Store]

KEYS = [bytes([i]) * 32 for i in range(4)]
A, B, BOTH = ("tag:a", EVERYTHING), ("tag:b", EVERYTHING), ("tag:a", "tag:b", EVERYTHING)
LARGE_BYTES = 500_000
PATIENCE_SECONDS = 60.0
"""How long a value may outlive its time to live, at least: its machine may be busy."""


@dataclass(frozen=True, slots=True)
class StoreTraits:
    """The capabilities of a store.

    ``shared``: it outlives the process or is shared with others, so it stores the versions of tags; each call of the
    factory opens the same contents. ``deletes_by_tag``: `clear` removes the values; otherwise raised versions
    invalidate them. ``shortest_ttl``: the shortest exact time to live, in seconds.
    """

    shared: bool = True
    deletes_by_tag: bool = True
    shortest_ttl: float = 0.05


def value_stays_until_deleted(make: MakeStore, traits: StoreTraits) -> None:
    """`get` returns what `put` stored, byte for byte, until it is replaced or deleted."""

    async def run() -> None:
        async with _opened(make) as (store,):
            assert await store.get(KEYS[0]) is None, "a cleared store returns a value"
            for value in (b"one", b"\0\xff\r\n" * 9, b"", b"x" * LARGE_BYTES):
                await store.put(KEYS[0], value, 60.0, A)
                assert await store.get(KEYS[0]) == value, f"a value of {len(value)} bytes is not returned"
            await store.delete(KEYS[0])
            await store.delete(KEYS[0])  # deleting a missing value is no error
            assert await store.get(KEYS[0]) is None, "a deleted value is returned"

    asyncio.run(run())


def clear_invalidates_one_tag(make: MakeStore, traits: StoreTraits) -> None:
    """After `clear`, values with the tag are gone, or its version is raised; other tags are not touched."""

    async def run() -> None:
        async with _opened(make) as (store,):
            before = await store.versions()
            for key, tags in zip(KEYS, (A, B, BOTH, ("tag", EVERYTHING)), strict=True):
                await store.put(key, b"v", 60.0, tags)
            await store.clear("tag:a")
            if traits.deletes_by_tag:
                assert await _all_of(store) == [None, b"v", None, b"v"], "wrong values after clear('tag:a')"
            if traits.shared:
                after = await store.versions()
                assert after["tag:a"] == before.get("tag:a", 0) + 1, "clear did not raise the tag's version"
                assert after.get("tag:b", 0) == before.get("tag:b", 0), "clear raised another tag's version"

    asyncio.run(run())


def clear_everything_empties_the_store(make: MakeStore, traits: StoreTraits) -> None:
    """After `clear` of the tag that all values have, no value is returned."""

    async def run() -> None:
        async with _opened(make) as (store,):
            for key in KEYS:
                await store.put(key, b"v", 60.0, A)
            await store.clear(EVERYTHING)
            await store.versions()
            assert await _all_of(store) == [None] * 4, "values are left after clear of everything"

    asyncio.run(run())


def value_ends_with_its_time_to_live(make: MakeStore, traits: StoreTraits) -> None:
    """A value is not returned after its time to live; others stay."""

    async def run() -> None:
        async with _opened(make) as (store,):
            await store.put(KEYS[0], b"v", traits.shortest_ttl, A)
            await store.put(KEYS[1], b"v", 60.0, A)
            async with asyncio.timeout(max(PATIENCE_SECONDS, 30 * traits.shortest_ttl)):
                while await store.get(KEYS[0]) is not None:
                    await asyncio.sleep(0.02)
            assert await store.get(KEYS[1]) == b"v", "a value ended before its time to live"

    asyncio.run(run())


def two_clients_share_values_and_versions(make: MakeStore, traits: StoreTraits) -> None:
    """Two clients of a shared store see each other's values and clearings, and lose no concurrent clearing."""
    if not traits.shared:
        return

    async def run() -> None:
        async with _opened(make, 2) as (one, other):
            await one.put(KEYS[0], b"v", 60.0, A)
            assert await other.get(KEYS[0]) == b"v", "another client does not see the value"
            before = (await one.versions()).get("tag:a", 0)
            await other.clear("tag:a")
            assert (await one.versions())["tag:a"] == before + 1, "another client does not see the clearing"
            await asyncio.gather(*(each.clear("tag:b") for each in (one, other) * 3))
            assert (await one.versions())["tag:b"] >= 6, "concurrent clearings were lost"

    asyncio.run(run())


def advance_raises_versions_only(make: MakeStore, traits: StoreTraits) -> None:
    """`advance` raises the versions of a shared store by the given steps, and deletes nothing."""

    async def run() -> None:
        async with _opened(make) as (store,):
            await store.clear("tag:a")
            before = await store.versions()
            await store.put(KEYS[0], b"v", 60.0, A)
            await store.advance({"tag:a": 3, "tag:é": 2})
            assert await store.get(KEYS[0]) == b"v", "advance deleted a value"
            if traits.shared:
                after = await store.versions()
                assert after["tag:a"] == before["tag:a"] + 3, "advance did not add 3 to the version"
                assert after["tag:é"] == before.get("tag:é", 0) + 2, "advance did not add 2 to a new tag"

    asyncio.run(run())


def concurrent_values_do_not_mix(make: MakeStore, traits: StoreTraits) -> None:
    """Many concurrent writes and reads each return their own value; a store may lose or refuse some of them."""

    async def run() -> None:
        async with _opened(make) as (store,):
            keys = [i.to_bytes(32, "big") for i in range(300)]
            puts = (store.put(key, key * 3, 60.0, A) for key in keys)
            await asyncio.gather(*puts, return_exceptions=True)
            got = await asyncio.gather(*map(store.get, keys), return_exceptions=True)
            found = [(key, value) for key, value in zip(keys, got, strict=True) if isinstance(value, bytes)]
            assert all(value == key * 3 for key, value in found), "concurrent values are mixed up"
            assert len(found) > len(keys) / 2, "most concurrent values are lost"

    asyncio.run(run())


def facts_say_how_full_it_is(make: MakeStore, traits: StoreTraits) -> None:
    """`facts` counts bytes and evictions, or has None if the store does not know; entries may be counted later."""

    async def run() -> None:
        async with _opened(make) as (store,):
            await store.put(KEYS[0], b"v" * 5000, 60.0, A)
            facts = store.facts()
            assert facts.evictions == 0, "an almost empty store has evicted something"
            assert facts.entries is None or facts.entries >= 0, "the number of entries is negative"
            assert facts.nbytes is None or facts.nbytes >= 5000, "a stored value's bytes are not counted"

    asyncio.run(run())


STORE_CHECKS = (
    value_stays_until_deleted,
    clear_invalidates_one_tag,
    clear_everything_empties_the_store,
    value_ends_with_its_time_to_live,
    two_clients_share_values_and_versions,
    advance_raises_versions_only,
    concurrent_values_do_not_mix,
    facts_say_how_full_it_is,
)


def check_store(make: MakeStore, traits: StoreTraits | None = None) -> None:
    """All `STORE_CHECKS`. ``make`` opens the store; the default ``traits`` are those of a shared store."""
    for check in STORE_CHECKS:
        check(make, traits or StoreTraits())


@asynccontextmanager
async def _opened(make: MakeStore, count: int = 1) -> AsyncIterator[list[Store]]:
    async with AsyncExitStack() as stack:
        stores = []
        for _ in range(count):
            store = make()
            stack.push_async_callback(_close, store)
            await store.versions()
            stores.append(store)
        await stores[0].clear(EVERYTHING)
        for store in stores:
            await store.versions()
        yield stores


def _close(store: Store) -> Awaitable[None]:
    return store.close()


async def _all_of(store: Store) -> list[bytes | None]:
    return [await store.get(key) for key in KEYS]
