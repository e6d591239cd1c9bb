import asyncio
import gc
import weakref

import pytest

from headrace.core.events import Admitted
from headrace.response_cache.background_request import ID_PREFIX, BackgroundRequests, NotCacheable
from headrace.response_cache.rules.response.control import CacheDirectives
from tests.response_cache.test_history import on_a_loop
from tests.response_cache.test_lookup import house, truth
from tests.response_cache.test_partial import WHOLE, partial
from tests.service.test_service import read_all


@on_a_loop
async def test_what_is_computed_ahead_is_there_when_it_is_asked_for():
    async with house() as h:
        ahead = BackgroundRequests(h.recall)
        answer = await ahead.open([h.question(), h.question(6)])
        reported = await read_all(answer)
        ahead.close(answer)
        assert answer.note == "computed"
        assert [event.output_tokens for _, event in sorted(reported)] == [5, 6], "it ends and tells no tokens"
        await h.settle()
        before = h.runner.computed_tokens
        assert await h.answer() == ("hit; layer=exact; age=0", truth())
        assert h.runner.computed_tokens == before
        assert all(event.request_id.startswith(ID_PREFIX) for event in h.events(Admitted))


@on_a_loop
async def test_what_is_kept_is_not_computed_again():
    async with house() as h:
        await h.answer()
        before = h.runner.computed_tokens
        answer = await BackgroundRequests(h.recall).open([h.question()])
        await read_all(answer)
        assert answer.note == "kept"
        assert h.runner.computed_tokens == before


@on_a_loop
async def test_what_was_computed_leaves_nothing_that_has_to_be_searched_for():
    async with house() as h:
        ahead = BackgroundRequests(h.recall)
        gc.collect()
        gc.disable()
        try:
            answer = await ahead.open([h.question()])
            flights = [weakref.ref(flight) for flight in answer.flights]
            await read_all(answer)
            ahead.close(answer)
            await h.settle()
            del answer
            assert [flight() for flight in flights] == [None]
        finally:
            gc.enable()


@pytest.mark.parametrize(
    "directives", [CacheDirectives(no_store=True), CacheDirectives(samples=4)], ids=["no_store", "pool"]
)
@on_a_loop
async def test_what_could_not_be_kept_is_not_computed(directives):
    async with house() as h:
        with pytest.raises(NotCacheable):
            await BackgroundRequests(h.recall).open([h.question(control=directives, temperature=1.0)])
        assert not h.service.open_requests()


@on_a_loop
async def test_interrupted_it_leaves_what_it_has_for_the_next_time():
    async with house(partial=partial(), **WHOLE) as h:
        ahead = BackgroundRequests(h.recall)
        answer = await ahead.open([h.question(400)])
        reading = asyncio.create_task(answer.read())
        while h.runner.computed_tokens < 30:
            await asyncio.sleep(0.001)
        reading.cancel()
        ahead.close(answer)
        while h.service.open_requests():
            await asyncio.sleep(0.001)
        before = h.runner.computed_tokens
        again = await ahead.open([h.question(400)])
        await read_all(again)
        assert h.runner.computed_tokens - before < 400 - 20
        await h.settle()
        assert (await h.answer(400))[1] == truth(400)


@on_a_loop
async def test_a_client_that_joins_background_work_does_not_wait_for_idle_time():
    async with house(**WHOLE) as h:
        ahead = BackgroundRequests(h.recall)
        warm = await ahead.open([h.question(400)])
        note, tokens = await h.answer(400)
        assert note in ("miss", "hit; layer=exact; age=0")
        assert tokens == truth(400)
        await read_all(warm)
        ahead.close(warm)
        assert not h.service.open_requests()
