"""Look-ups in the response caches before an answer is computed, and what is stored of it afterwards."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from headrace.core.events import Emitted, Finished, Layer, LookedUp, Spared
from headrace.core.plan import TokenLogprob
from headrace.core.ports import StoreFacts
from headrace.core.request import FinishReason, Request
from headrace.core.tenancy.gate import Limits
from headrace.response_cache.lookup import CacheLookup, NotCached, cache_header
from headrace.response_cache.query import Turn
from headrace.response_cache.rules.cacheability import CacheDirectives
from headrace.response_cache.rules.entry import Entry, Hit, Miss, Pulse
from headrace.response_cache.rules.tags import EVERYTHING, tenant_tag, user_tag
from headrace.response_cache.single_flight import TOKENS_AT_ONCE, Pace, tell_paced, tell_whole
from headrace.service.answer import Answer
from headrace.service.service import Refused, Service
from headrace.testing.engines import hashing_engine
from tests.doubles.cached_services import House, Level, house, truth
from tests.doubles.services import Gate, Leash, read_all, tokens_of


def test_a_second_answer_is_the_first_and_computes_nothing():
    async def run():
        async with house() as h:
            assert await h.answer() == ("miss", truth())
            before = h.runner.computed_tokens
            h.clock.now += 7
            assert await h.answer() == ("hit; layer=exact; age=7", truth())
            assert h.runner.computed_tokens == before
            await asyncio.sleep(0)
            (spared,) = h.events(Spared)
            assert spared[1:] == ("default", Layer.EXACT, 3, 5, 7.0)
            assert [event.outcome for event in h.events(LookedUp)] == ["miss", "hit"]

    asyncio.run(run())


def test_other_questions_and_other_tenants_have_their_own_answers():
    async def run():
        async with house() as h:
            await h.answer()
            assert await h.answer(6) == ("miss", truth(6))
            assert await h.answer(prompt=(1, 2, 4)) == ("miss", truth(prompt=(1, 2, 4)))
            assert (await h.answer(tenant="else"))[0] == "miss"
            assert (await h.answer(salt="salt"))[0] == "miss"

    asyncio.run(run())


def test_drawn_answers_are_kept_by_seed_and_not_at_all_without_one():
    async def run():
        async with house() as h:
            assert await h.answer(temperature=1.0, given_seed=3, seed=3) == ("miss", truth(seed=3))
            assert (await h.answer(temperature=1.0, given_seed=3, seed=3))[0].startswith("hit")
            assert await h.answer(temperature=1.0, given_seed=4, seed=4) == ("miss", truth(seed=4))
            for _ in range(2):
                assert (await h.answer(temperature=1.0, seed=3))[0] == "bypass; reason=sampled-without-a-seed"

    asyncio.run(run())


def test_a_pool_serves_nothing_before_it_is_full_and_then_each_of_its_samples():
    async def run():
        async with house() as h:
            control = CacheDirectives(samples=3)

            async def draw(seed):
                return await h.answer(temperature=1.0, seed=seed, control=control)

            for seed in (10, 11, 12):
                assert await draw(seed) == ("miss", truth(seed=seed))
            for seed in range(6):
                note, tokens = await draw(seed)
                assert note.startswith("hit")
                assert tokens == truth(seed=10 + seed % 3)

    asyncio.run(run())


def test_simultaneous_equal_requests_are_coalesced():
    async def run():
        async with house() as h:
            gate = Gate(h.service)
            answers = [await h.open() for _ in range(20)]
            late = await h.open(h.question(tenant="else"))
            gate.open.set()
            reported = [await read_all(answer) for answer in answers]
            await read_all(late)
            assert [answer.note for answer in answers] == ["miss"] + ["coalesced"] * 19
            assert all(tokens_of(each) == truth() for each in reported)
            assert late.note == "miss"
            assert answers[1].cached_tokens == [3]
            await h.settle()
            assert len(h.witness.kept_entries) == 2
            await asyncio.sleep(0)
            assert [event.layer for event in h.events(Spared)] == [Layer.COALESCED] * 19

    asyncio.run(run())


def test_a_follower_hears_what_was_said_before_it_came():
    async def run():
        async with house(max_model_len=2048, num_blocks=1024) as h:
            leash = Leash(h.runner, 3)
            leader = await h.open(h.question(1000))
            first = tokens_of(await leader.read())
            follower = await h.open(h.question(1000))
            assert follower.note == "coalesced"
            assert tokens_of(await follower.read())[: len(first)] == first
            leash.free.set()
            assert first + tokens_of(await read_all(leader)) == truth(1000)
            await read_all(follower)

    asyncio.run(run())


def test_the_first_caller_may_leave_and_the_others_get_their_answer():
    async def run():
        async with house() as h:
            gate = Gate(h.service)
            leader, follower = await h.open(), await h.open()
            h.lookup.close(leader)
            gate.open.set()
            reported = await read_all(leader)
            assert [event.reason for _, event in reported] == [FinishReason.CANCELLED]
            assert tokens_of(await read_all(follower)) == truth()

    asyncio.run(run())


def test_the_last_one_to_leave_ends_the_computing_and_nothing_is_kept():
    async def run():
        async with house(max_model_len=2048, num_blocks=1024) as h:
            leash = Leash(h.runner, 3)
            one, other = await h.open(h.question(1000)), await h.open(h.question(1000))
            await one.read()
            h.lookup.close(one)
            h.lookup.close(other)
            leash.free.set()
            while h.service.open_requests():
                await asyncio.sleep(0.001)
            await h.settle()
            assert h.witness.kept_entries == []
            assert h.witness.broken[0] == tuple(truth(1000)[: len(h.witness.broken[0])])
            assert (await h.open(h.question(1000))).note == "miss"

    asyncio.run(run())


def test_a_failure_reaches_all_coalesced_requests_if_the_second_attempt_fails():
    async def run():
        async with house() as h:
            gate = Gate(h.service)
            h.runner.poison |= {"r1", "r1~1"}
            answers = [await h.open() for _ in range(3)]
            gate.open.set()
            for answer in answers:
                assert (await read_all(answer))[-1][1].reason is FinishReason.FAILED
            assert h.witness.kept_entries == []

    asyncio.run(run())


def test_an_urgent_call_does_not_wait_for_a_slow_one():
    async def run():
        async with house() as h:
            gate = Gate(h.service)
            await h.open(h.question(priority=5))
            assert (await h.open(h.question(priority=-1))).note == "miss"
            assert (await h.open(h.question(priority=0))).note == "coalesced"
            gate.open.set()

    asyncio.run(run())


def test_the_sequences_of_a_call_are_found_one_by_one():
    async def run():
        async with house() as h:
            await h.answer(temperature=1.0, given_seed=1, seed=1)
            questions = [h.question(temperature=1.0, given_seed=1, seed=seed) for seed in (1, 2)]
            answer = await h.open(*questions)
            reported = await read_all(answer)
            assert answer.note == "miss"
            assert [tokens_of(reported, i) for i in (0, 1)] == [truth(seed=1), truth(seed=2)]
            twins = await h.open(h.question(7), h.question(7))
            reported = await read_all(twins)
            assert tokens_of(reported, 0) == tokens_of(reported, 1) == truth(7)
            assert h.service.open_requests() == 0

    asyncio.run(run())


def test_cache_directives_are_obeyed():
    async def run():
        async with house() as h:
            with pytest.raises(NotCached):
                await h.answer(control=CacheDirectives(only_if_cached=True))
            assert (await h.answer(control=CacheDirectives(no_store=True)))[0] == "bypass; reason=no_store"
            assert (await h.answer(control=CacheDirectives(ttl=1000.0)))[0] == "miss"
            assert (await h.answer(control=CacheDirectives(no_cache=True)))[0] == "miss"
            assert (await h.answer(control=CacheDirectives(only_if_cached=True)))[0].startswith("hit")
            h.clock.now += 50
            assert (await h.answer(control=CacheDirectives(max_age=60.0)))[0].startswith("hit")
            assert (await h.answer(control=CacheDirectives(max_age=40.0)))[0] == "miss"

    asyncio.run(run())


def test_an_answer_ends_with_its_time_however_often_it_is_asked_for():
    async def run():
        async with house() as h:
            await h.answer()
            h.clock.now += 85
            assert (await h.answer())[0].startswith("hit")
            h.clock.now += 16
            assert (await h.answer())[0] == "miss"

    asyncio.run(run())


def test_a_stale_response_is_served_where_accepted_while_a_new_one_is_computed():
    async def run():
        async with house() as h:
            control = CacheDirectives(ttl=10.0, stale_while_revalidate=20.0)
            await h.answer(control=control)
            h.clock.now += 15
            assert (await h.answer(control=control))[0] == "hit; layer=exact; age=15"
            while h.service.open_requests():
                await asyncio.sleep(0.001)
            await h.settle()
            assert (await h.answer())[0] == "hit; layer=exact; age=0"
            h.clock.now += 15
            assert (await h.answer())[0] == "miss"

    asyncio.run(run())


def test_a_clock_that_jumps_back_serves_nothing_from_the_future():
    async def run():
        async with house() as h:
            await h.answer()
            h.clock.now -= 3600
            assert (await h.answer())[0] == "miss"

    asyncio.run(run())


def test_what_is_cleared_is_gone_also_what_was_being_computed():
    async def run():
        async with house() as h:
            for tag in (EVERYTHING, tenant_tag("default"), user_tag("default", "news")):
                control = CacheDirectives(tags=("news",))
                await h.answer(control=control)
                assert (await h.answer())[0].startswith("hit")
                await h.lookup.clear(user_tag("default", "sports"))
                await h.lookup.clear(tenant_tag("else"))
                assert (await h.answer())[0].startswith("hit")
                assert await h.lookup.clear(tag) == {"memory": True}
                gate = Gate(h.service)
                under_way = await h.open(h.question(control=control))
                assert under_way.note == "miss"
                await h.lookup.clear(tag)
                gate.open.set()
                await read_all(under_way)
                await h.settle()
                assert (await h.answer(control=CacheDirectives(no_store=False, tags=("news",))))[0] == "miss"
                await h.lookup.clear(EVERYTHING)

    asyncio.run(run())


def test_a_wrong_answer_is_not_kept_again():
    async def run():
        async with house() as h:
            for id_of_the_wrong_one in ("r1", "r2"):
                await h.answer()
                served = h.lookup.served(id_of_the_wrong_one)
                assert served.tenant == "default"
                await h.lookup.bar(served)
                for _ in range(2):
                    assert await h.answer() == ("miss", truth())
            assert h.lookup.served("unknown") is None

    asyncio.run(run())


def test_another_level_answers_after_the_exact_cache_and_its_failure_is_a_miss():
    async def run():
        level = Level()
        async with house(levels=[level]) as h:
            level.reply = RuntimeError("no index")
            assert (await h.answer())[0] == "miss"
            entry = replace(h.witness.kept_entries[0], tokens=(9, 9))
            level.reply = Hit(entry, Layer.SEMANTIC, b"k" * 32, 3.0, 0.97)
            assert (await h.answer())[0].startswith("hit; layer=exact")
            assert await h.answer(6) == ("hit; layer=semantic; age=3; similarity=0.970", [9, 9])
            assert level.started
            assert await h.answer(temperature=1.0, given_seed=3, seed=3) == ("miss", truth(seed=3))
            assert h.lookup.sizes()[Layer.SEMANTIC] == {"memory": StoreFacts(3, 30, 0)}
        assert not level.started

    asyncio.run(run())


def test_a_partition_is_all_but_the_turn_and_the_room_for_the_answer():
    async def run():
        async with house(levels=[Level()]) as h:

            def partition(text="hello", context=b"c", max_tokens=5, **more):
                question = h.question(max_tokens, (1, len(text)), **more)
                return h.lookup.query(question._replace(turn=lambda: Turn(text, context))).partition

            assert partition() == partition("good day") == partition(max_tokens=9) != b""
            others = [
                partition(context=b"d"),
                partition(tenant="else"),
                partition(salt="else"),
                partition(adapter="else"),
                partition(eos_token_ids=frozenset({5})),
                partition(answered=(5,)),
            ]
            assert len({partition(), *others}) == 7

    asyncio.run(run())


def test_a_full_queue_refuses_what_must_be_computed_and_serves_what_need_not():
    async def run():
        async with house(limits=Limits(1, 10_000)) as h:
            await h.answer()
            gate = Gate(h.service)
            await h.open(h.question(6))
            with pytest.raises(Refused):
                await h.open(h.question(7))
            assert (await h.open()).note.startswith("hit")
            assert (await h.open(h.question(6))).note == "coalesced"
            gate.open.set()

    asyncio.run(run())


def test_without_a_cache_everything_is_computed_and_nothing_is_said():
    async def run():
        made, _ = hashing_engine()
        service = Service(made, Limits(64, 10_000))
        service.start()
        lookup = CacheLookup(service)
        h = House(lookup, service, None, None, None, None)
        for _ in range(2):
            assert await h.answer() == ("", truth())
        with pytest.raises(NotCached):
            await h.answer(control=CacheDirectives(only_if_cached=True))
        service.stop()

    asyncio.run(run())


def test_a_cached_stream_is_replayed_in_chunks():
    async def run():
        async with house(max_model_len=256, num_blocks=128) as h:
            await h.answer(100)
            answer = await h.open(h.question(100))
            pieces = []
            while not answer.exhausted:
                pieces.append(tokens_of(await answer.read()))
            assert [token for piece in pieces for token in piece] == truth(100)
            assert len(pieces) >= 4
            whole = await h.open(h.question(100), interval=0)
            assert [type(event) for _, event in await whole.read()] == [Emitted, Finished]

    asyncio.run(run())


ENTRY = Entry((1,), FinishReason.STOP, 1, 1.0, 0.0, 1.0, 1.0)
EXACT = Hit(ENTRY, Layer.EXACT, b"k", 12.4)
NEAR = Hit(ENTRY, Layer.SEMANTIC, b"k", 3.0, 0.9712)


@pytest.mark.parametrize(
    ("layers", "hits", "words"),
    [
        ([None], [Miss()], "miss"),
        ([Layer.PARTIAL], [Miss()], "partial"),
        ([Layer.COALESCED], [Miss()], "coalesced"),
        ([Layer.EXACT], [EXACT], "hit; layer=exact; age=12"),
        ([Layer.SEMANTIC], [NEAR], "hit; layer=semantic; age=3; similarity=0.971"),
        ([Layer.EXACT, Layer.SEMANTIC], [EXACT, NEAR], "hit; layer=exact+semantic; age=12; similarity=0.971"),
        ([Layer.EXACT, None], [EXACT, Miss()], "miss"),
        ([Layer.EXACT, Layer.PARTIAL], [EXACT, Miss()], "partial"),
        ([Layer.EXACT, Layer.COALESCED], [EXACT, Miss()], "coalesced"),
    ],
)
def test_a_call_is_a_hit_only_where_nothing_of_it_was_computed(layers, hits, words):
    assert cache_header(layers, hits) == words


TOKENS = tuple(range(100))
REPLAYED = Entry(
    TOKENS,
    FinishReason.STOP,
    3,
    1.0,
    0.0,
    60.0,
    60.0,
    logprobs=tuple(TokenLogprob(token, -1.0, 1, ()) for token in TOKENS),
    stop_token=99,
    pulses=(Pulse(0.01, 1), Pulse(0.03, 60), Pulse(0.05, 39)),
)


def pieces(answer):
    reported = answer._unread
    assert [type(event) for _, event in reported] == [Emitted] * (len(reported) - 1) + [Finished]
    for _, event in reported[:-1]:
        assert tuple(score.token for score in event.logprobs) == event.tokens
    end = reported[-1][1]
    assert (end.reason, end.stop_token, end.prompt_tokens, end.output_tokens) == (
        FinishReason.STOP,
        99,
        3,
        100,
    )
    assert answer.cached_tokens == [3]
    assert tuple(token for _, event in reported[:-1] for token in event.tokens) == TOKENS
    return [len(event.tokens) for _, event in reported[:-1]]


def answer(interval):
    return Answer([Request("r", (1, 2, 3))], interval)


def test_a_replay_without_streaming_is_sent_in_one_part():
    whole = answer(False)
    tell_whole(whole, 0, REPLAYED)
    assert pieces(whole) == [100]


@pytest.mark.parametrize(
    ("pace", "lengths"),
    [(Pace.IMMEDIATE, [TOKENS_AT_ONCE] * 3 + [4]), (Pace.ORIGINAL, [1, 60, 39])],
)
def test_a_replayed_stream_has_chunks_and_ends_with_the_last(pace, lengths):
    streamed = answer(True)
    asyncio.run(tell_paced(streamed, 0, REPLAYED, pace))
    assert pieces(streamed) == lengths


def test_the_original_pace_takes_its_time():
    async def run():
        slow = replace(REPLAYED, pulses=(Pulse(0.0, 50), Pulse(30.0, 50)))
        streamed = answer(True)
        task = asyncio.create_task(tell_paced(streamed, 0, slow, Pace.ORIGINAL))
        assert len(await streamed.read()) == 1
        await asyncio.sleep(0.01)
        assert not task.done()
        task.cancel()

    asyncio.run(run())


def test_an_answer_without_tokens_ends_at_once():
    empty = answer(True)
    asyncio.run(tell_paced(empty, 0, replace(REPLAYED, tokens=(), logprobs=(), pulses=()), Pace.ORIGINAL))
    assert [type(event) for _, event in empty._unread] == [Finished]
