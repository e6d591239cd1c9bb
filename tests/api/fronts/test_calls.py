"""Calls of front ends through an owner's caches and engine: equal outputs, refusals, and faults."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from headrace.api.compile.call import Prompt, Prompted
from headrace.api.compile.policies import PromptPolicy, Rules
from headrace.api.errors import ApiError
from headrace.api.exchange import Hooks
from headrace.api.fronts.front import OwnerConnection, read_hello
from headrace.api.fronts.messages import Refusal, received, sent
from headrace.api.fronts.owner import Owner
from headrace.api.serving import CallNotes
from headrace.core.events import Emitted, Finished
from headrace.core.request import FinishReason, InvalidParameter, Request, SamplingParams
from headrace.core.tenancy.gate import Limits, Reject, RejectReason
from headrace.core.tenancy.quota import Limit, Room
from headrace.response_cache.exact import ExactCache
from headrace.response_cache.lookup import CacheLookup, NotCached
from headrace.response_cache.query import LookupRequest
from headrace.response_cache.rules.cacheability import CacheDirectives
from headrace.response_cache.rules.key import Engine
from headrace.response_cache.rules.tags import TagVersions
from headrace.response_cache.stores.memory import MemoryStore
from headrace.response_cache.stores.tier import Tier
from headrace.service.adapters import AdapterNames, UnknownAdapter
from headrace.service.packing import Frames, frame, packed, unpacked
from headrace.service.service import Refused, Service
from headrace.testing.engines import hashing_engine
from headrace.testing.hashing_runner import expected_tokens
from headrace.text.parsing.catalogue import TOOL_FORMATS
from headrace.text.parsing.machine import Reading
from tests.doubles.services import Leash

pytestmark = pytest.mark.anyio


def asked(name: str, prompt: int = 1, tokens: int = 12, **more) -> LookupRequest:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    request = Request(name, (prompt, 2, 3, 4, 5), params, tenant="t")
    made = Prompt(request.tokens, params, False)
    return LookupRequest(request, prompted=Prompted(made, None, True), **more)


@asynccontextmanager
async def owned(tmp_path, queue: int = 1000, adapters: AdapterNames | None = None):
    engine, runner = hashing_engine()
    service = Service(engine, Limits(queue, 100_000))
    exact = ExactCache([Tier(MemoryStore(1 << 20))], TagVersions())
    lookup = CacheLookup(service, exact, Engine("hash", "", "", "", "", "").fingerprint())
    model = SimpleNamespace(
        rules=Rules("fcfs"),
        max_model_len=128,
        vocab_size=1000,
        prompts=PromptPolicy(),
        cost=None,
        adapters=adapters,
        images=None,
        no_images="text only",
    )
    owner = Owner(lookup, model, CallNotes(), lambda tenant, name: {"x-left": tenant}, Hooks(), False)
    path = str(tmp_path / "calls")
    await lookup.start()
    server = await asyncio.get_running_loop().create_unix_server(owner.connect, path)
    try:
        yield SimpleNamespace(owner=owner, service=service, path=path, lookup=lookup, runner=runner)
    finally:
        server.close()
        await lookup.stop()


async def connected(path: str) -> OwnerConnection:
    front = OwnerConnection(path, similar=False)
    await front.connect()
    return front


async def read(front: OwnerConnection, answer) -> tuple[list[int], list[Finished]]:
    tokens, ends = list[int](), list[Finished]()
    while not answer.exhausted:
        for _, event in await answer.read():
            if type(event) is Emitted:
                tokens += event.tokens
            else:
                ends.append(event)
    front.close(answer)
    return tokens, ends


async def quiet(there) -> None:
    """Nothing is open, and what was computed is stored."""

    def busy() -> bool:
        calls = any(each.open_calls for each in there.owner.connections)
        return calls or bool(there.service.open_requests() or there.lookup._computations._by_key)

    async with asyncio.timeout(10):
        while busy():
            await asyncio.sleep(0.01)


async def test_two_front_ends_get_the_outputs_of_one_process(tmp_path):
    async with owned(tmp_path) as there:
        assert (await read_hello(there.path)).text == (Rules("fcfs"), 128, 1000, False, None, "text only")
        fronts = [await connected(there.path) for _ in range(2)]
        for n, front in enumerate(fronts):
            answer = await front.open([asked(f"r{n}", prompt=n)], interval=1)
            tokens, ends = await read(front, answer)
            request = asked(f"r{n}", prompt=n).request
            assert tokens == expected_tokens(request.tokens, 0, 12, frozenset())
            assert [each.reason for each in ends] == [FinishReason.LENGTH]
            assert front.headers("t", "") == {"x-left": "t"}
        await quiet(there)  # until then it would share the computation of the last one
        again = await fronts[0].open([asked("r9", prompt=1)], interval=1)
        assert (await read(fronts[0], again))[0] == tokens
        assert again.note.startswith("hit")
        await quiet(there)
        for front in fronts:
            front.stop()


async def test_front_ends_know_an_adapter_as_soon_as_it_is_loaded(tmp_path, monkeypatch, caplog):
    store = SimpleNamespace(add=lambda folder: folder.name, retire=lambda digest: None)
    names = AdapterNames(store, ("model",))
    names.add("first", "/adapters/one")
    async with owned(tmp_path, adapters=names) as there:
        fronts = [await connected(there.path) for _ in range(2)]
        assert [[each.name for each in front.adapters] for front in fronts] == [["first"]] * 2
        await names.load("second", "/adapters/two")
        assert [front.adapters.find("second").digest for front in fronts] == ["two", "two"]
        await names.load("second", "/adapters/three", replace=True)
        assert [front.adapters.find("second").digest for front in fronts] == ["three", "three"]
        fronts.append(await connected(there.path))
        await names.unload("second")
        assert [front.adapters.find("second") for front in fronts] == [None] * 3
        with pytest.raises(UnknownAdapter):
            await names.unload("second")
        fronts[0].stop()  # one that ends is not waited for
        await names.load("third", "/adapters/three")
        assert fronts[2].adapters.find("third") == names.find("third")
        monkeypatch.setattr("headrace.api.fronts.owner.ADAPTERS_SECONDS", 0.5)
        monkeypatch.setattr(fronts[1], "_send", lambda message: None)
        await names.load("fourth", "/adapters/four")
        assert "1 front ends do not answer" in caplog.text
        assert names.find("fourth").digest == "four"
        for front in fronts[1:]:
            front.stop()


async def test_a_front_end_whose_server_cannot_be_described_ends_with_the_error(
    tmp_path, monkeypatch, caplog
):
    async with owned(tmp_path) as there:
        monkeypatch.setattr(there.owner, "hello", lambda: {}["rules"])
        with pytest.raises(ConnectionError, match="cannot describe its model: KeyError\\('rules'\\)"):
            await asyncio.wait_for(read_hello(there.path), 60)
        assert not there.owner.connections
    assert "cannot be described" in caplog.text


async def test_the_reasons_for_a_refusal_cross(tmp_path):
    async with owned(tmp_path, queue=1) as there:
        front = await connected(there.path)
        with pytest.raises(Refused) as refused:
            await front.open([asked("a"), asked("b", prompt=7)])
        assert refused.value.verdict.retry_after == 0
        with pytest.raises(NotCached):
            await front.open([asked("c", control=CacheDirectives(only_if_cached=True))])
        leash = Leash(there.runner, 3)
        answer = await front.open([asked("d", prompt=8, tokens=100)])
        with pytest.raises(InvalidParameter, match="already in use"):
            await front.open([asked("d", prompt=8, tokens=100)])
        front.close(answer)
        leash.free.set()
        assert [type(event) for _, event in await answer.read()][-1] is Finished
        await quiet(there)
        front.stop()


async def test_a_call_that_fails_at_the_owner_fails_at_its_front_end(tmp_path):
    async with owned(tmp_path) as there:
        front = await connected(there.path)
        there.owner.headers = lambda tenant, name: {}[tenant]
        with pytest.raises(ApiError) as failed:
            await front.open([asked("a")])
        assert failed.value.status == 500
        await quiet(there)
        front.stop()


async def test_an_abort_at_the_owner_ends_the_call_at_its_front_end(tmp_path):
    async with owned(tmp_path) as there:
        front = await connected(there.path)
        leash = Leash(there.runner, 3)
        answer = await front.open([asked("a", tokens=100)])
        there.owner.notes.under_way("a").abort()
        leash.free.set()
        _, ends = await read(front, answer)
        assert [each.reason for each in ends] == [FinishReason.CANCELLED]
        await quiet(there)
        front.stop()


@pytest.mark.parametrize("seed", range(3))
async def test_each_call_ends_once_while_front_ends_end_and_clients_leave(tmp_path, seed):
    await faulty(tmp_path, random.Random(seed), calls=150)


async def faulty(tmp_path, rng: random.Random, calls: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    async with owned(tmp_path) as there:
        fronts = [await connected(there.path) for _ in range(3)]

        async def client(number: int) -> None:
            front = fronts[number % 3]
            lookup = asked(f"n{number}", prompt=rng.randrange(40), tokens=rng.randrange(1, 40))
            try:
                answer = await front.open([lookup], interval=1)
            except Exception as error:
                counts[type(error).__name__] += 1
                return
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random() * 0.005)
                front.close(answer)
            tokens, ends = await read(front, answer)
            assert len(ends) == 1
            whole = expected_tokens(lookup.request.tokens, 0, 40, frozenset())
            assert tokens == whole[: len(tokens)]
            counts[ends[0].reason] += 1
            if ends[0].reason is FinishReason.LENGTH:
                assert len(tokens) == lookup.request.params.max_tokens

        for begin in range(0, calls, 30):
            tasks = [asyncio.create_task(client(begin + n)) for n in range(30)]
            await asyncio.sleep(rng.random() * 0.01)
            victim = rng.randrange(3)
            fronts[victim].stop()
            fronts[victim] = await connected(there.path)
            async with asyncio.timeout(20):
                await asyncio.gather(*tasks)
        await quiet(there)
        assert there.service.open_requests() == 0
        for front in fronts:
            assert not front.awaited
            front.stop()
    assert sum(counts.values()) == calls
    return counts


def test_a_sequence_with_its_format_of_calls_crosses():
    reading = Reading(TOOL_FORMATS[0], None, opened=True, schemas={"f": {"a": {}}}, parallel=False)
    lookup = asked("a")
    prompt = lookup.prompted.prompt._replace(reading=reading)
    made = received(sent(lookup._replace(prompted=Prompted(prompt, None, True)), False), None)
    assert made.request == lookup.request
    assert made.prompted.prompt.reading == reading


def test_a_refusal_with_the_rooms_of_its_limits_crosses():
    verdict = Reject(next(iter(RejectReason)), "too many", 7, Limit.REQUESTS_PER_MINUTE)
    refusal = Refusal(verdict, {Limit.REQUESTS_PER_MINUTE: Room(2, 0, 60.0)})
    (crossed,) = Frames().feed(frame(packed(Refusal, refusal)))
    assert unpacked(Refusal, crossed) == refusal
    assert [type(key) for key in unpacked(Refusal, crossed).rooms] == [Limit]
