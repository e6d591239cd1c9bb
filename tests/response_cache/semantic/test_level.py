"""The semantic cache on the road of a call: hits, vetoes of the road, audits, and everything that must be a miss."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import islice, permutations

import pytest

from headrace.core.events import Audited, Layer, LookedUp, Scope
from headrace.core.tenancy.gate import Limits
from headrace.response_cache.exact import ExactCache
from headrace.response_cache.lookup import CacheLookup
from headrace.response_cache.query import Turn
from headrace.response_cache.rules import circuit_breaker
from headrace.response_cache.rules.cacheability import NO_DIRECTIVES, CacheDirectives
from headrace.response_cache.rules.judge import Nearest
from headrace.response_cache.rules.pairs import Verdicts
from headrace.response_cache.rules.tags import EVERYTHING, TagVersions
from headrace.response_cache.semantic.level import Mode, SemanticCache
from headrace.response_cache.stores.memory import MemoryStore
from headrace.response_cache.stores.tier import Tier
from headrace.service.service import Service
from headrace.testing.engines import hashing_engine
from headrace.testing.hashing_runner import VOCAB, expected_tokens
from tests.doubles.cached_services import FINGERPRINT, House, Witness
from tests.doubles.clock import Clock
from tests.doubles.services import Book
from tests.response_cache.semantic.scenes import Words, librarian

NEUTRAL = (
    *("also", "an", "and", "any", "are", "been", "could", "does", "got", "hello"),
    *("here", "hi", "how", "its", "just", "okay", "please", "so", "some", "tell"),
)
"""Words that change no question."""
ALL = frozenset(range(VOCAB))  # whatever is drawn ends the answer: it stops, and is whole


class Scene(House):
    """A house with a semantic cache; ``said`` is what every answer's text is."""

    said = "yes"
    semantic: SemanticCache
    embedder: Words
    exact: ExactCache
    desk: object

    async def ask(self, text: str, context=b"c", control=NO_DIRECTIVES, tenant="t", max_tokens=5, eos=ALL):
        """Ask ``text``: the note, and its last look-up's reason."""
        prompt = (1, *text.encode())
        question = self.question(max_tokens, prompt, control=control, tenant=tenant, eos_token_ids=eos)
        answer = await self.lookup.open([question._replace(turn=lambda: Turn(text, context))])
        while await answer.read():
            pass
        self.lookup.close(answer)
        await self.settle()
        await self.desk_done()
        last = [event for event in self.events(LookedUp) if event.layer is Layer.SEMANTIC][-1:]
        return answer.note, last[0].reason if last else None

    async def wrongs(self, tenant, most):
        """How many wrong answers, each in a partition of its own, switch ``tenant`` off; at most ``most``."""
        for number in range(most):
            context = b"%d" % number
            _, why = await self.ask(f"shoes {number}", tenant=tenant, context=context)
            if why == "switched_off":
                return number
            self.said = "never"
            assert await self.ask(f"shoes {number} please", tenant=tenant, context=context) == (
                "miss",
                "audit",
            )
            self.said = "yes"
        return most

    async def desk_done(self):
        done = threading.Event()
        self.desk._add_task(done.set)
        await asyncio.to_thread(done.wait, 60)
        await asyncio.sleep(0)  # what it told the loop has been heard


@asynccontextmanager
async def scene(
    mode=Mode.SERVE, audit=0.0, deadline=60.0, max_error=0.1, drafter=None, verdicts=None, **more
):
    if mode is Mode.DRAFT:
        more["judge"] = Nearest(0.8)
    made, runner = hashing_engine(drafter=drafter)
    book, clock, witness, embedder = Book(), Clock(), Witness(), Words()
    service = Service(made, Limits(64, 10_000), [book])
    exact = ExactCache([Tier(MemoryStore(1 << 20, clock))], TagVersions(), clock)
    desk = librarian(embedder, wall=clock, **more)
    semantic = SemanticCache(
        desk,
        exact,
        mode,
        lambda tokens: house.said,
        service.note,
        deadline=deadline,
        audit=audit,
        max_error=max_error,
        confidence=0.95,
        verdicts=verdicts,
    )
    lookup = CacheLookup(
        service, exact, FINGERPRINT, ttl=100.0, levels=[semantic], listeners=[semantic, witness]
    )
    house = Scene(lookup, service, runner, book, clock, witness)
    house.semantic, house.embedder, house.exact, house.desk = semantic, embedder, exact, desk
    await lookup.start()
    try:
        yield house
    finally:
        embedder.hold.set()
        await lookup.stop()


def test_a_near_question_gets_the_kept_answer():
    async def go():
        async with scene() as h:
            assert await h.ask("shoes red") == ("miss", "no_neighbour")
            note, _ = await h.ask("shoes red nice")
            assert note.startswith("hit; layer=semantic; age=0; similarity=0.")
            assert (await h.ask("shoes red"))[0].startswith("hit; layer=exact")
            assert await h.ask("fresh bread now") == ("miss", "low_score")
            assert await h.ask("shoes not red") == ("miss", "negation")
            assert h.lookup.sizes()[Layer.SEMANTIC]["memory"].entries == 3

    asyncio.run(go())


@pytest.mark.parametrize(
    ("mode", "same", "why"),
    [(Mode.SERVE, False, "judge_refused"), (Mode.SERVE, True, ""), (Mode.SHADOW, True, "shadow")],
)
def test_the_served_models_verdict_is_needed(mode, same, why):
    async def go():
        verdicts = Verdicts()
        async with scene(mode, verdicts=verdicts) as h:
            await h.ask("shoes red")
            assert await h.ask("shoes red nice") == ("miss", "judge_pending")
            pair = verdicts.next()
            assert pair is not None
            assert (pair.tenant, pair.asked, pair.cached) == ("t", "shoes red nice", "shoes red")
            verdicts.settle(pair, same)
            h.desk.forget(next(row.key for row in h.desk._rows._rows.values() if row.question == pair.asked))
            await h.desk_done()
            note, reason = await h.ask("shoes red nice please")
            assert reason == why
            assert note.startswith("hit; layer=semantic") == (why == "")
            assert verdicts.waiting == 0

    asyncio.run(go())


def test_verdicts_of_one_tenant_are_not_anothers():
    async def go():
        verdicts = Verdicts()
        async with scene(verdicts=verdicts) as h:
            for tenant in ("a", "b"):
                await h.ask("shoes red", tenant=tenant)
                assert await h.ask("shoes red nice", tenant=tenant) == ("miss", "judge_pending")
            assert verdicts.waiting == 2

    asyncio.run(go())


class Asked:
    """A drafter that only notes the cached answers of the requests it is asked for."""

    idle = False

    def __init__(self):
        self.drafts = []
        self.seconds = {}

    def draft(self, draft_rows, load):
        self.drafts += [draft_row.request.cached_answer for draft_row in draft_rows]
        return [None] * len(draft_rows)

    def next_draft_step(self, request):
        return 0

    def observed(self, rows, drawn, seconds, drafted):
        pass

    def verified(self, request_id, proposal, accepted):
        pass

    def ended(self, request, tokens):
        pass


def test_as_a_draft_a_near_answer_is_proposed_and_never_served():
    """The wording differs in a word that forbids serving; a draft needs no permission."""

    async def go():
        asked, first = Asked(), (1, *b"shoes red")
        said = expected_tokens(first, 0, 6, frozenset())
        stops = {"eos": frozenset({said[-1]}), "max_tokens": 20}
        async with scene(Mode.DRAFT, audit=0.5, drafter=asked) as h:
            assert await h.ask("shoes red", **stops) == ("miss", "no_neighbour")
            assert set(asked.drafts) == {()}
            asked.drafts.clear()
            assert await h.ask("shoes not red", **stops) == ("miss", "draft")
            assert set(asked.drafts) == {tuple(expected_tokens(first, 0, 6, stops["eos"]))}
            asked.drafts.clear()
            assert await h.ask("fresh bread now", **stops) == ("miss", "low_score")
            assert set(asked.drafts) == {()}
            assert not h.events(Audited)

    asyncio.run(go())


def test_a_hit_becomes_no_entry_of_its_own():
    async def go():
        async with scene() as h:
            await h.ask("shoes red")
            await h.ask("shoes red nice")
            assert h.lookup.sizes()[Layer.SEMANTIC]["memory"].entries == 1
            assert (await h.ask("shoes red nice"))[0].startswith("hit; layer=semantic")

    asyncio.run(go())


def test_two_tenants_and_two_contexts_never_meet():
    async def go():
        async with scene() as h:
            await h.ask("shoes red", tenant="a")
            assert await h.ask("shoes red nice", tenant="b") == ("miss", "no_neighbour")
            assert await h.ask("shoes red nice", tenant="a", context=b"after other turns") == (
                "miss",
                "no_neighbour",
            )
            assert (await h.ask("shoes red nice", tenant="a"))[0].startswith("hit")

    asyncio.run(go())


def test_only_answers_that_stopped_of_themselves_are_near_answers():
    async def go():
        async with scene() as h:
            await h.ask("shoes red", eos=frozenset())
            assert await h.ask("shoes red nice", eos=frozenset()) == ("miss", "no_neighbour")

    asyncio.run(go())


def test_an_answer_that_is_gone_or_cleared_is_no_hit_and_its_row_goes():
    async def go():
        async with scene() as h:
            await h.ask("shoes red")
            h.clock.now += 101.0
            assert await h.ask("shoes red nice") == ("miss", "gone")
            await h.lookup.clear(EVERYTHING)
            await h.desk_done()
            assert await h.ask("shoes red thanks") == ("miss", "no_neighbour")

    asyncio.run(go())


def test_what_the_caller_says_of_age_and_length_counts():
    async def go():
        async with scene() as h:
            await h.ask("shoes red")
            h.clock.now += 50.0
            assert await h.ask("shoes red nice", control=CacheDirectives(max_age=10.0)) == (
                "miss",
                "too_old",
            )
            assert (await h.ask("shoes red thanks", control=CacheDirectives(only_if_cached=True)))[
                0
            ].startswith("hit")

    asyncio.run(go())


def test_a_longer_answer_than_asked_for_is_not_cut():
    async def go():
        async with scene() as h:
            await h.ask("shoes red")
            key = h.lookup._served[f"r{h.asked}"].key
            entry = await h.exact.at(key)
            for tier in h.exact._tiers:
                await tier.keep(key, replace(entry, tokens=(5,) * 6), 50.0)
            assert await h.ask("shoes red nice") == ("miss", "longer_than_asked")
            assert (await h.ask("shoes red thanks", max_tokens=6))[0].startswith("hit")

    asyncio.run(go())


def test_a_slow_encoder_is_a_miss_within_the_deadline_and_is_then_left_alone(monkeypatch):
    monkeypatch.setattr(circuit_breaker, "OPEN_SECONDS", 3600.0)

    async def go():
        async with scene(deadline=0.02) as h:
            h.embedder.hold.clear()
            reasons = []
            for number in range(7):
                question = h.question(5, (1, number), tenant="t", eos_token_ids=ALL)
                answer = await h.lookup.open([question._replace(turn=partial(Turn, f"shoes {number}", b"c"))])
                while await answer.read():
                    pass
                reasons.append([e for e in h.events(LookedUp) if e.layer is Layer.SEMANTIC][-1].reason)
            assert reasons == ["late"] * 5 + ["resting"] * 2
            h.embedder.hold.set()
            await h.desk_done()

    asyncio.run(go())


def test_an_encoder_that_fails_is_a_miss():
    async def go():
        async with scene() as h:
            h.embedder.error = RuntimeError("no memory")
            assert await h.ask("shoes red") == ("miss", "failed")
            h.embedder.error = None
            assert await h.ask("shoes blue") == ("miss", "no_neighbour")

    asyncio.run(go())


def test_shadow_serves_nothing_and_compares_everything():
    async def go():
        async with scene(Mode.SHADOW) as h:
            await h.ask("shoes red")
            assert await h.ask("shoes red nice") == ("miss", "shadow")
            h.said = "never"
            assert await h.ask("shoes red thanks") == ("miss", "shadow")
            assert [event.right for event in h.events(Audited)] == [True, False]

    asyncio.run(go())


def test_audits_that_exceed_the_error_bound_disable_only_that_tenant():
    async def go():
        async with scene(audit=1.0, max_error=0.01) as h:
            assert await h.wrongs("a", 20) < 20
            assert await h.ask("hats blue", tenant="a", context=b"another") == ("miss", "switched_off")
            await h.ask("shoes red", tenant="b")
            assert await h.ask("shoes red nice", tenant="b") == ("miss", "audit")
            refuted = [event.refuted for event in h.events(Audited) if event.refuted is not None]
            assert refuted == [Scope.TENANT]
            assert {event.right for event in h.events(Audited)[:-1]} == {False}

    asyncio.run(go())


def test_right_audits_of_one_tenant_do_not_speak_for_another():
    async def go():
        async with scene(audit=1.0) as h:
            alone = await h.wrongs("a", 20)
        async with scene(audit=1.0) as h:
            await h.ask("shoes red", tenant="b")
            for words in islice(permutations(NEUTRAL, 2), 60):
                assert await h.ask(f"shoes red {' '.join(words)}", tenant="b") == ("miss", "audit")
            assert await h.wrongs("a", 20) == alone < 20

    asyncio.run(go())


def test_a_partition_that_alone_is_wrong_is_switched_off_alone():
    async def go():
        async with scene(audit=1.0, max_error=0.2) as h:
            await h.ask("shoes red")
            for words in islice(permutations(NEUTRAL, 2), 60):
                await h.ask(f"shoes red {' '.join(words)}")
            for number in range(20):
                h.said = 3 * "abcdefghijklmnopqrst"[number]
                _, why = await h.ask(f"shoes red {NEUTRAL[number]}", context=b"wrong")
                if why == "switched_off":
                    break
            assert why == "switched_off"
            assert (await h.ask("shoes red perhaps"))[1] == "audit"
            refuted = [event.refuted for event in h.events(Audited) if event.refuted is not None]
            assert refuted == [Scope.PARTITION]

    asyncio.run(go())


def test_right_audits_change_nothing():
    async def go():
        async with scene(audit=0.5, max_error=0.2) as h:
            await h.ask("shoes red")
            notes = [await h.ask(f"shoes red {word}") for word in NEUTRAL]
            audited = [why for note, why in notes if note == "miss"]
            assert audited
            assert set(audited) == {"audit"}
            assert len(h.events(Audited)) == len(audited)
            assert any(note.startswith("hit; layer=semantic") for note, _ in notes)

    asyncio.run(go())


def test_feedback_takes_the_entry_from_its_neighbours_and_leaves_it_to_itself():
    async def go():
        async with scene() as h:
            await h.ask("shoes red")
            assert (await h.ask("shoes red nice"))[0].startswith("hit; layer=semantic")
            served = h.lookup.served(f"r{h.asked}")
            assert served.layer is Layer.SEMANTIC
            await h.lookup.bar(served)
            await h.desk_done()
            assert (await h.ask("shoes red nice"))[0] == "miss"
            assert (await h.ask("shoes red"))[0].startswith("hit; layer=exact")

    asyncio.run(go())


def test_a_request_with_a_tag_is_served_only_entries_with_that_tag():
    async def go():
        async with scene() as h:
            mine, ours = CacheDirectives(tags=("mine",)), CacheDirectives(tags=("ours",))
            await h.ask("shoes red", control=mine)
            for control in (mine, NO_DIRECTIVES):
                note, _ = await h.ask("shoes red nice", control=control)
                assert note.startswith("hit; layer=semantic")
            assert await h.ask("shoes red nice", control=ours) == ("miss", "other_tags")

    asyncio.run(go())


def test_a_request_without_a_turn_is_not_asked_about():
    async def go():
        async with scene() as h:
            assert (await h.answer())[0] == "miss"
            assert h.events(LookedUp)[-1].reason == "no_turn"
            assert h.embedder.texts == []

    asyncio.run(go())


def test_what_must_be_computed_goes_beside_what_is_near_and_the_tenants_own():
    async def go():
        async with scene(threshold=0.99) as h:
            submitted = []
            submit = h.service.thread.submit
            h.service.thread.submit = lambda request: (submitted.append(request), submit(request))
            for tenant in ("t", "u"):
                await h.ask("shoes red", tenant=tenant)
                for text in ("shoes red nice", "shoes red now", "hats blue"):
                    assert (await h.ask(text, tenant=tenant))[0] == "miss"
            named = h.question(5, (1, 2), tenant="t", affinity="own", eos_token_ids=ALL)
            answer = await h.lookup.open([named._replace(turn=lambda: Turn("shoes red again", b"c"))])
            await answer.read()
            h.lookup.close(answer)
            mine, others = ([request.affinity for request in submitted[i : i + 4]] for i in (0, 4))
            assert mine[0] == mine[3] == ""
            assert mine[1] == mine[2] != ""
            assert mine[1] != others[1] == others[2] != ""
            assert submitted[-1].affinity == "own"

    asyncio.run(go())
