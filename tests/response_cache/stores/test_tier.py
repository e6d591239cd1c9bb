import asyncio

import pytest

from headrace.core.events import Fault
from headrace.core.ports import ValueTooLarge
from headrace.core.request import FinishReason
from headrace.response_cache.rules.circuit_breaker import FAILURES, OPEN_SECONDS
from headrace.response_cache.rules.entry import Entry, Seal
from headrace.response_cache.stores.memory import MemoryStore
from headrace.response_cache.stores.tier import Tier

KEY = b"k" * 32
ENTRY = Entry((1, 2), FinishReason.STOP, 3, 0.1, 0.0, 60.0, 60.0, versions=(("*", 0),))


class Trouble(MemoryStore):
    """A store that does as the test wants."""

    name = "trouble"

    def __init__(self):
        super().__init__(1 << 20)
        self.error = None
        self.hangs = False
        self.asked = 0

    async def get(self, key):
        self.asked += 1
        if self.error:
            raise self.error
        if self.hangs:
            await asyncio.sleep(60)
        return await super().get(key)


class Bench:
    """A tier over it, with a clock and a list of faults."""

    def __init__(self, **more):
        self.store, self.faults, self.now = Trouble(), [], 0.0
        self.tier = Tier(
            self.store, 0.05, tell=lambda e: self.faults.append(e.fault), clock=lambda: self.now, **more
        )


def test_a_store_that_fails_or_is_slow_is_a_miss():
    async def run():
        bench = Bench()
        await bench.tier.keep(KEY, ENTRY, 60.0)
        assert await bench.tier.find(KEY) == ENTRY
        bench.store.error = ConnectionError("gone")
        assert await bench.tier.find(KEY) is None
        bench.store.error, bench.store.hangs = None, True
        assert await bench.tier.find(KEY) is None
        assert bench.faults == [Fault.FAILED, Fault.SLOW]

    asyncio.run(run())


def test_a_store_that_goes_on_failing_is_not_asked_for_a_while():
    async def run():
        bench = Bench()
        await bench.tier.keep(KEY, ENTRY, 60.0)
        bench.store.error = ConnectionError("gone")
        for _ in range(20):
            await bench.tier.find(KEY)
        assert bench.store.asked == 5
        assert bench.faults[-1] is Fault.RESTING
        bench.now += 1.5
        await bench.tier.find(KEY)
        await bench.tier.find(KEY)
        assert bench.store.asked == 6
        bench.store.error = None
        bench.now += 1.5
        assert await bench.tier.find(KEY) is None  # it rests twice as long
        bench.now += 1.5
        assert await bench.tier.find(KEY) == ENTRY
        assert await bench.tier.find(KEY) == ENTRY

    asyncio.run(run())


@pytest.mark.parametrize("seal", [None, Seal(b"secret")])
def test_what_is_damaged_is_deleted_and_a_miss(seal):
    async def run():
        bench = Bench(seal=seal)
        await bench.tier.keep(KEY, ENTRY, 60.0)
        assert await bench.tier.find(KEY) == ENTRY
        value = await bench.store.get(KEY)
        await bench.store.put(KEY, value[:-1] + bytes([value[-1] ^ 1]), 60.0, ())
        assert await bench.tier.find(KEY) is None
        assert await bench.store.get(KEY) is None
        assert bench.faults == [Fault.DAMAGED]

    asyncio.run(run())


def test_a_value_written_by_another_program_is_rejected():
    async def run():
        bench, forger = Bench(seal=Seal(b"secret")), Bench(seal=Seal(b"guess"))
        forger.tier._store = bench.store
        await forger.tier.keep(KEY, ENTRY, 60.0)
        assert await bench.tier.find(KEY) is None
        await bench.tier.keep(KEY, ENTRY, 60.0)
        await bench.store.put(b"o" * 32, await bench.store.get(KEY), 60.0, ())
        assert await bench.tier.find(b"o" * 32) is None  # moved to another key
        assert await bench.tier.find(KEY) == ENTRY

    asyncio.run(run())


def test_the_breaker_logs_when_it_opens_and_when_it_closes(caplog):
    def states():
        return [
            r.getMessage().rpartition(": ")[2] for r in caplog.records if "circuit breaker" in r.getMessage()
        ]

    async def run():
        bench = Bench()
        bench.store.hangs = True
        for _ in range(FAILURES + 3):
            await bench.tier.find(KEY)
        assert states() == ["circuit breaker open, it is retried later"]
        bench.now += 2 * OPEN_SECONDS
        await bench.tier.find(KEY)  # it is tried, fails again, and is still down
        assert len(states()) == 1
        bench.store.hangs = False
        bench.now += 10 * OPEN_SECONDS
        await bench.tier.find(KEY)
        await bench.tier.find(KEY)
        assert states()[1:] == ["circuit breaker closed"]

    asyncio.run(run())


def test_a_value_above_the_limit_is_counted_and_reported_once_and_is_no_failure(caplog):
    async def run():
        bench = Bench()

        async def put(*args):
            raise ValueTooLarge(1_500_000, 1_048_576)

        bench.store.put = put
        for _ in range(2 * FAILURES):
            await bench.tier.keep(KEY, ENTRY, 60.0)
        assert bench.faults == [Fault.TOO_LARGE] * 2 * FAILURES
        assert await bench.tier.clear("*")  # the circuit breaker of writes is closed

    asyncio.run(run())
    assert [record.message for record in caplog.records] == [
        "trouble: a response of 1,500,000 bytes is not stored: the limit is 1,048,576"
    ]
