"""The exact cache over real stores: what happens to them is never an error, and never another's answer."""

import asyncio
import sqlite3
from contextlib import asynccontextmanager

import pytest
import redis as redis_client
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pymemcache.client.base import PooledClient

from headrace.core.events import StoreFaulted
from headrace.core.tenancy.gate import Limits
from headrace.response_cache.exact import ExactCache
from headrace.response_cache.lookup import CacheLookup, NotCached
from headrace.response_cache.rules.cacheability import CacheDirectives
from headrace.response_cache.rules.entry import Seal
from headrace.response_cache.rules.key import Engine
from headrace.response_cache.rules.tags import (
    EVERYTHING,
    TagVersions,
    counter_of,
    tenant_tag,
    user_tag,
)
from headrace.response_cache.stores.generation import PREFIX, VERSIONS
from headrace.response_cache.stores.memcached import MemcachedStore
from headrace.response_cache.stores.memory import MemoryStore
from headrace.response_cache.stores.redis import RedisStore
from headrace.response_cache.stores.sqlite import SQLiteStore
from headrace.response_cache.stores.tier import Tier
from headrace.service.service import Service
from headrace.testing.engines import hashing_engine
from tests.doubles.cached_services import House, truth
from tests.doubles.clock import Clock
from tests.doubles.services import Book
from tests.doubles.shared_stores import patience, redis_server

FINGERPRINT = Engine("hash", "", "", "", "", "").fingerprint()
SECONDS = 60.0  # of a look-up: tests share their machine
SEAL = Seal(b"secret")


@pytest.fixture(autouse=True, scope="module")
def _patience():
    with patience():
        yield


@pytest.fixture
def polls_often(monkeypatch):
    """For tests that wait until a server has heard of something; the start of a cache waits no longer either."""
    monkeypatch.setattr("headrace.response_cache.exact.POLL_SECONDS", 0.1)


def tier(kind, folder, request, tell=lambda event: None):
    match kind:
        case "memory":
            return Tier(MemoryStore(1 << 20))
        case "sqlite":
            return Tier(SQLiteStore(folder / "answers.db", 1 << 24), SECONDS, tell=tell)
        case "redis":
            port = request.getfixturevalue("redis_port")
            return Tier(RedisStore(f"redis://127.0.0.1:{port}/0"), SECONDS, SEAL, tell)
    port = request.getfixturevalue("memcached_port")
    return Tier(MemcachedStore("127.0.0.1", port), SECONDS, SEAL, tell)


@asynccontextmanager
async def house(make, clock=None, fingerprint=FINGERPRINT):
    made, runner = hashing_engine()
    book, clock = Book(), clock or Clock()
    service = Service(made, Limits(64, 10_000), [book])
    exact = ExactCache(make(service.note), TagVersions(), clock)
    lookup = CacheLookup(service, exact, fingerprint, ttl=100.0)
    await lookup.start()
    try:
        yield House(lookup, service, runner, book, clock, None)
    finally:
        await lookup.stop()


KINDS = ["memory", "sqlite", "redis", "memcached"]
PAIRS = [("memory", "sqlite"), ("memory", "redis"), ("sqlite", "memcached")]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(["ann", "bob", "ann\0", ""]),
            st.sampled_from(["", "pepper", "\0", "\0pepper"]),
            st.sampled_from([(1, 2, 3), (1, 2, 4)]),
        ),
        max_size=12,
    )
)
def test_two_tenants_never_share(kind, tmp_path, request, calls):
    async def run():
        asked = set()
        async with house(lambda tell: [tier(kind, tmp_path, request, tell)]) as h:
            await h.lookup.clear(EVERYTHING)
            for tenant, salt, prompt in calls:
                note, tokens = await h.answer(prompt=prompt, tenant=tenant, salt=salt)
                assert note.startswith("hit") == ((tenant, salt, prompt) in asked)
                assert tokens == truth(prompt=prompt)
                asked.add((tenant, salt, prompt))

    asyncio.run(run())


@pytest.mark.parametrize("kind", KINDS[1:])
def test_answers_outlive_the_server_and_are_another_models_never(kind, tmp_path, request):
    def make(tell):
        return [tier(kind, tmp_path, request, tell)]

    async def run():
        async with house(make) as h:
            await h.lookup.clear(EVERYTHING)
            assert (await h.answer())[0] == "miss"
        async with house(make) as h:
            note, tokens = await h.answer()
            assert note.startswith("hit")
            assert tokens == truth()
            assert h.runner.computed_tokens == 0
        async with house(make, fingerprint=b"other" * 6) as h:
            assert (await h.answer())[0] == "miss"

    asyncio.run(run())


@pytest.mark.parametrize("kinds", PAIRS)
def test_what_a_further_store_has_comes_nearer(kinds, tmp_path, request):
    async def run():
        async with house(lambda tell: [tier(kind, tmp_path, request, tell) for kind in kinds]) as h:
            near, far = h.lookup._exact._tiers
            await h.lookup.clear(EVERYTHING)
            await h.answer()
            key = h.lookup.served("r1").key
            await near.forget(key)
            assert (await h.answer())[0].startswith("hit")
            assert await near.find(key) == await far.find(key) is not None

    asyncio.run(run())


@pytest.mark.parametrize("kind", KINDS[1:])
def test_an_invalidation_reaches_all_servers_of_a_shared_store(kind, tmp_path, request, polls_often):
    def make(tell):
        return [tier("memory", tmp_path, request), tier(kind, tmp_path, request, tell)]

    async def run():
        async with house(make) as one, house(make) as other:
            await one.lookup.clear(EVERYTHING)
            async with asyncio.timeout(60.0):
                while True:  # until it has heard of this one, it would not believe what is written after it
                    await one.answer()
                    if (await other.answer())[0].startswith("hit"):
                        break
                    await asyncio.sleep(0.1)
            assert await one.lookup.clear(tenant_tag("default")) == {"memory": True, kind: True}
            assert (await one.answer(control=CacheDirectives(no_store=True)))[0].startswith("bypass")

            async def until_gone():
                while True:
                    await other.answer(control=CacheDirectives(only_if_cached=True))
                    await asyncio.sleep(0.05)

            with pytest.raises(NotCached):
                await asyncio.wait_for(until_gone(), 60.0)

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["redis", "memcached"])
def test_an_invalidation_is_seen_after_a_store_lost_earlier_ones(kind, tmp_path, request, polls_often):
    tag = user_tag("default", kind)
    tagged = CacheDirectives(tags=(kind,))

    def make(tell):
        return [tier("memory", tmp_path, request), tier(kind, tmp_path, request, tell)]

    async def run():
        async with house(make) as one, house(make) as other, asyncio.timeout(60.0):
            for _ in range(3):
                await one.lookup.clear(tag)
            await until_they_agree(one, other, tag)
            await other.answer(control=tagged)
            assert (await other.answer(control=tagged))[0].startswith("hit")
            await forget_versions(kind, request)
            await one.lookup.clear(tag)
            while (await other.answer(control=tagged))[0].startswith("hit"):
                await asyncio.sleep(0.05)
            await until_they_agree(one, other, tag)

    asyncio.run(run())


async def until_they_agree(one, other, tag):
    while len({h.lookup._exact._versions.snapshot([tag]) for h in (one, other)}) > 1:
        await asyncio.sleep(0.05)


async def forget_versions(kind, request):
    port = request.getfixturevalue(f"{kind}_port")
    if kind == "redis":
        with redis_client.Redis(port=port) as client:
            client.delete(VERSIONS)
    else:
        client = PooledClient(("127.0.0.1", port))
        client.delete(VERSIONS, noreply=False)
        client.close()


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_an_invalidation_during_a_store_outage_is_published_later(
    kind, tmp_path, request, monkeypatch, polls_often
):
    tag = user_tag("default", f"late {kind}")

    def make(tell):
        return [tier("memory", tmp_path, request), tier(kind, tmp_path, request, tell)]

    async def without_tokens(self, tag):
        raise OSError

    async def run():
        async with house(make) as one, house(make) as other, asyncio.timeout(60.0):
            with monkeypatch.context() as patch:
                patch.setattr(type(one.lookup._exact._tiers[1]._store), "clear", without_tokens)
                assert await one.lookup.clear(tag) == {"memory": True, kind: False}
            await until_they_agree(one, other, tag)

    asyncio.run(run())


def test_invalidations_at_two_servers_during_an_outage_are_both_published(tmp_path, request, monkeypatch):
    """Each counts one, so what the other one has computed in between must not seem current."""
    tag = user_tag("default", "twice")

    async def without_tokens(self, tag):
        raise OSError

    async def run():
        tiers = [tier("sqlite", tmp_path, request) for _ in range(2)]
        one, other = [ExactCache([each], TagVersions(), Clock()) for each in tiers]
        with monkeypatch.context() as patch:
            patch.setattr(SQLiteStore, "clear", without_tokens)
            await other.clear(tag)
            between = other._versions.snapshot([tag])
            await one.clear(tag)
        for _ in range(2):
            for cache, each in zip((one, other), tiers, strict=True):
                await cache._read_invalidations(each)
        assert not other._versions.current(between)
        assert one._versions.snapshot([tag]) == other._versions.snapshot([tag])
        for cache in (one, other):
            await cache.close()

    asyncio.run(run())


def test_two_stores_that_count_differently_come_to_agree(tmp_path, request, polls_often):
    tag = user_tag("default", "counted")

    def make(*kinds):
        return lambda tell: [tier(kind, tmp_path, request, tell) for kind in kinds]

    async def run():
        for kind, times in (("sqlite", 5), ("redis", 3)):
            async with house(make(kind)) as h:
                for _ in range(times):
                    await h.lookup.clear(tag)
        async with house(make("sqlite", "redis")) as h, asyncio.timeout(60.0):
            sqlite, redis = h.lookup._exact._tiers
            counter = counter_of(tag)
            while (await redis.versions()).get(counter) != 5:
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.25)  # two polls
            assert (await sqlite.versions())[counter] == (await redis.versions())[counter] == 5

    asyncio.run(run())


def test_a_redis_that_dies_and_comes_back_costs_only_speed(tmp_path):
    async def run():
        with redis_server() as server:

            def make(tell):
                return [Tier(RedisStore(f"redis://127.0.0.1:{server.port}/0"), SECONDS, SEAL, tell)]

            async with house(make) as h:
                await h.answer()
                assert (await h.answer())[0].startswith("hit")
                server.kill()
                for _ in range(12):
                    assert await h.answer() == ("miss", truth())
                faults = {event.fault.value for event in h.events(StoreFaulted)}
                assert "failed" in faults
                assert "resting" in faults
                with redis_server(server.port):
                    async with asyncio.timeout(60.0):
                        while not (await h.answer())[0].startswith("hit"):
                            await asyncio.sleep(0.1)

    asyncio.run(run())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seconds", [3600, -3600])
def test_a_clock_that_jumps_costs_only_speed_there_and_back(kind, seconds, tmp_path, request):
    async def run():
        async with house(lambda tell: [tier(kind, tmp_path, request, tell)]) as h:
            await h.lookup.clear(EVERYTHING)
            await h.answer()
            h.clock.now += seconds
            assert await h.answer() == ("miss", truth())
            assert (await h.answer())[0].startswith("hit; layer=exact; age=0")
            h.clock.now -= seconds
            for note, tokens in (await h.answer(), await h.answer()):
                assert note in ("miss", "hit; layer=exact; age=0")
                assert tokens == truth()

    asyncio.run(run())


def test_a_damaged_row_is_a_miss_and_then_mended(tmp_path, request):
    async def run():
        async with house(lambda tell: [tier("sqlite", tmp_path, request, tell)]) as h:
            await h.answer()
            with sqlite3.connect(tmp_path / "answers.db") as other:
                (value,) = other.execute("SELECT value FROM entries").fetchone()
                worse = value[:60] + bytes([value[60] ^ 1]) + value[61:]
                other.execute("UPDATE entries SET value = ?", (worse,))
            other.close()
            assert await h.answer() == ("miss", truth())
            assert (await h.answer())[0].startswith("hit")
            assert [event.fault.value for event in h.events(StoreFaulted)] == ["damaged"]

    asyncio.run(run())


def test_an_answer_that_was_planted_or_moved_in_redis_is_not_served(tmp_path, request):
    async def run():
        client = redis_client.Redis(port=request.getfixturevalue("redis_port"))
        client.flushall()
        async with house(lambda tell: [tier("redis", tmp_path, request, tell)]) as h:
            await h.answer()
            await h.answer(6)
            names = client.keys(f"{PREFIX}*")
            one, other = [name for name in names if b"tag:" not in name and b"versions" not in name]
            client.set(one, client.get(other))
            for max_tokens in (5, 6):
                assert (await h.answer(max_tokens))[1] == truth(max_tokens)
            client.set(other, b"HRA\x01" + bytes(200))
            for max_tokens in (5, 6):
                assert (await h.answer(max_tokens))[1] == truth(max_tokens)
        client.close()

    asyncio.run(run())


def test_a_store_that_forgot_what_was_cleared_serves_nothing_older(tmp_path, request):
    async def run():
        client = redis_client.Redis(port=request.getfixturevalue("redis_port"))
        async with house(lambda tell: [tier("redis", tmp_path, request, tell)]) as h:
            await h.answer()
        client.delete(f"{PREFIX}versions")
        async with house(lambda tell: [tier("redis", tmp_path, request, tell)]) as h:
            assert (await h.answer())[0] == "miss"
        client.close()

    asyncio.run(run())


def test_two_servers_on_one_file_answer_right_while_both_write(tmp_path, request):
    def make(tell):
        return [tier("sqlite", tmp_path, request, tell)]

    async def run():
        async with house(make) as one, house(make) as other:
            for round_ in range(3):
                for max_tokens in range(1, 20):
                    reported = await asyncio.gather(one.answer(max_tokens), other.answer(max_tokens))
                    assert all(tokens == truth(max_tokens) for _, tokens in reported)
                    assert round_ == 0 or all(note.startswith("hit") for note, _ in reported)

    asyncio.run(run())
