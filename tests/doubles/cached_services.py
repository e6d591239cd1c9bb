"""A service with response caches in front, a clock that stands still, and a listener."""

from __future__ import annotations

from contextlib import asynccontextmanager

from headrace.core.events import Finished, Layer
from headrace.core.ports import StoreFacts
from headrace.core.request import Request, SamplingParams
from headrace.core.tenancy.gate import Limits
from headrace.response_cache.exact import ExactCache
from headrace.response_cache.lookup import CacheLookup
from headrace.response_cache.query import LookupRequest
from headrace.response_cache.rules.cacheability import NO_DIRECTIVES
from headrace.response_cache.rules.entry import Entry, Miss
from headrace.response_cache.rules.key import Engine
from headrace.response_cache.rules.tags import TagVersions
from headrace.response_cache.stores.memory import MemoryStore
from headrace.response_cache.stores.tier import Tier
from headrace.service.service import Service
from headrace.testing.engines import hashing_engine
from headrace.testing.hashing_runner import expected_tokens
from tests.doubles.clock import Clock
from tests.doubles.services import Book, read_all, tokens_of

FINGERPRINT = Engine("hash", "", "", "", "", "").fingerprint()


class Witness:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.kept_entries: list[Entry] = []
        self.broken: list[tuple[int, ...]] = []

    def stored(self, query, entry):
        self.kept_entries.append(entry)

    def interrupted(self, query, beginning):
        self.broken.append(beginning.tokens)

    def cleared(self, tag):
        pass

    def barred(self, served):
        pass


class House:
    def __init__(self, lookup, service, runner, book, clock, witness):
        self.lookup, self.service, self.runner = lookup, service, runner
        self.book, self.clock, self.witness = book, clock, witness
        self.asked = 0

    def question(
        self, max_tokens=5, prompt=(1, 2, 3), *, control=NO_DIRECTIVES, temperature=0.0, **more
    ) -> LookupRequest:
        self.asked += 1
        stops = more.pop("stops", None)
        params = SamplingParams(
            temperature=temperature, max_tokens=max_tokens, seed=more.pop("given_seed", None)
        )
        return LookupRequest(Request(f"r{self.asked}", prompt, params, **more), control, stops=stops)

    async def open(self, *questions, interval=1):
        return await self.lookup.open(questions or [self.question()], interval)

    async def answer(self, *args, **more):
        """The note, and the tokens of one answer; what is written has been written when it returns."""
        answer = await self.lookup.open([self.question(*args, **more)])
        reported = await read_all(answer)
        self.lookup.close(answer)
        await self.settle()
        assert sum(isinstance(event, Finished) for _, event in reported) == 1
        return answer.note, tokens_of(reported)

    async def settle(self):
        await self.lookup.settle()

    def events(self, kind):
        self.service.count()
        return [event for event in self.book.events if isinstance(event, kind)]


@asynccontextmanager
async def house(levels=(), limits=None, max_bytes=1 << 20, partial=None, outputs=None, **engine):
    made, runner = hashing_engine(**engine)
    book, clock, witness = Book(), Clock(), Witness()
    service = Service(made, limits or Limits(64, 10_000), [book])
    exact = ExactCache([Tier(MemoryStore(max_bytes, clock))], TagVersions(), clock)
    wired = {"levels": levels, "listeners": [witness], "partial": partial, "outputs": outputs}
    lookup = CacheLookup(service, exact, FINGERPRINT, ttl=100.0, **wired)
    await lookup.start()
    try:
        yield House(lookup, service, runner, book, clock, witness)
    finally:
        await lookup.stop()


def truth(max_tokens=5, prompt=(1, 2, 3), seed=0):
    return expected_tokens(prompt, seed, max_tokens, frozenset())


class Level:
    """Another level, which replies as the test wants."""

    layer = Layer.SEMANTIC
    reply: object = Miss()

    def start(self):
        self.started = True

    async def stop(self):
        self.started = False

    def facts(self):
        return {"memory": StoreFacts(3, 30, 0)}

    async def find(self, query):
        if isinstance(self.reply, Exception):
            raise self.reply
        return self.reply
