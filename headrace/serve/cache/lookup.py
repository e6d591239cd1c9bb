"""The road of a call before the engine: who can answer it without computing, in which order, and who learns of it.

    allowed at all? → exact cache → other levels → is it being computed already? → engine → kept, keepers told

Everything before the engine may only say "no": a cache that fails, or a level that raises, is a miss. It must not
know HTTP or text. What is cached is one sequence, so some answers of a call may be found and others computed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from headrace.core.cache.response.cacheability import CacheClass, classify
from headrace.core.cache.response.control import CacheDirectives
from headrace.core.cache.response.entry import Hit, Miss, Served, StoreFacts
from headrace.core.cache.response.key import Unkeyable, answer_key, beginning_key
from headrace.core.cache.response.query import CacheQuery
from headrace.core.events import Finished, Layer, LookedUp, Lookup, Spared
from headrace.core.ports import Keeper, Level
from headrace.core.request import FinishReason, InvalidParameter, Request
from headrace.core.tenancy.classes import BACKGROUND
from headrace.serve.cache.exact import ExactCache
from headrace.serve.cache.headers import cache_header
from headrace.serve.cache.lookup_request import LookupRequest
from headrace.serve.cache.partial import Partial, RecordedAnswer
from headrace.serve.cache.replay import Pace, tell_paced, tell_whole
from headrace.serve.cache.single_flight import SingleFlight, rank
from headrace.serve.cache.writer import CacheWriter
from headrace.serve.service import Answer, Refused, Service

logger = logging.getLogger(__name__)

RENEWALS = 4
"""Answers that may be renewed early at once; more are left until somebody asks again."""

REMEMBERED = 10_000
"""Answers of which it is known what they were, so that they can be called wrong."""

ATTEMPTS = 2
"""How often one answer is tried for those who joined another's computation."""

WHOLE = (FinishReason.STOP, FinishReason.LENGTH)
"""Ends after which an answer is all that it can be; others are never kept."""

NOTHING_KEPT = CacheClass(exact=False, semantic=False, coalesce=False, why="no cache")


class NotCached(Exception):
    """The caller wants nothing computed, and there is nothing to serve."""


class LookupAnswer(Answer):
    """An answer whose sequences come from elsewhere than straight from the engine: from flights, or told again."""

    def __init__(self, requests: Sequence[Request], interval: int) -> None:
        super().__init__(requests, interval)
        self.flights: list[tuple[int, SingleFlight]] = []
        self.replays: list[tuple[int, asyncio.Task[None]]] = []


class CacheLookup:
    """Takes calls, and lets through to the engine only what must be computed.

    Args:
        service: computes.
        exact: the exact cache; without one every call is computed.
        fingerprint: of the engine, see `core.cache.response.key.Engine`.
        ttl: seconds that an answer is kept unless its caller says otherwise.
        pace: of streams that are told again.
        levels: asked in order after the exact cache, for requests whose class allows it.
        keepers: told of every answer that may be kept.
        partial: asked how an answer begins that is about to be computed; told of every output.
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
        keepers: Sequence[Keeper] = (),
        partial: Partial | None = None,
    ) -> None:
        self.now = service.now
        self.service = service
        self._exact = exact
        self._fingerprint = fingerprint
        self._pace = pace
        self._levels = tuple(levels)
        self._partial = partial
        if exact is not None:
            every = (*keepers, *(() if partial is None else (partial,)))
            self._keeping = CacheWriter(exact, ttl, every, self._landed, lambda: service.awaited)
        self._flights: dict[bytes, SingleFlight] = {}
        self._finding: dict[tuple[bytes, CacheDirectives], asyncio.Task[Hit | Miss]] = {}
        self._served: OrderedDict[str, Served] = OrderedDict()
        self._renewing = 0

    async def open(self, questions: Sequence[LookupRequest], interval: int = 1) -> Answer:
        """Answer the sequences of one call, or have them computed; all or none.

        Raises:
            NotCached: the caller wants only what is cached, and something is not.
            Refused: the queue is full or the server drains, and something must be computed.
            InvalidParameter: a request id that is in use.
        """
        asks = [self.ask(question) for question in questions]
        if self._exact is None or not all(ask.allowed.exact for ask in asks):
            return self._compute(asks, interval)
        hits = [await self._find(ask, question) for ask, question in zip(asks, questions, strict=True)]
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
            flight = self._followed(ask) or leading.get(ask.key)
            layers.append(Layer.COALESCED)
            if flight is None:
                flight = self._flight(ask, question, _grouped(ask.request, hit))
                layers[-1] = Layer.PARTIAL if flight.tokens else None
                begun.append(flight)
                if ask.allowed.coalesce:
                    leading[ask.key] = flight
            answer.flights.append((index, flight))
        if begun:
            self.service.submit(begun)  # raises before anything has been changed
        for flight in begun:
            self._register(flight)
        for index, flight in answer.flights:
            if flight.over:
                self._note_coalesced(flight, answer.requests[index])
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
        """End what is still open of a call; what others read too goes on for them. As `Service.close`.

        It may come twice or more: from a timer, an abort or a client that hangs up, and from who reads the answer.
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
        """A stop string ended one sequence. A flight has found it itself."""
        if not isinstance(answer, LookupAnswer):
            self.service.stop_sequence(answer, index)

    def ask(self, question: LookupRequest) -> CacheQuery:
        """``question`` with its key and class; where nothing is kept, nobody asks for a key."""
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
            named = replace(request, seed=0)  # its samples are told apart by their slots
        try:
            if allowed.exact:
                beginning = beginning_key(self._fingerprint, named, question.continues)
                key = answer_key(beginning, named)
            if allowed.exact and turn is not None:
                # How long an answer may be follows from the prompt's length where nobody says: levels compare it.
                partition = beginning_key(self._fingerprint, named, question.continues, turn.context)
        except Unkeyable as error:
            allowed = CacheClass(exact=False, semantic=False, coalesce=False, why=str(error))
        return CacheQuery(
            request, question.control, allowed, key, beginning, turn, partition, question.origin
        )

    def renew(self, question: LookupRequest, anew: bool = False) -> SingleFlight | None:
        """Compute an answer for the cache alone, when nothing else is to be done; None where it is being computed.

        ``anew``: all of it, however much is known.

        Raises:
            Refused: as `open`.
        """
        request = replace(
            question.request, service_class=BACKGROUND.name, deadline=None, arrived=self.service.now()
        )
        ask = self.ask(question)
        if not ask.allowed.exact or self._under_way(ask) is not None:
            return None
        flight = self._flight(ask, question, request, anew)
        flight.alone = True
        self.service.submit([flight])
        self._register(flight)
        return flight

    async def keeps(self, question: LookupRequest) -> bool:
        """Whether there is a fresh answer already."""
        if self._exact is None:
            return False
        ask = self.ask(question)
        entry = await self._exact.at(ask.key)
        return entry is not None and self._exact.serves(ask, entry.versions)

    def give_up(self, flight: SingleFlight, why: FinishReason) -> None:
        """End what was computed for the cache alone, unless somebody reads it by now."""
        if flight.deserted and not flight.over:
            self.service.withdraw(flight, why)

    async def clear(self, tag: str) -> Mapping[str, bool]:
        """Make all answers with ``tag`` unservable; of each store, whether it has heard of it."""
        if self._exact is None:
            return {}
        heard = await self._exact.clear(tag)
        self._keeping.tell(lambda keeper: keeper.cleared(tag))
        return heard

    def served(self, request_id: str) -> Served | None:
        """What went out under a request's id, if it was lately and could be kept."""
        return self._served.get(request_id)

    async def bar(self, served: Served) -> None:
        """Forget a wrong answer and keep none in its place.

        Another question's answer may be right for that question: it stays, and its level learns that it was wrong here.
        """
        if self._exact is None:
            return
        if served.layer is not Layer.SEMANTIC:
            await self._exact.bar(served.source or served.key)
        self._keeping.tell(lambda keeper: keeper.barred(served))

    def sizes(self) -> dict[Layer, Mapping[str, StoreFacts]]:
        """How full the stores of each layer are."""
        if self._exact is None:
            return {}
        sizes = {Layer.EXACT: self._exact.facts()} | {level.layer: level.facts() for level in self._levels}
        if self._partial is not None:
            sizes[Layer.PARTIAL] = {"memory": self._partial.facts()}
        return sizes

    async def start(self) -> None:
        """Begin, and the service with it; on the running loop."""
        self.service.start()
        if self._exact is not None:
            await self._exact.start()
        for level in self._levels:
            level.start()

    async def settle(self) -> None:
        """Have all that has ended kept."""
        if self._exact is not None:
            await self._keeping.finish()

    async def stop(self) -> None:
        """Finish what is being written, let go of the stores, and end the service."""
        await self.settle()
        for level in self._levels:
            await level.stop()
        if self._exact is not None:
            await self._exact.close()
        self.service.stop()

    def _compute(self, asks: Sequence[CacheQuery], interval: int) -> Answer:
        """A call that no cache may answer, straight to the engine."""
        if any(ask.control.only_if_cached for ask in asks):
            raise NotCached
        answer = self._listen(asks, interval)
        if self._exact is not None:
            why = next(ask.allowed.why for ask in asks if not ask.allowed.exact)
            answer.note = f"bypass; reason={why.replace(' ', '-')}"
            for ask in asks:
                self.service.note(LookedUp(ask.request.id, Layer.EXACT, Lookup.BYPASS, 0.0, why))
        return answer

    def _listen(self, asks: Sequence[CacheQuery], interval: int) -> Answer:
        """Have a call computed; its outputs may be indexed, unless their caller wants nothing kept."""
        requests = [ask.request for ask in asks]
        if self._partial is None or any(ask.control.no_store for ask in asks):
            return self.service.open(requests, interval)
        answer = RecordedAnswer(requests, interval, self._partial.heard)
        self.service.submit([answer])
        self.service.end_in_time(answer, self.service.close)
        return answer

    async def _find(self, ask: CacheQuery, question: LookupRequest) -> Hit | Miss:
        """What the caches have; questions that are equal, wishes included, are looked up once at a time."""
        if ask.control.no_cache:
            return Miss("no_cache")
        exact = self._exact
        assert exact is not None
        await self._keeping.catch_up(ask)
        if (exact.at_hand and not (self._levels and ask.allowed.semantic)) or not ask.allowed.coalesce:
            return await self._look_up(exact, ask, question)
        if self._followed(ask) is not None and not ask.control.only_if_cached:
            return Miss("coalesced")
        name = (ask.key, ask.control)
        task = self._finding.get(name)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._look_up(exact, ask, question))
            self._finding[name] = task
            task.add_done_callback(lambda _: self._finding.pop(name, None))
        found = await asyncio.shield(task)
        if isinstance(found, Hit) and not exact.serves(ask, found.entry.versions):
            return Miss("cleared")  # after it was found; who asks may have come later still
        return found

    async def _look_up(self, exact: ExactCache, ask: CacheQuery, question: LookupRequest) -> Hit | Miss:
        began = self.now()
        found = await exact.find(ask)
        outcome = Lookup.MISS if found is None else Lookup.HIT
        self.service.note(LookedUp(ask.request.id, Layer.EXACT, outcome, self.now() - began))
        if found is not None:
            if found.refresh:
                self._renew_early(question)
            return Hit(found.entry, Layer.EXACT, found.key, exact.age(found.entry))
        near = ""
        for level in self._levels if ask.allowed.semantic else ():
            began = self.now()
            try:
                hit = await level.find(ask)
            except Exception:
                logger.exception("the %s cache failed on request %s", level.layer, ask.request.id)
                hit = Miss("failed")
            outcome = Lookup.HIT if isinstance(hit, Hit) else Lookup.MISS
            why = hit.why if isinstance(hit, Miss) else ""
            self.service.note(LookedUp(ask.request.id, level.layer, outcome, self.now() - began, why))
            if isinstance(hit, Hit):
                return hit
            near = near or hit.near
        return Miss(near=near)

    def _under_way(self, ask: CacheQuery) -> SingleFlight | None:
        """A flight whose answer may be kept for ``ask``."""
        assert self._exact is not None
        flight = self._flights.get(ask.key)
        return flight if flight is not None and self._exact.serves(ask, flight.versions) else None

    def _followed(self, ask: CacheQuery) -> SingleFlight | None:
        """A flight that answers ``ask`` too, and no later than one of its own would."""
        flight = self._under_way(ask) if ask.allowed.coalesce else None
        if flight is None or (flight.resumed is not None and ask.control.max_age is not None):
            return None  # what was taken up may be too old
        return flight if flight.rank <= rank(ask.request) else None

    def _flight(
        self, ask: CacheQuery, question: LookupRequest, request: Request, anew: bool = False
    ) -> SingleFlight:
        assert self._exact is not None
        stops = None if question.stops is None else question.stops()
        versions = self._exact.snapshot(ask)
        flight = SingleFlight(ask, request, versions, stops, self.now, self._ended, self._again)
        if self._partial is not None and not anew:
            self._resume(self._partial, flight)
        return flight

    def _resume(self, partial: Partial, flight: SingleFlight) -> None:
        """Begin where an earlier computation of the same answer was left."""
        assert self._exact is not None
        ask = flight.ask
        began = self.now()
        beginning = partial.resumed(ask, flight.versions, self._exact.wall())
        outcome = Lookup.MISS if beginning is None else Lookup.HIT
        self.service.note(LookedUp(ask.request.id, Layer.PARTIAL, outcome, self.now() - began))
        if beginning is not None:
            flight.resume(beginning)
            tokens = len(beginning.tokens)
            self.service.note(Spared(ask.request.id, ask.request.tenant, Layer.PARTIAL, 0, tokens, 0.0))

    def _register(self, flight: SingleFlight) -> None:
        if not flight.ask.allowed.coalesce:
            return
        slower = self._flights.get(flight.ask.key)
        self._flights[flight.ask.key] = flight
        if slower is not None and slower.deserted:
            self.service.withdraw(slower, FinishReason.CANCELLED)  # it is being computed sooner now

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

    def _again(self, flight: SingleFlight) -> bool:
        """Start ``flight`` anew for those who still read it; whether there are such and it could be."""
        deadline = flight.deadline()
        late = deadline is not None and deadline <= self.now()
        if flight.deserted or late or flight.attempts >= ATTEMPTS:
            return False
        flight.restart()
        try:
            self.service.submit([flight])
        except (Refused, InvalidParameter):
            return False
        return True

    def _ended(self, flight: SingleFlight, finished: Finished) -> None:
        self.service.withdraw(flight, finished.reason)  # where the flight has found the end itself
        if finished.reason not in WHOLE:
            self._forget_flight(flight)
            if finished.reason is not FinishReason.FAILED:
                self._keeping.break_off(flight)
            return
        for request in flight.followers:
            self._note_coalesced(flight, request)
        self._keeping.add(flight)

    def _note_coalesced(self, flight: SingleFlight, request: Request) -> None:
        prompt, output = len(request.tokens), len(flight.tokens)
        self.service.note(Spared(request.id, request.tenant, Layer.COALESCED, prompt, output, 0.0))

    def _landed(self, flight: SingleFlight, key: bytes | None) -> None:
        self._forget_flight(flight)
        name = flight.ask.request.id
        served = self._served.get(name)
        if served is not None and served.key == flight.ask.key:
            self._served[name] = served._replace(source=key)

    def _forget_flight(self, flight: SingleFlight) -> None:
        if self._flights.get(flight.ask.key) is flight:
            del self._flights[flight.ask.key]

    def _renew_early(self, question: LookupRequest) -> None:
        if self._renewing >= RENEWALS:
            return
        request = replace(question.request, id=f"{question.request.id}~renewed")
        try:
            flight = self.renew(question._replace(request=request), anew=True)
        except (Refused, InvalidParameter):  # another answer under the same name is being renewed
            return
        if flight is not None:
            self._renewing += 1
            flight.when_over(self._renewed)

    def _renewed(self) -> None:
        self._renewing -= 1

    def _end(self, answer: LookupAnswer, index: int, why: FinishReason) -> None:
        request = answer.requests[index]
        answer.tell(index, Finished(request.id, why, len(request.tokens), 0, 0))


def _grouped(request: Request, miss: Miss) -> Request:
    """``request``, beside those that are alike unless its caller has named its company."""
    return replace(request, affinity=miss.near) if miss.near and not request.affinity else request
