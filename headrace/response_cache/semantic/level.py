"""The semantic cache (L2) as a level of the lookup: finds a similar request's response and audits its answers.

    turn, partition → verdict of the search thread within the deadline → the served model's verdict on the pair, if
    it is the second judge → entry from the exact cache → audit? → serve

Any failure is a miss. A random sample of hits is computed anyway and compared (an audit). An audit counts only for its
tenant and its partition. The cache is disabled for tenants and partitions whose audits exceed the error bound.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from headrace.core.events import Audited, Event, Layer, Scope
from headrace.core.ports import StoreFacts
from headrace.core.request import FinishReason
from headrace.response_cache.exact import ExactCache
from headrace.response_cache.partial import UnfinishedAnswer
from headrace.response_cache.query import CacheQuery
from headrace.response_cache.rules.audits import AuditRate, Audits
from headrace.response_cache.rules.circuit_breaker import CircuitBreaker
from headrace.response_cache.rules.entry import Entry, Hit, Miss, Served
from headrace.response_cache.rules.judge import Decline, Doubt
from headrace.response_cache.rules.pairs import Pair, Verdicts
from headrace.response_cache.rules.tags import counter_of
from headrace.response_cache.semantic.pair_book import PairBook
from headrace.response_cache.semantic.rows import SharedRows
from headrace.response_cache.semantic.search_thread import Computed, Proposal, SearchThread

logger = logging.getLogger(__name__)

_PENDING = 10_000
"""Maximum number of pending audits; the oldest is dropped."""
_WATCHED = 10_000
"""Maximum numbers of tenants and of partitions whose audits are counted; 0.4 KB each."""
_ALIKE = 0.7
"""From this cosine on, a request that is computed is grouped with requests that share the nearest one's answer."""


class Mode(StrEnum):
    """The use of a hit: it is only compared, it is a draft for speculative decoding, or it is served."""

    SHADOW = "shadow"
    DRAFT = "draft"
    SERVE = "serve"


class SemanticCache:
    """A `response_cache.ports.Level` and `core.ports.CacheListener`.

    Args:
        search_thread: the search thread, which decides which entry may be served.
        exact: the exact cache, which has the entries.
        mode: shadow compares every hit and serves none; draft neither compares nor serves.
        spell: returns the text of a response's tokens.
        tell: receives events.
        deadline: seconds that a lookup may take.
        audit: the share of hits that are computed anyway; with ``adapts_audit`` it follows the errors.
        verdicts: the served model's verdicts on pairs of messages; without them none is needed.
        shared: the rows that other servers have too; the same as the search thread's.
        pairs: pairs for people to label, and what labels certify; the same as the search thread's.
        max_error: the error bound that audits check.
        confidence: the confidence at which an exceeded bound disables the cache.
        seed: of the random choice of audits.
    """

    layer = Layer.SEMANTIC

    def __init__(
        self,
        search_thread: SearchThread,
        exact: ExactCache,
        mode: Mode,
        spell: Callable[[tuple[int, ...]], str],
        tell: Callable[[Event], None],
        *,
        deadline: float,
        audit: float,
        max_error: float,
        confidence: float,
        adapts_audit: bool = False,
        verdicts: Verdicts | None = None,
        shared: SharedRows | None = None,
        pairs: PairBook | None = None,
        seed: int = 0,
    ) -> None:
        self._search_thread = search_thread
        self._exact = exact
        self._mode = mode
        self._spell = spell
        self._tell = tell
        self._deadline = deadline
        serves = mode is Mode.SERVE
        self._audit = AuditRate(audit if serves else 1.0, max_error, adapts=serves and adapts_audit)
        self._verdicts = verdicts
        self._shared = shared
        self.pairs = pairs
        self._max_error = max_error
        self._random = random.Random(seed)
        self._breaker = CircuitBreaker()
        self._pending: OrderedDict[bytes, bytes] = (
            OrderedDict()
        )  # by the request's key: the entry that would have been served
        self._tenants = Audits(max_error, confidence, _WATCHED)
        self._partitions = Audits(max_error, confidence, _WATCHED)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start on the running loop; until the index has been rebuilt, lookups miss their deadline."""
        self._loop = asyncio.get_running_loop()
        self._search_thread.start()
        if self._shared is not None:
            self._shared.start(self._search_thread.take)

    async def stop(self) -> None:
        """Stop the thread and close the file."""
        await asyncio.to_thread(self._search_thread.stop)
        if self._shared is not None:
            await self._shared.stop()
        if self.pairs is not None:
            self.pairs.close()

    async def find(self, query: CacheQuery) -> Hit | Miss:
        """A similar request's response, or why there is none."""
        if query.turn is None or not query.partition:
            return Miss("no_turn")
        if self._switched_off(query):
            return Miss("switched_off")
        now = time.monotonic()
        if not self._breaker.permits(now):
            return Miss("resting")
        proposal = await self._propose(query, now)
        if isinstance(proposal, Miss):
            return proposal
        if proposal.similarity < query.request.settings.semantic_min_similarity:
            return Miss("too_little_similarity")
        if self._verdicts is not None:
            pair = Pair(query.request.tenant, query.partition, query.turn.text, proposal.question)
            same = self._verdicts.of(pair)
            if not same:
                return Miss(str(Doubt.JUDGE_PENDING if same is None else Doubt.JUDGE_REFUSED))
        entry = await self._exact.at(proposal.key)
        if entry is None:
            if self._exact.whole:
                self._search_thread.lose(proposal.key)
            return Miss("gone")
        if not self._exact.serves(query, entry.versions):
            return Miss("other_tags")
        if self._mode is Mode.DRAFT:
            return Miss("draft", draft=entry.tokens)
        limit, oldest = query.request.params.max_tokens, query.control.max_age
        if limit is not None and len(entry.tokens) > limit:
            return Miss("longer_than_asked")
        age = self._exact.age(entry)
        if oldest is not None and age > oldest:
            return Miss("too_old")
        if self._random.random() < self._audit.share and not query.control.only_if_cached:
            self._pending[query.key] = proposal.key
            if len(self._pending) > _PENDING:
                self._pending.popitem(last=False)
            return Miss("shadow" if self._mode is Mode.SHADOW else "audit")
        if self._mode is Mode.SHADOW:
            return Miss("shadow")
        return Hit(entry, Layer.SEMANTIC, proposal.key, age, proposal.similarity, proposal.certificate)

    def stored(self, query: CacheQuery, entry: Entry) -> None:
        """Index a computed response; in an audit, compare it with the one that would have been served."""
        instead = self._pending.pop(query.key, None)
        if query.turn is None or not query.partition or entry.reason is not FinishReason.STOP:
            return

        def audited(right: bool) -> None:
            loop = self._loop
            if loop is not None and not loop.is_closed():
                loop.call_soon_threadsafe(self._audited, query, right)

        computed = Computed(
            key=query.key,
            partition=query.partition,
            question=query.turn.text,
            spell=lambda: self._spell(entry.tokens),
            tags=tuple(tag for tag, _ in entry.versions),
            expires=entry.stale_until,
            instead=instead,
        )
        self._search_thread.note(computed, audited)

    def interrupted(self, query: CacheQuery, beginning: UnfinishedAnswer) -> None:
        """Drop the audit of a response that was not completed."""
        self._pending.pop(query.key, None)

    def cleared(self, tag: str) -> None:
        """Remove all rows with ``tag``. The store deletes those that are shared."""
        self.cleared_elsewhere(counter_of(tag))

    def cleared_elsewhere(self, counter: str) -> None:
        """Remove all rows with a tag of this counter, which another server has raised."""
        self._search_thread.forget_tag(counter)

    def barred(self, served: Served) -> None:
        """Remove the entry of a wrong response, so that it is not served to similar requests of any user."""
        self._search_thread.forget(served.source or served.key)

    def facts(self) -> Mapping[str, StoreFacts]:
        """Size of the index."""
        return {"memory": self._search_thread.facts()}

    def state(self, tenant: str | None = None) -> Mapping[str, Any]:
        """The thresholds and what certifies them, for all tenants or one, and the rows that are shared."""
        shared = {} if self._shared is None or tenant is not None else {"shared_rows": self._shared.state()}
        return {**({} if self.pairs is None else self.pairs.state(tenant)), **shared}

    def lines(self) -> Sequence[str]:
        """What holds for a threshold that was given by hand."""
        return () if self.pairs is None else self.pairs.lines()

    async def _propose(self, query: CacheQuery, now: float) -> Proposal | Miss:
        assert query.turn is not None
        until, tenant = now + self._deadline, query.request.tenant
        found = self._search_thread.search(query.partition, query.key, query.turn.text, until, tenant)
        try:
            verdict = await asyncio.wait_for(asyncio.wrap_future(found), self._deadline)
        except TimeoutError:
            verdict = None
        except Exception:
            self._breaker.failed(time.monotonic())
            raise
        if verdict is None:
            self._breaker.failed(time.monotonic())
            return Miss("late")
        self._breaker.succeeded()
        if not isinstance(verdict, Decline):
            return verdict
        near = verdict.neighbour
        alike = near is not None and near.cosine >= _ALIKE
        return Miss(str(verdict.why), f"{query.partition.hex()}/{near.answer:x}" if near and alike else "")

    def _switched_off(self, query: CacheQuery) -> bool:
        refuted = self._tenants.refuted(query.request.tenant) or self._partitions.refuted(query.partition)
        return refuted and self._mode is Mode.SERVE

    def _audited(self, query: CacheQuery, right: bool) -> None:
        tenant, partition = query.request.tenant, query.partition
        by_tenant = self._tenants.observe(tenant, not right)
        by_partition = self._partitions.observe(partition, not right)
        refuted = Scope.TENANT if by_tenant else Scope.PARTITION if by_partition else None
        self._tell(Audited(query.request.id, Layer.SEMANTIC, right, refuted))
        if why := self._audit.observe(not right):
            logger.info("semantic audits are %.3g of all hits: %s", self._audit.share, why)
        if refuted is not None:
            logger.warning(
                "audits exceed the error bound %.3g of the semantic cache for tenant %r%s%s",
                self._max_error,
                tenant,
                "" if by_tenant else f" in partition {partition.hex()[:12]}",
                ": it is switched off for them" if self._mode is Mode.SERVE else "",
            )
