"""Each check fails for a store that breaks its rule, and says which."""

from __future__ import annotations

import pytest

from headrace.response_cache.stores.memory import MemoryStore
from headrace.testing import StoreTraits, check_store, stores

ALONE = StoreTraits(shared=False)


class Forgets(MemoryStore):
    async def put(self, key, value, ttl, tags):
        pass


class KeepsForEver(MemoryStore):
    async def put(self, key, value, ttl, tags):
        await super().put(key, value, 60.0, tags)


class ClearsAll(MemoryStore):
    async def clear(self, tag):
        await super().clear("*")


class Miscounts(MemoryStore):
    def facts(self):
        return super().facts()._replace(nbytes=0)


def maker(kind):
    store = kind(8 << 20)
    return lambda: store


def test_a_good_store_passes():
    check_store(maker(MemoryStore), ALONE)


@pytest.mark.parametrize(
    ("kind", "error", "reported"),
    [
        (Forgets, AssertionError, "a value of 3 bytes is not returned"),
        (ClearsAll, AssertionError, "wrong values after clear"),
        (KeepsForEver, TimeoutError, None),
        (Miscounts, AssertionError, "bytes are not counted"),
    ],
)
def test_bad_stores_fail(kind, error, reported, monkeypatch):
    monkeypatch.setattr(stores, "PATIENCE_SECONDS", 0.0)
    with pytest.raises(error, match=reported):
        check_store(maker(kind), ALONE)


def test_a_store_without_versions_is_not_shared():
    with pytest.raises((AssertionError, KeyError)):
        check_store(maker(MemoryStore), StoreTraits(shared=True))
