"""Answers API calls: from a cache, from a running computation, or by the engine.

    may it be cached? → exact cache → other levels → is it being computed already? → engine → write to the caches

A cache that fails, or a level that raises, is a miss and never an error. Each sequence is cached separately, so some
choices of a call may come from a cache while others are computed. This file handles neither HTTP nor text. `search`
finds cached responses, `flights` has the running computations.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from headrace.core.drafting.suffix import SuffixProposer
from headrace.core.events import Finished, Layer, LookedUp, Lookup, Spared
from headrace.core.ports import StoreFacts
from headrace.core.request import FinishReason, InvalidParameter, Request
from headrace.core.tenancy.classes import BACKGROUND
from headrace.response_cache.exact import ExactCache
from headrace.response_cache.headers import cache_header
from headrace.response_cache.partial import Partial
from headrace.response_cache.ports import CacheListener, Level
from headrace.response_cache.query import CacheQuery, LookupRequest
from headrace.response_cache.replay import Pace, tell_paced, tell_whole
from headrace.response_cache.rules.cacheability import CacheClass, classify
from headrace.response_cache.rules.entry import Hit, Miss, Served
from headrace.response_cache.rules.key import Unkeyable, answer_key, beginning_key
from headrace.response_cache.rules.tags import EVERYTHING, tenant_of
from headrace.response_cache.search import Search
from headrace.response_cache.single_flight import Flights, SingleFlight
from headrace.response_cache.writer import CacheWriter
from headrace.service.answer import Answer
from headrace.service.intake import Intake
from headrace.service.service import Refused, Service

RENEWALS = 4
"""Maximum responses that are renewed early at the same time; further ones wait for their next request."""

REMEMBERED = 10_000
"""Recent responses that can still be reported as wrong."""

WHOLE = (FinishReason.STOP, FinishReason.LENGTH)
"""Reasons after which a response is complete; others are never cached."""

NOTHING_KEPT = CacheClass(exact=False, semantic=False, coalesce=False, why="no cache")


class NotCached(Exception):
    """The request forbids computing, and no cached response can be served."""


class LookupAnswer(Answer):
    """An answer whose sequences come from flights or from cached responses."""

    def __init__(self, requests: Sequence[Request], interval: int) -> None:
        super().__init__(requests, interval)
        self.flights: list[tuple[int, SingleFlight]] = []
        self.replays: list[tuple[int, asyncio.Task[None]]] = []


class CacheLookup:
    """Accepts calls and submits to the engine only what must be computed.

    Args:
        service: computes.
        exact: the exact cache; without it every call is computed.
        fingerprint: the engine's, see `response_cache.rules.key.Engine`.
        ttl: seconds until a cached response expires, unless its request sets another time.
        pace: speed at which cached responses are streamed.
        levels: searched in order after the exact cache, for requests whose class allows it.
        keepers: informed of every response that may be cached.
        partial: stores the beginnings of unfinished responses.
        outputs: the engine's index of past outputs, from which drafts are proposed; cleared with the caches.
    """

    def __init__(
        self,
        service: Service,
        exact: ExactCache | None = None,
        fingerprint: bytes = b"",
        *,
        ttl: float = 3600.0,
        pace: Pace = Pace.IMMEDIATE,
        levels: Sequence[Level] = (),
        keepers: Sequence[CacheListener] = (),
        partial: Partial | None = None,
        outputs: SuffixProposer | None = None,
    ) -> None:
        self.now = service.now
        self.service = service
        self._exact = exact
        self._fingerprint = fingerprint
        self._pace = pace
        self._levels = tuple(levels)
        self._intake = Intake()
        self._partial = partial
        self._outputs = outputs
        if exact is not None:
            every = (*keepers, *(() if partial is None else (partial,)))
            self._writer = CacheWriter(exact, ttl, every, self._written, lambda: service.awaited)
            self._flights = Flights(service, exact, partial, self._ended)
            self._search = Search(
                service, exact, self._levels, self._writer, self._flights, self._renew_early
            )
        self.assigned: Callable[[Request], Request] | None = None
        """Applies the settings of a request's experiment arm, during an experiment."""
        self._served: OrderedDict[str, Served] = OrderedDict()
        self._renewing = 0

    async def open(self, questions: Sequence[LookupRequest], interval: int = 1) -> Answer:
        """Answer all sequences of one call, or none.

        Raises:
            NotCached: the request forbids computing, and a sequence is not cached.
            Refused: a sequence must be computed, and the queue is full or the server drains.
            InvalidParameter: a request id is in use.
        """
        if self.assigned is not None:
            questions = [each._replace(request=self.assigned(each.request)) for each in questions]
        asks, pieces = list[CacheQuery](), self._intake.pieces()
        for question in questions:
            asks.append(self.ask(question))
            await pieces.turn()
        if self._exact is None or not all(ask.allowed.exact for ask in asks):
            return self._compute(asks, interval)
        hits = [await self._search.find(ask, question) for ask, question in zip(asks, questions, strict=True)]
        answer = LookupAnswer([question.request for question in questions], interval)
        layers: list[Layer | None] = []
        leading: dict[bytes, SingleFlight] = {}
        begun: list[SingleFlight] = []
        for index, (question, ask, hit) in enumerate(zip(questions, asks, hits, strict=True)):
            if isinstance(hit, Hit):
                layers.append(hit.layer)
                continue
            if ask.control.only_if_cached:
                raise NotCached
            flight = self._flights.followed(ask) or leading.get(ask.key)
            layers.append(Layer.COALESCED)
            if flight is None:
                flight = self._flights.make(ask, question, _informed(ask.request, hit))
                layers[-1] = Layer.PARTIAL if flight.tokens else None
                begun.append(flight)
                if ask.allowed.coalesce:
                    leading[ask.key] = flight
            answer.flights.append((index, flight))
        # Responses from the cache too: lookups and savings are recorded by id.
        self.service.check_new(answer.requests)
        if begun:
            self.service.submit(begun)  # raises before anything is changed
        for flight in begun:
            self._flights.register(flight)
        for index, flight in answer.flights:
            if flight.over:
                self._flights.note_coalesced(flight, answer.requests[index])
            flight.join(answer, index)
        for index, hit in enumerate(hits):
            if isinstance(hit, Hit):
                self._replay(answer, index, hit)
        for ask, layer, hit in zip(asks, layers, hits, strict=True):
            self._remember(ask, layer, hit.key if isinstance(hit, Hit) else None)
        answer.note = cache_header(layers, hits)
        if not answer.settled:
            self.service.end_in_time(answer, self.close)
        return answer

    def close(self, answer: Answer, why: FinishReason = FinishReason.CANCELLED) -> None:
        """Cancel the open sequences of a call, like `Service.close`. Computations that other calls read continue.

        It may be called more than once: by a timer, an abort or a disconnect, and by the reader of the answer.
        """
        self.service.close(answer, why)
        if not isinstance(answer, LookupAnswer):
            return
        replays, answer.replays = answer.replays, []  # a task can be cancelled twice
        for index, replay in replays:
            if replay.cancel():
                self._end(answer, index, why)
        for index, flight in answer.flights:
            if not flight.over and flight.leave(answer, index):
                self._end(answer, index, why)
                if flight.deserted and not flight.alone:
                    self.service.withdraw(flight, why)

    def stop_sequence(self, answer: Answer, index: int) -> None:
        """A stop string ended one sequence. Flights find stop strings themselves."""
        if not isinstance(answer, LookupAnswer):
            self.service.stop_sequence(answer, index)

    def ask(self, question: LookupRequest) -> CacheQuery:
        """``question`` with its cache key and class; without a cache, no key is computed."""
        request = question.request
        if self._exact is None:
            return CacheQuery(request, question.control, NOTHING_KEPT, b"")
        allowed = classify(request.params, question.control)
        key = beginning = partition = b""
        turn = question.turn() if allowed.semantic and self._levels else None
        if question.bars:
            allowed = CacheClass(exact=False, semantic=False, coalesce=False, why=question.bars)
        named = request
        if allowed.pool:
            named = replace(request, seed=0)  # slots distinguish the samples of a pool
        try:
            if allowed.exact:
                beginning = beginning_key(self._fingerprint, named, question.continues)
                key = answer_key(beginning, named)
            if allowed.exact and turn is not None:
                # Without max_tokens, the maximum length depends on the prompt's length: levels compare it.
                partition = beginning_key(self._fingerprint, named, question.continues, turn.context)
        except Unkeyable as error:
            allowed = CacheClass(exact=False, semantic=False, coalesce=False, why=str(error))
        return CacheQuery(
            request, question.control, allowed, key, beginning, turn, partition, question.origin
        )

    def renew(self, question: LookupRequest, anew: bool = False) -> SingleFlight | None:
        """Compute a response only for the cache, at background priority; None if it is being computed already.

        ``anew`` computes all of it, even if its beginning is stored.

        Raises:
            Refused: as `open`.
        """
        request = replace(
            question.request, service_class=BACKGROUND.name, deadline=None, arrived=self.service.now()
        )
        ask = self.ask(question)
        if not ask.allowed.exact or self._flights.under_way(ask) is not None:
            return None
        flight = self._flights.make(ask, question, request, anew=anew)
        flight.alone = True
        self.service.submit([flight])
        self._flights.register(flight)
        return flight

    async def keeps(self, question: LookupRequest) -> bool:
        """Whether a fresh response is cached."""
        if self._exact is None:
            return False
        ask = self.ask(question)
        entry = await self._exact.at(ask.key)
        return entry is not None and self._exact.serves(ask, entry.versions)

    def give_up(self, flight: SingleFlight, why: FinishReason) -> None:
        """Cancel a computation that only fills the cache, unless a request has joined it."""
        if flight.deserted and not flight.over:
            self.service.withdraw(flight, why)

    async def clear(self, tag: str) -> Mapping[str, bool]:
        """Invalidate all responses with ``tag``; returns for each store whether it was reached."""
        if self._outputs is not None and (tag == EVERYTHING or tenant_of(tag) is not None):
            self._outputs.forget(tenant_of(tag))
        if self._exact is None:
            return {}
        reached = await self._exact.clear(tag)
        self._writer.tell(lambda keeper: keeper.cleared(tag))
        return reached

    def served(self, request_id: str) -> Served | None:
        """The response sent under a request's id, if it was recent and could be cached."""
        return self._served.get(request_id)

    async def bar(self, served: Served) -> None:
        """Delete a wrong response, and cache no other one in its place.

        A response that the semantic cache served may be right for its own request. It stays; the level is informed.
        """
        if self._exact is None:
            return
        if served.layer is not Layer.SEMANTIC:
            await self._exact.bar(served.source or served.key)
        self._writer.tell(lambda keeper: keeper.barred(served))

    def sizes(self) -> dict[Layer, Mapping[str, StoreFacts]]:
        """Sizes of the stores of each layer."""
        if self._exact is None:
            return {}
        sizes = {Layer.EXACT: self._exact.facts()} | {level.layer: level.facts() for level in self._levels}
        partial = {} if self._partial is None else {"memory": self._partial.facts()}
        if self._outputs is not None:
            counts = self._outputs.counts
            partial["outputs"] = StoreFacts(counts.outputs, counts.nbytes, counts.evicted_scopes)
        return sizes | {Layer.PARTIAL: partial} if partial else sizes

    async def start(self) -> None:
        """Start the caches and the service on the running loop."""
        self.service.start()
        if self._exact is not None:
            await self._exact.start()
        for level in self._levels:
            level.start()

    async def settle(self) -> None:
        """Write all responses that have ended to the caches."""
        if self._exact is not None:
            await self._writer.finish()

    async def stop(self) -> None:
        """Finish pending writes, close the stores, and stop the service."""
        await self.settle()
        for level in self._levels:
            await level.stop()
        if self._exact is not None:
            await self._exact.close()
        self.service.stop()

    def _compute(self, asks: Sequence[CacheQuery], interval: int) -> Answer:
        """Send a call that may not be cached straight to the engine."""
        if any(ask.control.only_if_cached for ask in asks):
            raise NotCached
        requests = [
            replace(ask.request, indexed=False) if ask.control.no_store else ask.request for ask in asks
        ]
        answer = self.service.open(requests, interval)
        if self._exact is not None:
            why = next(ask.allowed.why for ask in asks if not ask.allowed.exact)
            answer.note = f"bypass; reason={why.replace(' ', '-')}"
            for ask in asks:
                self.service.note(LookedUp(ask.request.id, Layer.EXACT, Lookup.BYPASS, 0.0, why))
        return answer

    def _replay(self, answer: LookupAnswer, index: int, hit: Hit) -> None:
        request = answer.requests[index]
        self.service.note(
            Spared(
                request.id,
                request.tenant,
                hit.layer,
                len(request.tokens),
                len(hit.entry.tokens),
                hit.age_seconds,
            )
        )
        if answer.each_step:
            work = tell_paced(answer, index, hit.entry, self._pace)
            answer.replays.append((index, asyncio.get_running_loop().create_task(work)))
        else:
            tell_whole(answer, index, hit.entry)

    def _remember(self, ask: CacheQuery, layer: Layer | None, source: bytes | None) -> None:
        served = Served(ask.request.tenant, ask.key, ask.beginning, layer, source)
        self._served[ask.request.id] = served
        if len(self._served) > REMEMBERED:
            self._served.popitem(last=False)

    def _ended(self, flight: SingleFlight, finished: Finished) -> None:
        self.service.withdraw(flight, finished.reason)  # the flight may have found the end itself
        if finished.reason not in WHOLE:
            self._flights.discard(flight)
            if finished.reason is not FinishReason.FAILED:
                self._writer.break_off(flight)
            return
        for request in flight.followers:
            self._flights.note_coalesced(flight, request)
        self._writer.add(flight)

    def _written(self, flight: SingleFlight, key: bytes | None) -> None:
        self._flights.discard(flight)
        name = flight.ask.request.id
        served = self._served.get(name)
        if served is not None and served.key == flight.ask.key:
            self._served[name] = served._replace(source=key)

    def _renew_early(self, question: LookupRequest, draft: tuple[int, ...]) -> None:
        if self._renewing >= RENEWALS:
            return
        request = replace(question.request, id=f"{question.request.id}~renewed", cached_answer=draft)
        try:
            flight = self.renew(question._replace(request=request), anew=True)
        except (Refused, InvalidParameter):  # it is being renewed already
            return
        if flight is not None:
            self._renewing += 1
            flight.when_over(self._renewed)

    def _renewed(self) -> None:
        self._renewing -= 1

    def _end(self, answer: LookupAnswer, index: int, why: FinishReason) -> None:
        request = answer.requests[index]
        answer.tell(index, Finished(request.id, why, len(request.tokens), 0, 0))


def _informed(request: Request, miss: Miss) -> Request:
    """``request`` with the draft that was found, and grouped with similar ones unless it names a group itself."""
    affinity = request.affinity or miss.near
    if affinity == request.affinity and not miss.draft:
        return request
    return replace(request, affinity=affinity, cached_answer=miss.draft)
