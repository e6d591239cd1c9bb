"""What a tenant can see does not depend on any other tenant: at every level, in every store.

The same calls of one tenant are made twice: among another tenant's calls, and alone. Notes, tokens, cached tokens and
the tokens that the engine computed (which is what time to the first token is made of) must be equal. Both ask alike on
purpose: equal prompts, equal salts of their own, shared blocks of unequal lengths.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.core.drafting.acceptance import Acceptance
from headrace.core.drafting.draft_budget import DraftBudget
from headrace.core.drafting.drafter import BudgetedDrafter
from headrace.core.drafting.proposal import DraftRow
from headrace.core.drafting.suffix import SuffixProposer
from headrace.core.request import Request, SamplingParams
from headrace.core.tenancy.gate import Limits
from headrace.response_cache.exact import ExactCache
from headrace.response_cache.lookup import CacheLookup
from headrace.response_cache.partial import Partial
from headrace.response_cache.query import LookupRequest, Turn
from headrace.response_cache.rules.cacheability import CacheDirectives
from headrace.response_cache.rules.entry import Seal
from headrace.response_cache.rules.key import Engine
from headrace.response_cache.rules.tags import TagVersions, tenant_tag, user_tag
from headrace.response_cache.semantic.level import Mode, SemanticCache
from headrace.response_cache.semantic.rows import RowStore
from headrace.response_cache.semantic.search_thread import SearchThread
from headrace.response_cache.stores.memcached import MemcachedStore
from headrace.response_cache.stores.memory import MemoryStore
from headrace.response_cache.stores.redis import RedisStore
from headrace.response_cache.stores.sqlite import SQLiteStore
from headrace.response_cache.stores.tier import Tier
from headrace.service.service import Service
from headrace.testing.engines import hashing_engine
from headrace.testing.hashing_runner import VOCAB
from tests.doubles.services import read_all, tokens_of
from tests.doubles.shared_stores import patience
from tests.response_cache.semantic.scenes import Words, librarian

PROMPTS = (tuple(range(1, 14)), tuple(range(1, 21)), (*range(1, 10), 50, 51, 52, 53))
TURNS = ("shoes red", "shoes red please", "shoes red now")
"""What the prompts say, for the level that serves near questions: all of them are near each other."""

SECONDS = 60.0
"""Long enough that a store is never slow: a fault is a miss, and would look like a difference."""


@pytest.fixture(autouse=True, scope="module")
def _patience() -> Iterator[None]:
    with patience():
        yield


class Ask(NamedTuple):
    prompt: int
    max_tokens: int
    seed: int | None
    salt: str
    directives: CacheDirectives
    stops: bool = False  # its first token ends it: only answers that stop are served to near questions


class Clear(NamedTuple):
    tag: bool


calls = st.builds(
    Ask,
    st.sampled_from(range(len(PROMPTS))),
    st.sampled_from([9, 9, 3, 20]),
    st.sampled_from([None, None, 7]),
    st.sampled_from(["", "", "salt"]),
    st.sampled_from(
        [
            CacheDirectives(),
            CacheDirectives(),
            CacheDirectives(tags=("a",)),
            CacheDirectives(no_cache=True),
            CacheDirectives(no_store=True),
        ]
    ),
    st.booleans(),
)
steps = st.lists(
    st.tuples(
        st.sampled_from(["me", "else"]), st.one_of(calls, calls, calls, st.builds(Clear, st.booleans()))
    ),
    min_size=2,
    max_size=14,
)


class Seen(NamedTuple):
    """All that a tenant can find out about one call."""

    note: str
    tokens: tuple[int, ...]
    cached_tokens: int
    computed_tokens: int
    proposed: tuple[int, ...]


async def at_rest(desk: SearchThread) -> None:
    """Until all that the semantic cache was told has been done."""
    done = threading.Event()
    desk._add_task(done.set)
    assert await asyncio.to_thread(done.wait, SECONDS)


async def draft_row(
    lookup: CacheLookup, outputs: SuffixProposer, runner: Any, id: str, tenant: str, call: Ask
) -> Seen:
    params = SamplingParams(
        temperature=float(call.seed is not None), seed=call.seed, max_tokens=call.max_tokens
    )
    prompt = PROMPTS[call.prompt]
    request = Request(
        id,
        prompt,
        params,
        tenant=tenant,
        salt=f"{tenant}\0{call.salt}",
        seed=call.seed or 0,
        eos_token_ids=frozenset(range(VOCAB) if call.stops else ()),
    )
    before = runner.computed_tokens
    answer = await lookup.open(
        [LookupRequest(request, call.directives, turn=lambda: Turn(TURNS[call.prompt], b"context"))]
    )
    tokens = tuple(tokens_of(await read_all(answer)))
    lookup.close(answer)
    while lookup.service.open_requests():
        await asyncio.sleep(0)
    await lookup.settle()
    (draft,) = outputs.propose([DraftRow(request, [*prompt, *tokens[:3]], 4)])
    proposed = draft.tokens if draft else ()
    spent = runner.computed_tokens - before
    return Seen(answer.note, tokens, answer.cached_tokens[0], spent, proposed)


async def seen_by_me(stores: Any, row_store: Any, script: list[tuple[str, Ask | Clear]]) -> list[Seen]:
    outputs = SuffixProposer(4, 1 << 21)
    drafter = BudgetedDrafter([outputs], Acceptance(), DraftBudget(2))
    engine, runner = hashing_engine(num_blocks=400, max_num_seqs=4, drafter=drafter)
    service = Service(engine, Limits(64, 10_000))
    fingerprint = Engine(
        "hash", secrets.token_hex(8), "", "", "", ""
    ).fingerprint()  # servers outlive an example
    partial = Partial(1 << 20)
    tiers = [Tier(store, SECONDS, Seal(b"secret")) for store in stores()]
    versions = TagVersions()
    exact = ExactCache(tiers, versions, lambda: 1e9)
    desk = librarian(Words(), row_store(), wall=lambda: 1e9)
    semantic = SemanticCache(
        desk,
        exact,
        Mode.SERVE,
        lambda tokens: "yes",
        service.note,
        deadline=SECONDS,
        audit=0.0,
        max_error=0.1,
        confidence=0.95,
    )
    lookup = CacheLookup(
        service, exact, fingerprint, levels=[semantic], listeners=[semantic], partial=partial, outputs=outputs
    )
    await lookup.start()
    for tier in tiers:  # as after the first poll of what earlier examples have cleared
        await exact._read_invalidations(tier)
    seen = []
    try:
        for number, (tenant, step) in enumerate(script):
            if isinstance(step, Clear):
                await lookup.clear(user_tag(tenant, "a") if step.tag else tenant_tag(tenant))
            else:
                what = await draft_row(lookup, outputs, runner, f"r{number}", tenant, step)
                seen += [what] if tenant == "me" else []
            await at_rest(desk)
    finally:
        await lookup.stop()
    return seen


@pytest.fixture(params=["memory", "sqlite", "memory and sqlite", "redis", "memcached"])
def stores(request, tmp_path):
    """Makes new stores, the nearest first."""
    opened = iter(range(10**6))

    def make():
        for name in request.param.split(" and "):
            match name:
                case "memory":
                    yield MemoryStore(1 << 20)
                case "sqlite":
                    yield SQLiteStore(tmp_path / f"{next(opened)}.db", 1 << 24)
                case "redis":
                    yield RedisStore(f"redis://127.0.0.1:{request.getfixturevalue('redis_port')}/0")
                case "memcached":
                    yield MemcachedStore("127.0.0.1", request.getfixturevalue("memcached_port"))

    return make


@pytest.fixture
def row_store(tmp_path):
    """Makes a new file for what the semantic cache is rebuilt from."""
    opened = iter(range(10**6))
    return lambda: RowStore(tmp_path / f"{next(opened)}.semantic", Words.name)


@settings(
    max_examples=10,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(script=steps)
def test_what_i_see_is_what_i_would_see_alone(stores, row_store, script):
    mine = [step for step in script if step[0] == "me"]
    assert asyncio.run(seen_by_me(stores, row_store, script)) == asyncio.run(
        seen_by_me(stores, row_store, mine)
    )


def test_the_scene_is_worth_comparing(stores, row_store):
    """Alone, a tenant does see its own earlier calls at every level."""
    one = Ask(0, 9, None, "", CacheDirectives())
    stops = one._replace(stops=True)
    mine = (one, one, one._replace(max_tokens=20), one._replace(prompt=1), stops, stops._replace(prompt=1))
    _, second, longer, prefix, _, near = seen = asyncio.run(
        seen_by_me(stores, row_store, [("me", each) for each in mine])
    )
    notes = [each.note.partition("; age")[0] for each in seen]
    assert notes == ["miss", "hit; layer=exact", "partial", "miss", "miss", "hit; layer=semantic"]
    assert near.computed_tokens == 0
    assert second.computed_tokens == 0
    assert longer.computed_tokens < 20
    assert prefix.cached_tokens >= 12
    assert longer.proposed


def test_anothers_prefix_saves_no_computing_and_is_not_counted(stores, row_store):
    one = Ask(1, 9, None, "", CacheDirectives())
    ((seen),) = asyncio.run(seen_by_me(stores, row_store, [("else", one), ("me", one)]))
    assert (seen.note, seen.cached_tokens, seen.proposed) == ("miss", 0, seen.proposed)
    assert seen.computed_tokens >= len(PROMPTS[1]) + 9 - 1


def test_anothers_near_answer_is_not_served(stores, row_store):
    one = Ask(0, 9, None, "", CacheDirectives(), stops=True)
    ((seen),) = asyncio.run(seen_by_me(stores, row_store, [("else", one), ("me", one._replace(prompt=1))]))
    assert seen.note == "miss"
    assert seen.computed_tokens == len(PROMPTS[1])
