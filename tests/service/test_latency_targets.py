"""What callers ask of the caches at one time, each for itself; pools of samples, and answers that were wrong."""

import asyncio
from dataclasses import replace

import pytest

from headrace.response_cache.rules.cacheability import CacheDirectives
from tests.doubles.cached_services import Level, house, truth
from tests.doubles.services import Gate, read_all

STALE = CacheDirectives(ttl=10.0, stale_while_revalidate=20.0)


def test_a_coalesced_request_is_served_nothing_older_than_its_max_age():
    async def run():
        async with house(levels=[Level()]) as h:
            await h.answer()
            h.clock.now += 50
            (any_age, _), (young, _) = await asyncio.gather(
                h.answer(), h.answer(control=CacheDirectives(max_age=40.0))
            )
            assert any_age == "hit; layer=exact; age=50"
            assert young == "miss"

    asyncio.run(run())


def test_only_if_cached_is_served_a_stored_entry_while_another_request_recomputes_it():
    async def run():
        async with house(levels=[Level()]) as h:
            await h.answer()
            h.clock.now += 50
            gate = Gate(h.service)
            assert (await h.open(h.question(control=CacheDirectives(max_age=10.0)))).note == "miss"
            kept = await h.open(h.question(control=CacheDirectives(only_if_cached=True)))
            assert kept.note.startswith("hit")
            gate.open.set()

    asyncio.run(run())


def test_two_stale_answers_are_served_under_one_request_id():
    async def run():
        async with house() as h:
            for max_tokens in (5, 6):
                await h.answer(max_tokens, control=STALE)
            h.clock.now += 15
            gate = Gate(h.service)
            for max_tokens in (5, 6):
                question = h.question(max_tokens, control=STALE)
                named = question._replace(request=replace(question.request, id="same"))
                answer = await h.open(named)
                assert answer.note.startswith("hit")
                await read_all(answer)
            gate.open.set()

    asyncio.run(run())


async def drawn(h, seed, samples=3):
    return await h.answer(temperature=1.0, seed=seed, control=CacheDirectives(samples=samples))


@pytest.mark.parametrize("wrong", [0, 1, 2])
@pytest.mark.parametrize("cached_again", [False, True])
def test_a_wrong_sample_is_served_no_more_and_another_takes_its_place(wrong, cached_again):
    async def run():
        async with house() as h:
            for seed in (10, 11, 12):
                await drawn(h, seed)
            name = f"r{wrong + 1}"
            if cached_again:
                assert (await drawn(h, wrong))[1] == truth(seed=10 + wrong)
                name = f"r{h.asked}"
            await h.lookup.bar(h.lookup.served(name))
            for seed in range(20, 50):
                assert (await drawn(h, seed))[1] != truth(seed=10 + wrong)
            notes = [(await drawn(h, seed))[0] for seed in range(50, 60)]
            assert all(note.startswith("hit") for note in notes)

    asyncio.run(run())
