import asyncio

from headrace.core.events import Emitted, Finished
from headrace.core.request import FinishReason, Request, SamplingParams
from headrace.response_cache import writer
from headrace.response_cache.exact import ExactCache
from headrace.response_cache.query import CacheQuery
from headrace.response_cache.rules.cacheability import EVERYTHING, NO_DIRECTIVES
from headrace.response_cache.rules.tags import TagVersions
from headrace.response_cache.single_flight import Computation
from headrace.response_cache.stores.memory import MemoryStore
from headrace.response_cache.stores.tier import Tier
from headrace.response_cache.writer import CacheWriter
from tests.doubles.cached_services import house as recalling
from tests.doubles.cached_services import truth
from tests.doubles.services import read_all, tokens_of


class Reported:
    """A listener."""

    def __init__(self):
        self.kept_keys = []

    def stored(self, query, entry):
        self.kept_keys.append(query.key)


class House:
    def __init__(self, *listeners, deadline=0.0):
        self.exact = ExactCache([Tier(MemoryStore(1 << 20), deadline)], TagVersions())
        self.landed = []
        self.busy = False
        self.keeping = CacheWriter(self.exact, 60.0, listeners, self.land, lambda: self.busy)

    def land(self, computation: Computation, key: bytes | None) -> None:
        assert key in (computation.query.key, None)
        self.landed.append(computation)

    def query(self, name: bytes) -> CacheQuery:
        request = Request(name.decode(), (1, 2), SamplingParams(temperature=0.0))
        return CacheQuery(request, NO_DIRECTIVES, EVERYTHING, name * 32, beginning=name.upper() * 32)

    def computation(self, name: bytes) -> Computation:
        """One that is over."""
        query = self.query(name)
        ended = Computation(
            query,
            query.request,
            self.exact.snapshot(query),
            None,
            lambda: 0.0,
            lambda *_: None,
            lambda *_: False,
        )
        ended.tell(0, Emitted(query.request.id, (7,)))
        ended.tell(0, Finished(query.request.id, FinishReason.STOP, 2, 1, 0))
        return ended

    async def has(self, name: bytes) -> bool:
        return await self.exact.at(name * 32) is not None


def test_what_ended_is_kept_within_a_moment(monkeypatch):
    async def scenario():
        h = House()
        computations = [h.computation(b"a"), h.computation(b"b")]
        for computation in computations:
            h.keeping.add(computation)
        await asyncio.sleep(0)
        assert not h.landed
        assert not await h.has(b"a")
        while len(h.landed) < 2:
            await asyncio.sleep(0)
        assert h.landed == computations
        assert await h.has(b"a")
        assert await h.has(b"b")

    monkeypatch.setattr(writer, "KEEP_SECONDS", 0.001)
    asyncio.run(scenario())


def test_it_waits_for_open_calls_for_a_bounded_time(monkeypatch):
    async def scenario():
        h = House()
        h.busy = True
        h.keeping.add(h.computation(b"a"))
        await asyncio.sleep(0.02)
        assert not h.landed
        h.busy = False
        async with asyncio.timeout(60.0):
            while len(h.landed) < 1:
                await asyncio.sleep(0.001)
            h.busy = True
            monkeypatch.setattr(writer, "PATIENCE_SECONDS", 0.01)
            h.keeping.add(h.computation(b"b"))
            while len(h.landed) < 2:
                await asyncio.sleep(0.001)

    monkeypatch.setattr(writer, "KEEP_SECONDS", 0.0)
    monkeypatch.setattr(writer, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(writer, "PATIENCE_SECONDS", 3600.0)
    asyncio.run(scenario())


def test_entries_are_written_one_by_one_and_arrivals_are_handled_in_between(monkeypatch):
    async def scenario():
        h = House()
        for name in (b"a", b"b", b"c"):
            h.keeping.add(h.computation(name))
        h.landed = Seen(h)
        async with asyncio.timeout(60.0):
            while not h.landed:
                await asyncio.sleep(0)
        await asyncio.sleep(0.02)
        assert len(h.landed) == 1

    class Seen(list):
        """With the first that lands somebody comes."""

        def __init__(self, house):
            self.house = house

        def append(self, computation):
            super().append(computation)
            self.house.busy = True

    monkeypatch.setattr(writer, "KEEP_SECONDS", 0.0)
    monkeypatch.setattr(writer, "PATIENCE_SECONDS", 3600.0)
    asyncio.run(scenario())


def test_a_lookup_of_a_queued_entry_writes_it_at_once(monkeypatch):
    async def scenario():
        h = House()
        h.keeping.add(h.computation(b"a"))
        await h.keeping.catch_up(h.query(b"b").beginning)
        assert not await h.has(b"a")
        await h.keeping.catch_up(h.query(b"a").beginning)
        assert await h.has(b"a")

    monkeypatch.setattr(writer, "KEEP_SECONDS", 3600.0)
    asyncio.run(scenario())


def test_a_store_that_has_to_be_waited_for_is_written_to_at_once(monkeypatch):
    async def scenario():
        h = House(deadline=60.0)
        computation = h.computation(b"a")
        h.keeping.add(computation)
        async with asyncio.timeout(60.0):
            while h.landed != [computation]:
                await asyncio.sleep(0)

    monkeypatch.setattr(writer, "KEEP_SECONDS", 3600.0)
    asyncio.run(scenario())


def test_at_the_end_nothing_is_left(monkeypatch):
    async def scenario():
        h = House()
        h.keeping.add(h.computation(b"a"))
        await h.keeping.finish()
        assert await h.has(b"a")

    monkeypatch.setattr(writer, "KEEP_SECONDS", 3600.0)
    asyncio.run(scenario())


def test_keepers_hear_of_what_is_kept_and_of_nothing_else():
    async def scenario():
        reported = Reported()
        h = House(reported)
        wrong, cleared, right = (h.computation(name) for name in (b"a", b"b", b"c"))
        h.keeping.add(wrong)
        await h.exact.bar(wrong.query.key)
        await h.keeping.finish()
        h.keeping.add(cleared)
        await h.exact.clear("*")
        await h.keeping.finish()
        assert reported.kept_keys == []
        assert h.landed == [wrong, cleared]
        right.versions = h.exact.snapshot(right.query)
        h.keeping.add(right)
        await h.keeping.finish()
        assert reported.kept_keys == [right.query.key]

    asyncio.run(scenario())


def test_a_keeper_that_fails_costs_the_others_nothing():
    class Failing:
        def stored(self, query, entry):
            raise RuntimeError("no")

    async def scenario():
        reported = Reported()
        h = House(Failing(), reported)
        h.keeping.add(h.computation(b"a"))
        await h.keeping.finish()
        assert reported.kept_keys == [b"a" * 32]
        assert await h.has(b"a")

    asyncio.run(scenario())


def test_a_repeated_request_is_served_an_entry_that_is_still_queued():
    async def run():
        async with recalling() as h:
            for words in ("miss", "hit; layer=exact; age=0"):
                answer = await h.open()
                assert tokens_of(await read_all(answer)) == truth()
                h.lookup.close(answer)
                assert answer.note == words

    asyncio.run(run())
