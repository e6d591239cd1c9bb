"""Answers API calls: from a cache, from a running computation, or by the engine.

    may it be cached? → exact cache → other levels → is it being computed already? → engine → write to the caches

A cache that fails, or a level that raises, is a miss and never an error. Each sequence is cached separately, so some
choices of a call may come from a cache while others are computed. A cached response is replayed through the same queue
that computed responses use (`replay`). This file handles neither HTTP nor text. `single_flight` is one computation and
its readers, `writer` writes its response.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from headrace.core.events import Finished, Layer, LookedUp, Lookup, Spared
from headrace.core.ports import StoreFacts
from headrace.core.request import FinishReason, InvalidParameter, Request
from headrace.core.tenancy.tenants import BACKGROUND
from headrace.response_cache.exact import ExactCache
from headrace.response_cache.partial import Partial
from headrace.response_cache.ports import CacheListener, LabelledPairs, Level, PastOutputs
from headrace.response_cache.query import CacheQuery, LookupRequest
from headrace.response_cache.rules.cacheability import CacheClass, CacheDirectives, classify
from headrace.response_cache.rules.entry import Hit, Miss, Served
from headrace.response_cache.rules.key import Unkeyable, answer_key, beginning_key
from headrace.response_cache.rules.tags import EVERYTHING, tenant_of
from headrace.response_cache.single_flight import Computation, Pace, rank, tell_paced, tell_whole
from headrace.response_cache.writer import CacheWriter
from headrace.service.answer import Answer, StreamPace
from headrace.service.service import Intake, Refused, Service

logger = logging.getLogger(__name__)

RENEWALS = 4
"""Maximum responses that are renewed early at the same time; further ones wait for their next request."""

REMEMBERED = 10_000
"""Recent responses that can still be reported as wrong."""

WHOLE = (FinishReason.STOP, FinishReason.LENGTH)
"""Reasons after which a response is complete; others are never cached."""

NO_CACHE = CacheClass(exact=False, semantic=False, coalesce=False, why="no cache")


class NotCached(Exception):
    """The request forbids computing, and no cached response can be served."""


class LookupAnswer(Answer):
    """An answer whose sequences come from computations or from cached responses."""

    def __init__(self, requests: Sequence[Request], interval: int, pace: StreamPace | None = None) -> None:
        super().__init__(requests, interval, pace)
        self.computations: list[tuple[int, Computation]] = []
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
        listeners: informed of every response that may be cached.
        partial: stores the beginnings of unfinished responses.
        outputs: the engine's index of past outputs, from which drafts are proposed; cleared with the caches.
        pairs: pairs of the semantic cache for people to label.
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
        listeners: Sequence[CacheListener] = (),
        partial: Partial | None = None,
        outputs: PastOutputs | None = None,
        pairs: LabelledPairs | None = None,
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
        self.pairs = pairs
        if exact is not None:
            every = (*listeners, *(() if partial is None else (partial,)))
            self._writer = CacheWriter(exact, ttl, every, self._written, lambda: service.awaited)
            self._computations = Computations(service, exact, partial, self._ended)
            self._search = Search(
                service, exact, self._levels, self._writer, self._computations, self._renew_early
            )
        self.assigned: Callable[[Request], Request] | None = None
        """Applies the settings of a request's experiment arm, during an experiment."""
        self._served: OrderedDict[str, Served] = OrderedDict()
        self._renewing = 0

    def expect(self) -> None:
        """Announce a call, as `Service.expect`."""
        self.service.expect()

    async def open(self, lookups: Sequence[LookupRequest], interval: int = 1, paced: bool = False) -> Answer:
        """Answer all sequences of one call, or none; ``interval`` and ``paced`` are those of `Service.open`.

        Raises:
            NotCached: the request forbids computing, and a sequence is not cached.
            Refused: a sequence must be computed, and the queue is full or the server drains.
            InvalidParameter: a request id is in use.
        """
        # 1 Keys: what each sequence may use, and under which names.
        if self.assigned is not None:
            lookups = [each._replace(request=self.assigned(each.request)) for each in lookups]
        queries, pieces = list[CacheQuery](), self._intake.pieces()
        for each in lookups:
            queries.append(self.query(each))
            await pieces.turn()
        # 2 Bypass: a call with a sequence that may not be cached is computed as a whole.
        if self._exact is None or not all(query.allowed.exact for query in queries):
            return self._compute(queries, interval, paced)
        # 3 Search: exact cache, then the other levels. From here on nothing waits, so no other call comes between.
        found = [await self._search.find(query) for query in queries]
        # 4 Join or begin: each miss reads a computation, its own or an equal one's.
        pace = self.service.pace if paced else None
        answer = LookupAnswer([query.request for query in queries], interval, pace)
        layers, begun = self._assign(answer, queries, found)
        # 5 Submit. It raises before anything is changed. Responses from the cache are checked too: lookups and savings
        #   are recorded by id.
        self.service.check_new(answer.requests)
        if begun:
            self.service.submit(begun)
        # 6 Read: from computations, and from cached responses.
        for computation in begun:
            self._computations.register(computation)
        for index, computation in answer.computations:
            if computation.over:
                self._computations.note_coalesced(computation, answer.requests[index])
            computation.join(answer, index)
        for index, (query, layer, result) in enumerate(zip(queries, layers, found, strict=True)):
            if isinstance(result, Hit):
                self._replay(answer, index, result)
            self._remember(query, layer, result.key if isinstance(result, Hit) else None)
        answer.note = cache_header(layers, found)
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
        for index, computation in answer.computations:
            if not computation.over and computation.leave(answer, index):
                self._end(answer, index, why)
                if computation.deserted and not computation.alone:
                    self.service.withdraw(computation, why)

    def stop_sequence(self, answer: Answer, index: int) -> None:
        """A stop string ended one sequence. Computations find stop strings themselves."""
        if not isinstance(answer, LookupAnswer):
            self.service.stop_sequence(answer, index)

    def query(self, lookup: LookupRequest) -> CacheQuery:
        """``lookup`` with its cache keys and class; without a cache, no key is computed."""
        if self._exact is None:
            return CacheQuery(lookup.request, lookup.control, NO_CACHE, b"", stops=lookup.stops)
        return keyed(lookup, self._fingerprint, similar=bool(self._levels))

    def renew(self, query: CacheQuery, anew: bool = False) -> Computation | None:
        """Compute a response only for the cache, at background priority; None if it is being computed already.

        ``anew`` computes all of it, even if its beginning is stored.

        Raises:
            Refused: as `open`.
        """
        if not query.allowed.exact or self._computations.under_way(query) is not None:
            return None
        request = replace(
            query.request, service_class=BACKGROUND.name, deadline=None, arrived=self.service.now()
        )
        computation = self._computations.make(query, request, anew=anew)
        computation.alone = True
        self.service.submit([computation])
        self._computations.register(computation)
        return computation

    async def is_cached(self, query: CacheQuery) -> bool:
        """Whether a fresh response is cached."""
        if self._exact is None:
            return False
        entry = await self._exact.at(query.key)
        return entry is not None and self._exact.serves(query, entry.versions)

    def give_up(self, computation: Computation, why: FinishReason) -> None:
        """Cancel a computation that only fills the cache, unless a request has joined it."""
        if computation.deserted and not computation.over:
            self.service.withdraw(computation, why)

    async def clear(self, tag: str) -> Mapping[str, bool]:
        """Invalidate all responses with ``tag``; returns for each store whether it was reached."""
        if self._outputs is not None and (tag == EVERYTHING or tenant_of(tag) is not None):
            self._outputs.forget(tenant_of(tag))
        if self._exact is None:
            return {}
        reached = await self._exact.clear(tag)
        self._writer.tell(lambda listener: listener.cleared(tag))
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
        self._writer.tell(lambda listener: listener.barred(served))

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

    def states(self, tenant: str | None = None) -> Mapping[str, Mapping[str, Any]]:
        """What the further levels report beside their counts: of all tenants, or of one."""
        return {level.layer.value: level.state(tenant) for level in self._levels}

    def lines(self) -> list[str]:
        """What the further levels say at the start."""
        return [line for level in self._levels for line in level.lines()]

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

    def _compute(self, queries: Sequence[CacheQuery], interval: int, paced: bool) -> Answer:
        """Send a call that may not be cached straight to the engine."""
        if any(query.control.only_if_cached for query in queries):
            raise NotCached
        requests = [
            replace(query.request, indexed=False) if query.control.no_store else query.request
            for query in queries
        ]
        answer = self.service.open(requests, interval, paced)
        if self._exact is not None:
            why = next(query.allowed.why for query in queries if not query.allowed.exact)
            answer.note = f"bypass; reason={why.replace(' ', '-')}"
            for query in queries:
                self.service.note(LookedUp(query.request.id, Layer.EXACT, Lookup.BYPASS, 0.0, why))
        return answer

    def _assign(
        self, answer: LookupAnswer, queries: Sequence[CacheQuery], found: Sequence[Hit | Miss]
    ) -> tuple[list[Layer | None], list[Computation]]:
        """Give each miss a computation; returns the layer that answers each sequence, and the new computations."""
        layers: list[Layer | None] = []
        begun: list[Computation] = []
        leading: dict[bytes, Computation] = {}  # of this call, by key: they are not registered yet
        for index, (query, result) in enumerate(zip(queries, found, strict=True)):
            if isinstance(result, Hit):
                layers.append(result.layer)
                continue
            if query.control.only_if_cached:
                raise NotCached
            computation = self._computations.followed(query) or leading.get(query.key)
            layers.append(Layer.COALESCED)
            if computation is None:
                computation = self._computations.make(query, _informed(query.request, result))
                layers[-1] = Layer.PARTIAL if computation.tokens else None
                begun.append(computation)
                if query.allowed.coalesce:
                    leading[query.key] = computation
            answer.computations.append((index, computation))
        return layers, begun

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

    def _remember(self, query: CacheQuery, layer: Layer | None, source: bytes | None) -> None:
        served = Served(query.request.tenant, query.key, query.beginning, layer, source)
        self._served[query.request.id] = served
        if len(self._served) > REMEMBERED:
            self._served.popitem(last=False)

    def _ended(self, computation: Computation, finished: Finished) -> None:
        self.service.withdraw(computation, finished.reason)  # the computation may have found the end itself
        if finished.reason not in WHOLE:
            self._computations.discard(computation)
            if finished.reason is not FinishReason.FAILED:
                self._writer.interrupt(computation)
            return
        for request in computation.followers:
            self._computations.note_coalesced(computation, request)
        self._writer.add(computation)

    def _written(self, computation: Computation, key: bytes | None) -> None:
        self._computations.discard(computation)
        name = computation.query.request.id
        served = self._served.get(name)
        if served is not None and served.key == computation.query.key:
            self._served[name] = served._replace(source=key)

    def _renew_early(self, query: CacheQuery, draft: tuple[int, ...]) -> None:
        if self._renewing >= RENEWALS:
            return
        request = replace(query.request, id=f"{query.request.id}~renewed", cached_answer=draft)
        try:
            computation = self.renew(replace(query, request=request), anew=True)
        except (Refused, InvalidParameter):  # it is being renewed already
            return
        if computation is not None:
            self._renewing += 1
            computation.when_over(self._renewed)

    def _renewed(self) -> None:
        self._renewing -= 1

    def _end(self, answer: LookupAnswer, index: int, why: FinishReason) -> None:
        request = answer.requests[index]
        answer.tell(index, Finished(request.id, why, len(request.tokens), 0, 0))


class Search:
    """Finds cached responses; equal concurrent searches run once.

    Args:
        service: receives an event for each lookup.
        exact: the exact cache.
        levels: searched in order after the exact cache, for requests whose class allows it.
        writer: writes responses that have just been computed, before they are searched for.
        computations: the running computations.
        renew: called for a hit that should be computed again soon, with its tokens.
    """

    def __init__(
        self,
        service: Service,
        exact: ExactCache,
        levels: Sequence[Level],
        writer: CacheWriter,
        computations: Computations,
        renew: Callable[[CacheQuery, tuple[int, ...]], None],
    ) -> None:
        self._service = service
        self._exact = exact
        self._levels = tuple(levels)
        self._writer = writer
        self._computations = computations
        self._renew = renew
        self._running: dict[tuple[bytes, CacheDirectives], asyncio.Task[Hit | Miss]] = {}

    async def find(self, query: CacheQuery) -> Hit | Miss:
        """The cached response to ``query``, or why there is none."""
        if query.control.no_cache:
            return Miss("no_cache", draft=await self._exact.draft(query))
        await self._writer.catch_up(query.beginning)
        at_hand = self._exact.at_hand and not (self._levels and query.allowed.semantic)
        if at_hand or not query.allowed.coalesce:
            return await self._look_up(query)
        if self._computations.followed(query) is not None and not query.control.only_if_cached:
            return Miss("coalesced")
        name = (query.key, query.control)
        task = self._running.get(name)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._look_up(query))
            self._running[name] = task
            task.add_done_callback(lambda _: self._running.pop(name, None))
        found = await asyncio.shield(task)
        if isinstance(found, Hit) and not self._exact.serves(query, found.entry.versions):
            return Miss("cleared")  # it was invalidated after it had been found
        return found

    async def _look_up(self, query: CacheQuery) -> Hit | Miss:
        began = self._service.now()
        found, draft = await self._exact.find(query)
        self._note(query, Layer.EXACT, began, found is not None)
        if found is not None:
            if found.refresh:
                self._renew(query, found.entry.tokens)
            return Hit(found.entry, Layer.EXACT, found.key, self._exact.age(found.entry))
        near = ""
        for level in self._levels if query.allowed.semantic else ():
            began = self._service.now()
            try:
                hit = await level.find(query)
            except Exception:
                logger.exception("the %s cache failed on request %s", level.layer, query.request.id)
                hit = Miss("failed")
            why = hit.certificate if isinstance(hit, Hit) else hit.why
            self._note(query, level.layer, began, isinstance(hit, Hit), why)
            if isinstance(hit, Hit):
                return hit
            near, draft = near or hit.near, draft or hit.draft
        return Miss(near=near, draft=draft)

    def _note(self, query: CacheQuery, layer: Layer, began: float, hit: bool, why: str = "") -> None:
        outcome = Lookup.HIT if hit else Lookup.MISS
        self._service.note(LookedUp(query.request.id, layer, outcome, self._service.now() - began, why))


ATTEMPTS = 2
"""Maximum attempts to compute a response for requests that joined another one's computation."""


class Computations:
    """All `Computation`s of a lookup.

    Args:
        service: computes them.
        exact: the exact cache, which decides whether a response that is being computed may still be served.
        partial: stores the beginnings of unfinished responses; None: all are computed from the beginning.
        ended: called with each computation and its end.
    """

    def __init__(
        self,
        service: Service,
        exact: ExactCache,
        partial: Partial | None,
        ended: Callable[[Computation, Finished], None],
    ) -> None:
        self._service = service
        self._exact = exact
        self._partial = partial
        self._ended = ended
        self._by_key: dict[bytes, Computation] = {}

    def under_way(self, query: CacheQuery) -> Computation | None:
        """The computation whose response may be stored for ``query``."""
        computation = self._by_key.get(query.key)
        return (
            computation
            if computation is not None and self._exact.serves(query, computation.versions)
            else None
        )

    def followed(self, query: CacheQuery) -> Computation | None:
        """A computation that answers ``query`` too, with at least the priority that its own computation would have."""
        computation = self.under_way(query) if query.allowed.coalesce else None
        if computation is None or (computation.resumed is not None and query.control.max_age is not None):
            return None  # the resumed beginning may be too old
        return computation if computation.rank <= rank(query.request) else None

    def make(self, query: CacheQuery, request: Request, *, anew: bool = False) -> Computation:
        """A computation of ``request``, resumed from an unfinished response unless ``anew``."""
        stops = None if query.stops is None else query.stops()
        versions = self._exact.snapshot(query)
        computation = Computation(
            query, request, versions, stops, self._service.now, self._ended, self._again
        )
        if self._partial is not None and not anew:
            self._resume(self._partial, computation)
        return computation

    def register(self, computation: Computation) -> None:
        """Let other requests join it. A slower computation of the same response that has no reader ends."""
        if not computation.query.allowed.coalesce:
            return
        slower = self._by_key.get(computation.query.key)
        self._by_key[computation.query.key] = computation
        if slower is not None and slower.deserted:
            self._service.withdraw(slower, FinishReason.CANCELLED)

    def discard(self, computation: Computation) -> None:
        """Let no further request join ``computation``."""
        if self._by_key.get(computation.query.key) is computation:
            del self._by_key[computation.query.key]

    def note_coalesced(self, computation: Computation, request: Request) -> None:
        """Record that ``request`` was answered by the computation of another one."""
        prompt, output = len(request.tokens), len(computation.tokens)
        self._service.note(Spared(request.id, request.tenant, Layer.COALESCED, prompt, output, 0.0))

    def _resume(self, partial: Partial, computation: Computation) -> None:
        """Begin where an earlier computation of the same response stopped."""
        query, service = computation.query, self._service
        began = service.now()
        beginning = partial.resumed(query, computation.versions, self._exact.wall())
        outcome = Lookup.MISS if beginning is None else Lookup.HIT
        service.note(LookedUp(query.request.id, Layer.PARTIAL, outcome, service.now() - began))
        if beginning is not None:
            computation.resume(beginning)
            tokens = len(beginning.tokens)
            service.note(Spared(query.request.id, query.request.tenant, Layer.PARTIAL, 0, tokens, 0.0))

    def _again(self, computation: Computation) -> bool:
        """Restart ``computation`` for the requests that still read it; returns whether that was possible."""
        deadline = computation.deadline()
        late = deadline is not None and deadline <= self._service.now()
        if computation.deserted or late or computation.attempts >= ATTEMPTS:
            return False
        computation.restart()
        try:
            self._service.submit([computation])
        except (Refused, InvalidParameter):
            return False
        return True


def cache_header(layers: Sequence[Layer | None], hits: Sequence[Hit | Miss]) -> str:
    """The header's value for a call; ``layers`` has the cache layer that answers each sequence (None: the engine).

    The value is a hit only if no sequence of the call is computed.
    """
    if None in layers:
        return "miss"
    if Layer.PARTIAL in layers:
        return "partial"
    spared = {str(hit.layer) for hit in hits if isinstance(hit, Hit)}
    if not spared or Layer.COALESCED in layers:
        return "coalesced"
    age = max(hit.age_seconds for hit in hits if isinstance(hit, Hit))
    words = f"hit; layer={'+'.join(sorted(spared))}; age={age:.0f}"
    near = [hit.similarity for hit in hits if isinstance(hit, Hit) and hit.similarity is not None]
    return f"{words}; similarity={min(near):.3f}" if near else words


def _informed(request: Request, miss: Miss) -> Request:
    """``request`` with the draft that was found, and grouped with similar ones unless it names a group itself."""
    affinity = request.affinity or miss.near
    if affinity == request.affinity and not miss.draft:
        return request
    return replace(request, affinity=affinity, cached_answer=miss.draft)


def keyed(lookup: LookupRequest, fingerprint: bytes, *, similar: bool) -> CacheQuery:
    """``lookup`` with its class and its keys under the engine's ``fingerprint``; ``similar``: for the semantic cache
    too.
    """
    request, control = lookup.request, lookup.control
    allowed = classify(request.params, control)
    if request.images:
        allowed = allowed._replace(semantic=False)  # the text of a turn says nothing of them
    key = beginning = partition = b""
    turn = lookup.turn() if allowed.semantic and similar else None
    if lookup.bars:
        allowed = CacheClass(exact=False, semantic=False, coalesce=False, why=lookup.bars)
    named = request
    if allowed.pool:
        named = replace(request, seed=0)  # slots distinguish the samples of a pool
    try:
        if allowed.exact:
            beginning = beginning_key(fingerprint, named, lookup.continues)
            key = answer_key(beginning, named)
        if allowed.exact and turn is not None:
            # Without max_tokens, the maximum length depends on the prompt's length: levels compare it.
            partition = beginning_key(fingerprint, named, lookup.continues, turn.context)
    except Unkeyable as error:
        allowed = CacheClass(exact=False, semantic=False, coalesce=False, why=str(error))
    return CacheQuery(request, control, allowed, key, beginning, turn, partition, lookup.origin, lookup.stops)
