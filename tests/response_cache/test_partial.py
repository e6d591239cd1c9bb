import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from headrace.core.drafting.acceptance import Acceptance
from headrace.core.drafting.draft_budget import DraftBudget
from headrace.core.drafting.drafter import BudgetedDrafter
from headrace.core.drafting.proposal import DraftRow
from headrace.core.drafting.suffix import SuffixProposer
from headrace.core.events import Emitted, Finished, Layer, LookedUp, Spared
from headrace.core.request import FinishReason, SamplingParams
from headrace.response_cache.lookup import CacheLookup
from headrace.response_cache.partial import (
    MIN_TOKENS,
    Partial,
    UnfinishedAnswer,
    UnfinishedAnswers,
)
from headrace.response_cache.query import LookupRequest
from headrace.response_cache.rules.cacheability import CacheDirectives
from headrace.response_cache.rules.tags import EVERYTHING, tenant_tag
from tests.doubles.cached_services import House, house, truth
from tests.doubles.services import SOON, read_all, tokens_of

WHOLE = {"max_model_len": 512, "num_blocks": 400}


def partial(resume_bytes=1 << 20):
    return Partial(resume_bytes)


@contextmanager
def halted(h: House, after: int) -> Iterator[None]:
    """The engine stops before step ``after`` + 1, so that an answer is in its middle however fast the machine is."""
    launch, steps, going_on = h.runner.launch, iter(range(after)), threading.Event()

    def launched(plan, now):
        if next(steps, None) is None:
            going_on.wait(SOON)
        launch(plan, now)

    h.runner.launch = launched
    try:
        yield
    finally:
        h.runner.launch = launch
        going_on.set()


async def hear(answer, count):
    heard = 0
    while heard < count:
        reported = await asyncio.wait_for(answer.read(), SOON)
        heard += sum(len(event.tokens) for _, event in reported if isinstance(event, Emitted))
    assert heard == count


async def idle(h: House) -> None:
    """Until the engine holds nothing."""
    await asyncio.wait_for(h.service._idle.wait(), SOON)


async def hang_up(h, after=20, **question):
    """Ask for a long answer and leave it; how many tokens of it are kept."""
    with halted(h, after):
        answer = await h.open(h.question(400, **question))
        await hear(answer, after)
        h.lookup.close(answer)
    await idle(h)
    assert [len(tokens) for tokens in h.witness.broken] == [after]
    return after


def test_a_longer_answer_goes_on_where_a_shorter_one_was_cut():
    async def run():
        async with house(partial=partial(), **WHOLE) as h:
            assert await h.answer(20) == ("miss", truth(20))
            before = h.runner.computed_tokens
            assert await h.answer(60) == ("partial", truth(60))
            assert h.runner.computed_tokens - before <= 41
            await asyncio.sleep(0)
            spared = [event for event in h.events(Spared) if event.layer is Layer.PARTIAL]
            assert [(event.prompt_tokens, event.output_tokens) for event in spared] == [(0, 20)]
            assert [e.outcome for e in h.events(LookedUp) if e.layer is Layer.PARTIAL] == ["miss", "hit"]

    asyncio.run(run())


def test_a_shorter_answer_is_the_beginning_of_a_longer_one():
    async def run():
        async with house(partial=partial(), **WHOLE) as h:
            await h.answer(60)
            before = h.runner.computed_tokens
            assert await h.answer(20) == ("partial", truth(20))
            assert h.runner.computed_tokens == before
            assert (await h.answer(20))[0].startswith("hit; layer=exact")

    asyncio.run(run())


def test_an_answer_that_ended_by_itself_serves_every_greater_length():
    async def run():
        async with house(partial=partial(), **WHOLE) as h:
            stop = frozenset({truth(30)[24]})
            note, tokens = await h.answer(100, eos_token_ids=stop)
            assert note == "miss"
            before = h.runner.computed_tokens
            answer = await h.open(h.question(200, eos_token_ids=stop))
            reported = await read_all(answer)
            assert tokens_of(reported) == tokens
            assert reported[-1][1].reason is FinishReason.STOP
            assert reported[-1][1].stop_token in stop
            assert h.runner.computed_tokens == before
            h.lookup.close(answer)

    asyncio.run(run())


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "given_seed": 7, "seed": 7}])
def test_a_resumed_request_gets_its_known_tokens_at_once_and_the_rest_as_computed(sampling):
    async def run():
        async with house(partial=partial(), **WHOLE) as h:
            kept = await hang_up(h, **sampling)
            before = h.runner.computed_tokens
            answer = await h.open(h.question(400, **sampling))
            ((_, first),) = await answer.read()
            expected = truth(400, seed=sampling.get("seed", 0))
            assert list(first.tokens) == expected[:kept]
            reported = await read_all(answer)
            assert [*first.tokens, *tokens_of(reported)] == expected
            assert reported[-1][1].output_tokens == 400
            assert h.runner.computed_tokens - before <= 400 - kept + 8
            assert answer.note == "partial"
            h.lookup.close(answer)

    asyncio.run(run())


@pytest.mark.parametrize(
    "other",
    [
        {"prompt": (1, 2, 4)},
        {"tenant": "else"},
        {"salt": "salt"},
        {"adapter": "adapter"},
        {"temperature": 1.0, "given_seed": 1, "seed": 1},
        {"control": CacheDirectives(no_store=True)},
        {"control": CacheDirectives(no_cache=True)},
    ],
    ids=str,
)
def test_nothing_is_taken_up_by_another_request(other):
    async def run():
        async with house(partial=partial(), **WHOLE) as h:
            await hang_up(h)
            answer = await h.open(h.question(400, **other))
            assert answer.note.partition(";")[0] in ("miss", "bypass")
            reported = await read_all(answer)
            assert tokens_of(reported) == truth(
                400, **{name: other[name] for name in ("prompt", "seed") if name in other}
            )
            h.lookup.close(answer)

    asyncio.run(run())


def test_a_sampled_answer_without_a_seed_is_never_taken_up():
    async def run():
        async with house(partial=partial(), **WHOLE) as h:
            for _ in range(2):
                answer = await h.open(h.question(100, temperature=1.0, seed=h.asked))
                assert answer.note.startswith("bypass")
                await read_all(answer)
                h.lookup.close(answer)
            assert not [event for event in h.events(LookedUp) if event.layer is Layer.PARTIAL]

    asyncio.run(run())


def test_with_log_probabilities_an_answer_is_computed_whole():
    async def run():
        async with house(partial=partial(), **WHOLE) as h:
            asked = h.question(400)
            scored = replace(asked.request.params, logprobs=1)
            for _ in range(2):
                h.asked += 1
                request = replace(
                    asked.request, id=f"s{h.asked}", params=replace(scored, max_tokens=50 + h.asked)
                )
                answer = await h.lookup.open([LookupRequest(request)])
                assert answer.note == "miss"
                await read_all(answer)
                h.lookup.close(answer)

    asyncio.run(run())


@pytest.mark.parametrize("tag", [EVERYTHING, tenant_tag("default")])
def test_what_has_been_cleared_is_not_taken_up(tag):
    async def run():
        async with house(partial=partial(), **WHOLE) as h:
            await hang_up(h)
            await h.lookup.clear(tag)
            assert (await h.answer(30))[0] == "miss"

    asyncio.run(run())


def test_what_was_left_before_a_clearing_and_ends_after_it_is_not_taken_up():
    async def run():
        async with house(partial=partial(), **WHOLE) as h:
            with halted(h, 20):
                answer = await h.open(h.question(400))
                await hear(answer, 20)
                await h.lookup.clear(EVERYTHING)
                h.lookup.close(answer)
            await idle(h)
            assert [len(tokens) for tokens in h.witness.broken] == [20]
            assert (await h.answer(30))[0] == "miss"

    asyncio.run(run())


@pytest.mark.parametrize("lengths", [(30,), (30, 60), (60, 30)])
def test_a_wrong_answer_is_not_taken_up(lengths):
    async def run():
        async with house(partial=partial(), **WHOLE) as h:
            notes = [(await h.answer(length))[0] for length in lengths]
            assert notes == ["miss", "partial"][: len(lengths)]
            await h.lookup.bar(h.lookup.served(f"r{len(lengths)}"))
            assert await h.answer(lengths[-1]) == ("miss", truth(lengths[-1]))

    asyncio.run(run())


def test_an_answer_is_as_old_as_what_it_was_taken_up_from():
    async def run():
        async with house(partial=partial(), **WHOLE) as h:
            await h.answer(20)
            h.clock.now += 50
            assert (await h.answer(60, control=CacheDirectives(max_age=40.0)))[0] == "miss"
            assert (await h.answer(30, prompt=(1, 2, 4)))[0] == "miss"
            h.clock.now += 30
            assert (await h.answer(60, prompt=(1, 2, 4)))[0] == "partial"
            h.clock.now += 5
            assert (await h.answer(60, prompt=(1, 2, 4)))[0] == "hit; layer=exact; age=35"
            assert (await h.answer(60, prompt=(1, 2, 4), control=CacheDirectives(max_age=30.0)))[0] == "miss"

    asyncio.run(run())


def test_a_request_with_max_age_does_not_join_a_resumed_older_answer():
    async def run():
        async with house(partial=partial(), **WHOLE) as h:
            await h.answer(20)
            h.clock.now += 50
            with halted(h, 1):
                notes = [
                    (await h.open(h.question(60, control=CacheDirectives(max_age=max_age)))).note
                    for max_age in (None, None, 40.0, 40.0)
                ]
            assert notes == ["partial", "coalesced", "miss", "coalesced"]

    asyncio.run(run())


def test_what_is_taken_up_ends_with_its_time_and_so_does_what_goes_on_from_it():
    async def run():
        async with house(partial=partial(), **WHOLE) as h:
            for prompt in ((1, 2, 3), (1, 2, 4)):
                await h.answer(20, prompt=prompt)
            h.clock.now += 50
            assert (await h.answer(60))[0] == "partial"
            h.clock.now += 51
            assert (await h.answer(60))[0] == "miss"
            assert (await h.answer(60, prompt=(1, 2, 4)))[0] == "miss"

    asyncio.run(run())


def test_what_was_left_serves_no_longer_than_an_answer_would():
    async def run():
        async with house(partial=partial(), **WHOLE) as h:
            await hang_up(h, control=CacheDirectives(ttl=10.0))
            h.clock.now += 11
            assert (await h.answer(30))[0] == "miss"

    asyncio.run(run())


def test_a_clock_that_jumps_back_takes_nothing_up_from_the_future():
    async def run():
        async with house(partial=partial(), **WHOLE) as h:
            await h.answer(20)
            h.clock.now -= 3600
            assert (await h.answer(60))[0] == "miss"

    asyncio.run(run())


def test_a_stale_answer_is_renewed_from_its_beginning():
    async def run():
        async with house(partial=partial(), **WHOLE) as h:
            control = CacheDirectives(ttl=10.0, stale_while_revalidate=20.0)
            await h.answer(20, control=control)
            h.clock.now += 15
            before = h.runner.computed_tokens
            assert (await h.answer(20, control=control))[0] == "hit; layer=exact; age=15"
            await idle(h)
            await h.settle()
            assert h.runner.computed_tokens - before >= 20
            assert (await h.answer(20))[0] == "hit; layer=exact; age=0"
            h.clock.now += 5
            assert (await h.answer(60))[0] == "partial"

    asyncio.run(run())


def test_memory_for_beginnings_is_bounded():
    async def run():
        async with house(partial=partial(resume_bytes=1200), **WHOLE) as h:
            for first in range(3):
                await h.answer(20, prompt=(first, 2, 3))
            assert (await h.answer(30, prompt=(2, 2, 3)))[0] == "partial"
            assert (await h.answer(30, prompt=(0, 2, 3)))[0] == "miss"

    asyncio.run(run())


def drafting(outputs):
    return BudgetedDrafter([outputs], Acceptance(), DraftBudget())


def proposed(outputs, question, tokens, most=1):
    request = question.request
    (found,) = outputs.propose([DraftRow(request, [*request.tokens, *tokens], most)])
    return found and found.tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("cached", [True, False])
def test_outputs_of_all_kinds_are_indexed_for_their_tenant_alone(temperature, cached):
    async def run():
        outputs = SuffixProposer(4)
        async with house(outputs=outputs, drafter=drafting(outputs), **WHOLE) as h:
            if not cached:
                h.lookup = CacheLookup(h.service, outputs=outputs)
            mine, other = h.question(40, temperature=temperature), h.question(40, tenant="else")
            answer = await h.open(mine)
            tokens = tokens_of(await read_all(answer))
            h.lookup.close(answer)
            await idle(h)
            await h.settle()
            assert proposed(outputs, mine, tokens[:10]) == (tokens[10],)
            assert proposed(outputs, other, tokens[:10]) is None
            assert outputs.nbytes > 0
            if cached:
                assert h.lookup.sizes()[Layer.PARTIAL]["outputs"].nbytes == outputs.nbytes
            await h.lookup.clear(tenant_tag("else"))
            assert proposed(outputs, mine, tokens[:10]) == (tokens[10],)
            await h.lookup.clear(tenant_tag("default"))
            assert proposed(outputs, mine, tokens[:10]) is None

    asyncio.run(run())


def test_an_output_that_may_not_be_stored_is_not_indexed():
    async def run():
        outputs = SuffixProposer(4)
        async with house(outputs=outputs, drafter=drafting(outputs), **WHOLE) as h:
            question = h.question(40, control=CacheDirectives(no_store=True))
            tokens = tokens_of(await read_all(await h.open(question)))
            await idle(h)
            assert proposed(outputs, question, tokens[:10]) is None
            assert outputs.counts.outputs == 0

    asyncio.run(run())


def test_parameters_are_part_of_what_an_answer_is():
    async def run():
        async with house(partial=partial(), **WHOLE) as h:
            await hang_up(h)
            request = replace(
                h.question().request, params=SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
            )
            answer = await h.lookup.open([LookupRequest(request)])
            assert answer.note == "miss"
            ends = [event for _, event in await read_all(answer) if isinstance(event, Finished)]
            assert ends[0].reason is FinishReason.LENGTH
            h.lookup.close(answer)

    asyncio.run(run())


KEY, TAGS = b"k" * 32, (("*", 0),)


def beginning(length: int, created: float = 0.0, expires: float = 100.0) -> UnfinishedAnswer:
    return UnfinishedAnswer(tuple(range(length)), 1.0, TAGS, created, expires)


def known(*kept: UnfinishedAnswer) -> UnfinishedAnswers:
    beginnings = UnfinishedAnswers(1 << 20)
    for each in kept:
        beginnings.keep(KEY, each)
    return beginnings


def test_the_longest_is_kept_and_of_equals_the_one_that_lives_longer():
    short, long = beginning(MIN_TOKENS), beginning(20)
    assert known(short, long).find(KEY, TAGS, 1.0) == known(long, short).find(KEY, TAGS, 1.0) == long
    newer = beginning(20, 50.0, 150.0)
    assert known(long, newer).find(KEY, TAGS, 60.0) == known(newer, long).find(KEY, TAGS, 60.0) == newer


def test_it_is_found_until_it_expires_and_within_max_age():
    one = beginning(20, 10.0, 100.0)
    assert known(one).find(KEY, TAGS, 99.0, max_age=90.0) == one
    assert known(one).find(KEY, TAGS, 99.0, max_age=80.0) is None
    assert known(one).find(KEY, TAGS, 100.0) is None
    assert known(one).find(KEY, TAGS, -100.0) is None
    assert known(one).find(KEY, (("*", 1),), 50.0) is None


def test_what_has_ended_makes_room_for_what_is_shorter():
    beginnings = known(beginning(20))
    assert beginnings.find(KEY, TAGS, 100.0) is None
    short = beginning(MIN_TOKENS, 100.0, 200.0)
    beginnings.keep(KEY, short)
    assert beginnings.find(KEY, TAGS, 150.0) == short


def test_a_wrong_one_is_forgotten():
    beginnings = known(beginning(20))
    beginnings.forget(KEY)
    beginnings.forget(KEY)
    assert beginnings.find(KEY, TAGS, 1.0) is None
    assert beginnings.counts()[:2] == (0, 0)
