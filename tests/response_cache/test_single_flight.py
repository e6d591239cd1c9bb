import asyncio
from dataclasses import replace

import pytest

from headrace.core.events import Finished, Layer
from headrace.core.prediction.latest_start import LatestStarts
from headrace.core.prediction.output_lengths import LengthPredictor
from headrace.core.prediction.step_times import StepTimes
from headrace.core.request import FinishReason, InvalidParameter
from headrace.core.tenancy.tenants import BACKGROUND, CLASSES
from headrace.response_cache.query import LookupRequest
from headrace.response_cache.rules.cacheability import CacheDirectives
from headrace.response_cache.rules.entry import Hit, Miss
from headrace.response_cache.rules.tags import EVERYTHING
from headrace.response_cache.stores.memory import MemoryStore
from tests.doubles.cached_services import Level, house, truth
from tests.doubles.services import Gate, end_of, read_all, request, tokens_of


class Hopeless(LatestStarts):
    """To which every deadline is too near."""

    def __init__(self):
        super().__init__(StepTimes(), LengthPredictor(128), {each.name: each for each in CLASSES})

    def unreachable(self, request, now, cached=0):
        return "" if request.deadline is None else "too late"


def test_an_answer_is_read_before_it_is_kept(monkeypatch):
    order = []

    async def put(self, key, value, ttl, tags):
        order.append("kept")

    monkeypatch.setattr(MemoryStore, "put", put)

    async def run():
        async with house() as h:
            answer = await h.open(h.question(), interval=0)
            await answer.read()
            order.append("read")
            await h.settle()
            assert order == ["read", "kept"]

    asyncio.run(run())


@pytest.mark.parametrize("why", [FinishReason.TIMEOUT, FinishReason.CANCELLED])
def test_a_request_that_is_cancelled_twice_ends_once(why):
    async def run():
        async with house(max_model_len=2048, num_blocks=1024) as h:
            await h.answer(100)
            gate = Gate(h.service)
            leader, follower = await h.open(), await h.open()
            cached_again = await h.open(h.question(100))
            renewal = h.lookup.renew(h.lookup.query(h.question(7)))
            reader = await h.open(h.question(7, service_class=BACKGROUND.name))
            assert reader.note == "coalesced"
            for answer in (follower, cached_again, reader):
                h.lookup.close(answer, why)
                h.lookup.close(answer)
                assert end_of(await read_all(answer)) is why
            gate.open.set()
            assert tokens_of(await read_all(leader)) == truth()
            while not renewal.over:
                await asyncio.sleep(0.001)
            assert renewal.end.reason is FinishReason.LENGTH

    asyncio.run(run())


def test_a_deadline_that_cannot_be_met_is_its_callers_alone():
    async def run():
        async with house(predictions=Hopeless()) as h:
            soon = h.service.now() + 60.0
            gate = Gate(h.service)
            hurried, patient, also_hurried = [
                await h.open(h.question(deadline=deadline)) for deadline in (soon, None, soon + 1.0)
            ]
            gate.open.set()
            assert end_of(await read_all(hurried)) is FinishReason.UNREACHABLE
            for answer in (patient, also_hurried):
                assert tokens_of(await read_all(answer)) == truth()
                h.lookup.close(answer)

    asyncio.run(run())


def test_if_no_coalesced_request_can_wait_longer_all_miss_their_deadline():
    async def run():
        async with house(predictions=Hopeless()) as h:
            soon = h.service.now() + 60.0
            gate = Gate(h.service)
            answers = [await h.open(h.question(deadline=soon)) for _ in range(3)]
            gate.open.set()
            for answer in answers:
                assert end_of(await read_all(answer)) is FinishReason.UNREACHABLE
                h.lookup.close(answer)

    asyncio.run(run())


def test_a_failure_after_the_first_caller_left_does_not_reach_the_others():
    async def run():
        async with house() as h:
            gate = Gate(h.service)
            h.runner.poison.add("r1")
            leader, follower = await h.open(), await h.open()
            h.lookup.close(leader)
            gate.open.set()
            assert tokens_of(await read_all(follower)) == truth()

    asyncio.run(run())


def test_a_second_attempt_whose_name_is_in_use_fails_alone():
    async def run():
        async with house(max_model_len=2048, num_blocks=1024) as h:
            gate = Gate(h.service)
            other = h.service.open([request("r1~1", 20)])
            h.runner.poison.add("r1")
            answers = [await h.open(), await h.open()]
            gate.open.set()
            for answer in answers:
                assert end_of(await read_all(answer)) is FinishReason.FAILED
            assert len(tokens_of(await read_all(other))) == 20

    asyncio.run(run())


def test_a_request_after_an_invalidation_does_not_join_an_older_computation():
    async def run():
        async with house() as h:
            gate = Gate(h.service)
            before = await h.open()
            await h.lookup.clear(EVERYTHING)
            after, beside = await h.open(), await h.open()
            assert [answer.note for answer in (before, after, beside)] == ["miss", "miss", "coalesced"]
            gate.open.set()
            for answer in (before, after, beside):
                assert tokens_of(await read_all(answer)) == truth()
            await h.settle()
            assert (await h.answer())[0].startswith("hit")
            gate = Gate(h.service)
            assert h.lookup.renew(h.lookup.query(h.question(7))) is not None
            assert h.lookup.renew(h.lookup.query(h.question(7))) is None
            await h.lookup.clear(EVERYTHING)
            assert h.lookup.renew(h.lookup.query(h.question(7))) is not None
            gate.open.set()

    asyncio.run(run())


def test_a_lookup_started_before_an_invalidation_serves_no_later_request():
    class Slow(Level):
        def __init__(self):
            self.looking, self.go_on = asyncio.Event(), asyncio.Event()

        async def find(self, query):
            self.looking.set()
            await self.go_on.wait()
            return self.reply

    async def run():
        level = Slow()
        async with house(levels=[level]) as h:
            level.go_on.set()
            level.reply = Miss()
            await h.answer(6)
            level.go_on.clear()
            level.looking.clear()
            level.reply = Hit(h.witness.kept_entries[0], Layer.SEMANTIC, b"k" * 32, 0.0, 0.97)
            before = asyncio.ensure_future(h.answer())
            await level.looking.wait()
            await h.lookup.clear(EVERYTHING)
            after = asyncio.ensure_future(h.answer())
            await asyncio.sleep(0)
            level.go_on.set()
            for note, tokens in (await before, await after):
                assert note in ("miss", "coalesced")
                assert tokens == truth()

    asyncio.run(run())


def test_a_caller_does_not_join_what_could_not_be_cleared_by_its_tags():
    async def run():
        async with house() as h:
            mine, both = CacheDirectives(tags=("mine",)), CacheDirectives(tags=("mine", "ours"))
            gate = Gate(h.service)
            notes = [
                (await h.open(h.question(control=control))).note
                for control in (CacheDirectives(), mine, mine, CacheDirectives(), both, mine)
            ]
            assert notes == ["miss", "miss", "coalesced", "coalesced", "miss", "coalesced"]
            gate.open.set()

    asyncio.run(run())


def test_each_reader_hears_one_end_when_the_first_attempt_has_failed():
    async def run():
        async with house() as h:
            gate = Gate(h.service)
            h.runner.poison.add("r1")
            leader, follower = await h.open(), await h.open()
            gate.open.set()
            reported = await read_all(leader)
            h.lookup.close(leader)
            h.lookup.close(leader)
            assert [event.reason for _, event in reported if isinstance(event, Finished)] == [
                FinishReason.FAILED
            ]
            assert leader.exhausted
            assert tokens_of(await read_all(follower)) == truth()

    asyncio.run(run())


def test_tags_of_a_hit_are_the_callers():
    async def run():
        async with house() as h:
            mine = CacheDirectives(tags=("mine",))
            assert (await h.answer())[0] == "miss"
            assert (await h.answer(control=mine))[0] == "miss"
            assert (await h.answer(control=mine))[0].startswith("hit")
            assert (await h.answer())[0].startswith("hit")
            assert (await h.answer(control=replace(mine, tags=("mine", "ours"))))[0] == "miss"

    asyncio.run(run())


@pytest.mark.parametrize("cached", [True, False])
def test_an_id_in_use_is_refused_also_when_nothing_would_be_computed(cached):
    """Otherwise lookups and savings of one tenant would be recorded for the open request of another."""

    async def run():
        async with house() as h:
            if cached:
                await h.answer()
            gate = Gate(h.service)
            running = await h.open(h.question(9 if cached else 5, tenant="a" if cached else "default"))
            taken = LookupRequest(replace(h.question().request, id=running.requests[0].id))
            with pytest.raises(InvalidParameter, match="already in use"):
                await h.lookup.open([taken])
            gate.open.set()
            await read_all(running)
            await read_all(await h.lookup.open([taken]))

    asyncio.run(run())
