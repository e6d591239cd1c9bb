"""The exact cache (L1): an answer under its own key, through one or several stores in the order of their cost."""

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

from headrace.core.cache.response.control import NO_DIRECTIVES
from headrace.core.cache.response.entry import Entry, Freshness, StoreFacts, freshness
from headrace.core.cache.response.query import CacheQuery
from headrace.core.cache.response.sample_pool import slot_key, slot_served
from headrace.core.cache.response.tags import EVERYTHING, TagVersions, tenant_tag, user_tag
from headrace.core.request import FinishReason
from headrace.serve.cache.stores.tier import Tier

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""How often to ask the stores what others have cleared: so long a cleared answer may still be served elsewhere."""

BARRED_SECONDS = 30 * 86400.0
"""How long a wrong answer is remembered."""

COUNTED_POOLS = 10_000


class Found(NamedTuple):
    """An entry that may be served: under which key, and whether a newer one should be computed."""

    entry: Entry
    key: bytes
    refresh: bool


class ExactCache:
    """Looks entries up, keeps them, and makes them unservable.

    Args:
        tiers: the nearest first; what a further one has is put into the nearer ones.
        versions: of all tags; `watch` keeps them up to date.
        wall: Unix time, which other processes and later ones share.
        seed: of the early renewals' randomness.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        versions: TagVersions,
        wall: Callable[[], float] = time.time,
        seed: int = 0,
    ) -> None:
        self._tiers = tuple(tiers)
        self.at_hand = all(tier.at_hand for tier in tiers)  # a look-up never waits
        self._versions = versions
        self.wall = wall
        self._random = random.Random(seed)
        # What each store said last; one that has not yet said what was cleared is not asked for answers.
        self._told: dict[str, Mapping[str, int]] = {tier.name: {} for tier in tiers if tier.at_hand}
        self._samples: OrderedDict[bytes, int] = OrderedDict()  # kept so far, of pools under way
        self._filling = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Learn what others have cleared, and go on learning; on the running loop.

        A store whose versions are not known yet is not asked: it may hold what was cleared. The first answers are worth
        a moment's wait.
        """
        if not self.at_hand:
            await asyncio.wait(
                [asyncio.ensure_future(self._hear(tier)) for tier in self._tiers], timeout=POLL_SECONDS
            )
            self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def close(self) -> None:
        """Let go of all stores."""
        if self._watching is not None:
            self._watching.cancel()
        for tier in self._tiers:
            await tier.close()

    def snapshot(self, ask: CacheQuery) -> tuple[tuple[str, int], ...]:
        """The tags of the answer to ``ask`` as they are now: to be taken when its computing begins."""
        tenant = ask.request.tenant
        own = [user_tag(tenant, tag) for tag in ask.control.tags]
        return self._versions.snapshot([EVERYTHING, tenant_tag(tenant), *own])

    def serves(self, ask: CacheQuery, versions: tuple[tuple[str, int], ...]) -> bool:
        """Whether ``ask`` may have an answer that was begun under ``versions``.

        It may not if one of its tags has been cleared since, nor if the answer lacks a tag of its own: to clear that
        would not clear the answer.
        """
        return self._versions.current(versions) and set(versions).issuperset(self.snapshot(ask))

    async def find(self, ask: CacheQuery) -> Found | None:
        """What may be served for ``ask``, if anything may."""
        if not ask.allowed.pool:
            return await self._find(ask.key, ask)
        samples = ask.allowed.pool
        if await self._find(slot_key(ask.key, samples - 1), ask) is None:
            return None  # not full: who came first would be served more often than the others
        found = await self._find(slot_key(ask.key, slot_served(ask.request.seed, samples)), ask)
        return None if found is None else found._replace(refresh=False)

    async def at(self, key: bytes) -> Entry | None:
        """The entry under ``key`` as it is kept, for those who hold another answer's key."""
        found = await self._find(key)
        return None if found is None else found.entry

    async def keep(self, ask: CacheQuery, entry: Entry) -> bytes | None:
        """Put an answer into every store, unless it has been cleared or barred meanwhile; under which key."""
        key = ask.key if not ask.allowed.pool else await self._free_slot(ask)
        for tier in () if ask.allowed.pool else self._tiers:  # a wrong sample leaves its place to another one
            known = await tier.find(key)
            if known is not None and known.barred and known.expires > self.wall():
                return None
        if not self._versions.current(entry.versions):
            return None
        for tier in self._tiers:
            await tier.keep(key, entry, entry.stale_until - self.wall())
        return key

    async def bar(self, key: bytes) -> None:
        """Forget the answer under ``key`` and keep none there: it was wrong."""
        now = self.wall()
        until = now + BARRED_SECONDS
        barred = Entry((), FinishReason.STOP, 0, 0.0, now, until, until, barred=True)
        for tier in self._tiers:
            await tier.keep(key, barred, BARRED_SECONDS)

    async def clear(self, tag: str) -> Mapping[str, bool]:
        """Make all entries with ``tag`` unservable here at once; of each store, whether it has heard of it."""
        self._versions.raise_(tag)
        return {tier.name: await tier.clear(tag) for tier in self._tiers}

    def age(self, entry: Entry) -> float:
        """Seconds since ``entry`` was computed."""
        return max(0.0, self.wall() - entry.created)

    def facts(self) -> Mapping[str, StoreFacts]:
        """How full each store is."""
        return {tier.name: tier.facts() for tier in self._tiers}

    async def _find(self, key: bytes, ask: CacheQuery | None = None) -> Found | None:
        control = NO_DIRECTIVES if ask is None else ask.control
        for number, tier in enumerate(self._tiers):
            if tier.name not in self._told:
                continue
            entry = await tier.find(key)
            if entry is None:
                continue
            if entry.barred:
                return None
            now = self.wall()
            state = freshness(entry, now, self._chance(), control.max_age)
            servable = self._versions.current if ask is None else partial(self.serves, ask)
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

    async def _free_slot(self, ask: CacheQuery) -> bytes:
        """Where the next sample of a pool goes: the first free place, or the drawn one's where none is."""
        samples = ask.allowed.pool
        async with self._filling:
            kept = self._samples.pop(ask.key, None)
            if kept is None:
                kept = 0
                while kept < samples and await self._find(slot_key(ask.key, kept)) is not None:
                    kept += 1
            self._samples[ask.key] = min(kept + 1, samples)
            while len(self._samples) > COUNTED_POOLS:
                self._samples.popitem(last=False)
        if kept == samples:
            last = slot_key(ask.key, samples - 1)
            full = await self._find(last, ask) is not None
            return slot_key(ask.key, slot_served(ask.request.seed, samples)) if full else last
        return slot_key(ask.key, kept)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            for tier in self._tiers:
                await self._hear(tier)

    async def _hear(self, tier: Tier) -> None:
        """Learn what has been cleared in one store, and tell it what it could not hear or has lost."""
        if tier.at_hand:
            return
        numbers = await tier.versions()
        if numbers is None:
            return
        news = self._versions.merge(numbers, self._told.get(tier.name, {}))
        self._told[tier.name] = numbers
        for tag in news:
            for nearer in self._tiers:
                if nearer.at_hand:
                    await nearer.clear(tag)
        behind = self._versions.ahead_of(numbers)
        if behind:
            await tier.advance(behind)
