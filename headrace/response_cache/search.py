"""Searches the caches for one response: exact cache first, then the other levels. Any failure is a miss."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from headrace.core.events import Layer, LookedUp, Lookup
from headrace.response_cache.exact import ExactCache
from headrace.response_cache.ports import Level
from headrace.response_cache.query import CacheQuery, LookupRequest
from headrace.response_cache.rules.cacheability import CacheDirectives
from headrace.response_cache.rules.entry import Hit, Miss
from headrace.response_cache.single_flight import Flights
from headrace.response_cache.writer import CacheWriter
from headrace.service.service import Service

logger = logging.getLogger(__name__)


class Search:
    """Finds cached responses; equal concurrent searches run once.

    Args:
        service: receives an event for each lookup.
        exact: the exact cache.
        levels: searched in order after the exact cache, for requests whose class allows it.
        writer: writes responses that have just been computed, before they are searched for.
        flights: the running computations.
        renew: called for a hit that should be computed again soon, with its tokens.
    """

    def __init__(
        self,
        service: Service,
        exact: ExactCache,
        levels: Sequence[Level],
        writer: CacheWriter,
        flights: Flights,
        renew: Callable[[LookupRequest, tuple[int, ...]], None],
    ) -> None:
        self._service = service
        self._exact = exact
        self._levels = tuple(levels)
        self._writer = writer
        self._flights = flights
        self._renew = renew
        self._running: dict[tuple[bytes, CacheDirectives], asyncio.Task[Hit | Miss]] = {}

    async def find(self, ask: CacheQuery, question: LookupRequest) -> Hit | Miss:
        """The cached response to ``ask``, or why there is none."""
        if ask.control.no_cache:
            return Miss("no_cache", draft=await self._exact.draft(ask))
        await self._writer.catch_up(ask)
        at_hand = self._exact.at_hand and not (self._levels and ask.allowed.semantic)
        if at_hand or not ask.allowed.coalesce:
            return await self._look_up(ask, question)
        if self._flights.followed(ask) is not None and not ask.control.only_if_cached:
            return Miss("coalesced")
        name = (ask.key, ask.control)
        task = self._running.get(name)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._look_up(ask, question))
            self._running[name] = task
            task.add_done_callback(lambda _: self._running.pop(name, None))
        found = await asyncio.shield(task)
        if isinstance(found, Hit) and not self._exact.serves(ask, found.entry.versions):
            return Miss("cleared")  # it was invalidated after it had been found
        return found

    async def _look_up(self, ask: CacheQuery, question: LookupRequest) -> Hit | Miss:
        began = self._service.now()
        found = await self._exact.find(ask)
        self._note(ask, Layer.EXACT, began, found is not None)
        if found is not None:
            if found.refresh:
                self._renew(question, found.entry.tokens)
            return Hit(found.entry, Layer.EXACT, found.key, self._exact.age(found.entry))
        near, draft = "", await self._exact.draft(ask)
        for level in self._levels if ask.allowed.semantic else ():
            began = self._service.now()
            try:
                hit = await level.find(ask)
            except Exception:
                logger.exception("the %s cache failed on request %s", level.layer, ask.request.id)
                hit = Miss("failed")
            self._note(
                ask, level.layer, began, isinstance(hit, Hit), hit.why if isinstance(hit, Miss) else ""
            )
            if isinstance(hit, Hit):
                return hit
            near, draft = near or hit.near, draft or hit.draft
        return Miss(near=near, draft=draft)

    def _note(self, ask: CacheQuery, layer: Layer, began: float, hit: bool, why: str = "") -> None:
        outcome = Lookup.HIT if hit else Lookup.MISS
        self._service.note(LookedUp(ask.request.id, layer, outcome, self._service.now() - began, why))
