"""The exact cache (L1): responses by their key, in one or several stores, the fastest first."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from headrace.core.ports import StoreFacts
from headrace.core.request import FinishReason
from headrace.response_cache.query import CacheQuery
from headrace.response_cache.rules.cacheability import NO_DIRECTIVES
from headrace.response_cache.rules.entry import Entry, Freshness, freshness
from headrace.response_cache.rules.key import slot_key, slot_served
from headrace.response_cache.rules.tags import EVERYTHING, TagVersions, tenant_tag, user_tag
from headrace.response_cache.stores.tier import Tier

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Interval of reading other servers' invalidations from the stores: an invalidated response may be served that long."""

BARRED_SECONDS = 30 * 86400.0
"""How long a response that was reported as wrong stays barred."""

COUNTED_POOLS = 10_000


class Found(NamedTuple):
    """An entry that may be served, its key, and whether a newer one should be computed."""

    entry: Entry
    key: bytes
    refresh: bool


class ExactCache:
    """Finds, stores and invalidates entries.

    Args:
        tiers: the fastest first; an entry found in a later one is copied to those before it.
        versions: the versions of all tags; `start` keeps them up to date.
        wall: Unix time, so that entries can be shared between processes.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        versions: TagVersions,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._tiers = tuple(tiers)
        self.at_hand = all(tier.at_hand for tier in tiers)  # a lookup never waits
        self._versions = versions
        self.wall = wall
        self._random = random.Random(0)  # of early renewals
        # The versions that each store reported last. A store that has not reported any is not searched.
        self._reported: dict[str, Mapping[str, int]] = {tier.name: {} for tier in tiers if tier.at_hand}
        self._unpublished: dict[str, set[str]] = {}  # counters whose invalidation each store has missed
        self._samples: OrderedDict[bytes, int] = OrderedDict()  # number stored, of unfilled pools
        self._filling = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None
        self.heard: Callable[[str], None] = lambda counter: None
        """Called with each counter of tags that another server has raised since this one has read them."""

    async def start(self) -> None:
        """Read the invalidations of other servers now and regularly; on the running loop.

        A store whose versions are unknown is not searched, because it may contain invalidated responses. So the start
        waits for them, at most `POLL_SECONDS`.
        """
        if not self.at_hand:
            await asyncio.wait(
                [asyncio.ensure_future(self._read_invalidations(tier)) for tier in self._tiers],
                timeout=POLL_SECONDS,
            )
            self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def close(self) -> None:
        """Close all stores."""
        if self._watching is not None:
            self._watching.cancel()
        for tier in self._tiers:
            await tier.close()

    def snapshot(self, query: CacheQuery) -> tuple[tuple[str, int], ...]:
        """The current versions of the response's tags; take them when its computation begins."""
        tenant = query.request.tenant
        own = [user_tag(tenant, tag) for tag in query.control.tags]
        return self._versions.snapshot([EVERYTHING, tenant_tag(tenant), *own])

    def serves(self, query: CacheQuery, versions: tuple[tuple[str, int], ...]) -> bool:
        """Whether a response computed under ``versions`` may be served to ``query``.

        It may not if one of its tags has been invalidated since, or if it lacks a tag of the request, because
        invalidating that tag would not invalidate the response.
        """
        return self._versions.current(versions) and set(versions).issuperset(self.snapshot(query))

    async def find(self, query: CacheQuery) -> tuple[Found | None, tuple[int, ...]]:
        """The entry that may be served to ``query``; without one, the tokens of its `draft`."""
        samples = query.allowed.pool
        if not samples:
            found = await self._find(query.key, query)
            return found, () if found is not None else await self.draft(query)
        if await self._find(slot_key(query.key, samples - 1), query) is None:
            return None, ()  # not full: the first samples would be served more often than later ones
        found = await self._find(slot_key(query.key, slot_served(query.request.seed, samples)), query)
        return None if found is None else found._replace(refresh=False), ()

    async def draft(self, query: CacheQuery) -> tuple[int, ...]:
        """The tokens of an entry in memory that may not be served, for example because it has expired.

        They are used as a draft for speculative decoding. An invalidated or wrong entry is no draft.
        """
        for tier in self._tiers if not query.allowed.pool else ():
            entry = await tier.find(query.key) if tier.at_hand else None
            if entry is not None and not entry.barred and self.serves(query, entry.versions):
                return entry.tokens
        return ()

    async def at(self, key: bytes) -> Entry | None:
        """The stored entry under the ``key`` of another request."""
        found = await self._find(key)
        return None if found is None else found.entry

    @property
    def whole(self) -> bool:
        """Whether all stores answer: otherwise an entry that was not found may still exist."""
        return all(tier.name in self._reported and not tier.failing for tier in self._tiers)

    async def keep(self, query: CacheQuery, entry: Entry) -> bytes | None:
        """Store an entry, unless it was invalidated or barred meanwhile; returns its key."""
        key = query.key if not query.allowed.pool else await self._free_slot(query)
        for tier in (
            () if query.allowed.pool else self._tiers
        ):  # another sample may take the place of a wrong one
            known = await tier.find(key)
            if known is not None and known.barred and known.expires > self.wall():
                return None
        if not self._versions.current(entry.versions):
            return None
        for tier in self._tiers:
            await tier.keep(key, entry, entry.stale_until - self.wall())
        return key

    async def bar(self, key: bytes) -> None:
        """Delete a wrong entry, and store no other one under its ``key`` for `BARRED_SECONDS`."""
        now = self.wall()
        until = now + BARRED_SECONDS
        barred = Entry((), FinishReason.STOP, 0, 0.0, now, until, until, barred=True)
        for tier in self._tiers:
            await tier.keep(key, barred, BARRED_SECONDS)

    async def clear(self, tag: str) -> Mapping[str, bool]:
        """Invalidate all entries with ``tag`` at once; returns for each store whether it was reached."""
        counter = self._versions.raise_(tag)
        reached = {tier.name: await tier.clear(counter) for tier in self._tiers}
        for name in [name for name, done in reached.items() if not done]:
            self._unpublished.setdefault(name, set()).add(counter)
        return reached

    def age(self, entry: Entry) -> float:
        """Seconds since ``entry`` was computed."""
        return max(0.0, self.wall() - entry.created)

    def facts(self) -> Mapping[str, StoreFacts]:
        """Sizes of the stores."""
        return {tier.name: tier.facts() for tier in self._tiers}

    async def _find(self, key: bytes, query: CacheQuery | None = None) -> Found | None:
        control = NO_DIRECTIVES if query is None else query.control
        for number, tier in enumerate(self._tiers):
            if tier.name not in self._reported:
                continue
            entry = await tier.find(key)
            if entry is None:
                continue
            if entry.barred:
                return None
            now = self.wall()
            state = freshness(entry, now, self._chance(), control.max_age)
            servable = self._versions.current if query is None else partial(self.serves, query)
            if state is Freshness.GONE or not servable(entry.versions):
                continue
            if state is Freshness.STALE and now - entry.expires > control.stale_while_revalidate:
                continue
            for nearer in self._tiers[:number]:
                await nearer.keep(key, entry, entry.stale_until - now)
            return Found(entry, key, refresh=state is not Freshness.FRESH)
        return None

    def _chance(self) -> float:
        return -math.log(1.0 - self._random.random())

    async def _free_slot(self, query: CacheQuery) -> bytes:
        """The key of a pool's next sample: the first free slot, or the slot of the drawn sample if none is free."""
        samples = query.allowed.pool
        async with self._filling:
            kept = self._samples.pop(query.key, None)
            if kept is None:
                kept = 0
                while kept < samples and await self._find(slot_key(query.key, kept)) is not None:
                    kept += 1
            self._samples[query.key] = min(kept + 1, samples)
            while len(self._samples) > COUNTED_POOLS:
                self._samples.popitem(last=False)
        if kept == samples:
            last = slot_key(query.key, samples - 1)
            full = await self._find(last, query) is not None
            return slot_key(query.key, slot_served(query.request.seed, samples)) if full else last
        return slot_key(query.key, kept)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            for tier in self._tiers:
                await self._read_invalidations(tier)

    async def _read_invalidations(self, tier: Tier) -> None:
        """Read the invalidations of one store, and write back those that it lacks."""
        if tier.at_hand:
            return
        numbers = await tier.versions()
        if numbers is None:
            return
        first = tier.name not in self._reported
        news = self._versions.merge(numbers, self._reported.get(tier.name, {}))
        self._reported[tier.name] = numbers
        for counter in news:
            if not first:  # at first, all that were ever raised are new here
                self.heard(counter)
            for nearer in self._tiers:
                if nearer.at_hand:
                    await nearer.clear(counter)
        missed = self._unpublished.pop(tier.name, set())
        self._versions.exceed(missed, numbers)
        behind = self._versions.ahead_of(numbers)
        if behind and not await tier.advance(behind):
            self._unpublished.setdefault(tier.name, set()).update(missed)
