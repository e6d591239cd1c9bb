"""What the caches would save on requests that a log has: a fold over them in their order, which computes nothing.

```
 may it be cached? → exact, or coalesced with one that is being computed → semantic → prefix → computed, and stored
```
Keys and rules are those of the server, and prefixes are found in the engine's own block pool. A response is taken to be
complete and stored. Without a time of arrival, each request arrives when all before it have been answered, and nothing
expires. Memory is bounded: the least recently used keys, blocks and vectors are forgotten.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from headrace.core.block_keys import chained_keys, root_key
from headrace.core.events import Event, Layer
from headrace.core.images import contents
from headrace.core.memory.block_pool import BlockPool
from headrace.core.memory.eviction import LeastRecentlyUsed
from headrace.core.request import Request
from headrace.response_cache.query import CacheQuery
from headrace.response_cache.rules.cacheability import CacheDirectives
from headrace.response_cache.rules.key import Unkeyable, answer_key, beginning_key

MOST_KEYS = 500_000
"""Responses that are remembered; about 0.3 KB each."""

LEVELS = (Layer.EXACT, Layer.COALESCED, Layer.SEMANTIC, Layer.PREFIX)
"""In the order in which they are asked."""


class Sent(NamedTuple):
    """One sequence of a call, and the length of its output, which may be an expectation."""

    query: CacheQuery
    output_tokens: float


class LoggedCall(NamedTuple):
    """The sequences of a call that arrived ``at`` (None: not known) and took ``seconds`` to compute (None: not known).

    It was sent ``times`` times. ``fingerprint`` is that of the keys.
    """

    sequences: Sequence[Sent]
    fingerprint: bytes
    at: float | None = None
    seconds: float | None = None
    times: int = 1


class DeviceTimes(Protocol):
    """The device's time for a request, of whose prompt ``cached`` tokens are in the prefix cache."""

    def seconds(self, prompt: int, cached: int, output: float) -> float: ...

    def latency(self, prompt: int, output: float) -> float: ...


class SimilarRequests(Protocol):
    """The semantic cache: ``find`` returns the key of the stored response that it would serve."""

    def find(self, query: CacheQuery) -> bytes | None: ...

    def store(self, query: CacheQuery) -> None: ...

    def forget(self, key: bytes) -> None: ...


@dataclass(slots=True)
class Work:
    """Sequences, their tokens, and the device's time; savings are the part that is not computed."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: float = 0.0
    device_seconds: float = 0.0

    def add(self, times: int, prompt: int, output: float, seconds: float) -> None:
        """Add one sequence that was sent so many ``times``."""
        self.requests += times
        self.prompt_tokens += times * prompt
        self.output_tokens += times * output
        self.device_seconds += times * seconds

    def plus(self, other: Work) -> Work:
        """The sum. No request is in both: the prefix cache saves only on what is computed."""
        return Work(
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            self.output_tokens + other.output_tokens,
            self.device_seconds + other.device_seconds,
        )


class Stored(NamedTuple):
    """A response: when it is complete, when it was stored and expires, its tags, and how many samples there are."""

    ready: float
    since: float
    expires: float
    tags: frozenset[str]
    samples: int = 1


class StoredResponses:
    """The responses by key, at most ``most``; ``forgotten`` counts those that made room."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._stored: OrderedDict[bytes, Stored] = OrderedDict()
        self.forgotten = 0

    def find(self, key: bytes, control: CacheDirectives, now: float) -> Stored | None:
        """The response that may be served at ``now``, which may still be computed then."""
        stored = self._stored.get(key)
        if stored is None or stored.expires <= now or not stored.tags.issuperset(control.tags):
            return None
        if control.max_age is not None and now - stored.since > control.max_age:
            return None
        self._stored.move_to_end(key)
        return stored

    def store(self, key: bytes, stored: Stored) -> None:
        """Add or replace a response."""
        self._stored[key] = stored
        self._stored.move_to_end(key)
        if len(self._stored) > self._most:
            self._stored.popitem(last=False)
            self.forgotten += 1


class PrefixBlocks:
    """The prefix cache of an engine that computes one prompt after the other."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._pool = BlockPool(num_blocks, block_size, LeastRecentlyUsed(), _unheard)

    def admit(self, request: Request, fingerprint: bytes) -> int:
        """Compute a prompt; returns how many of its tokens were cached."""
        pool, tokens = self._pool, contents(request.tokens, request.images)
        size, root = pool.block_size, root_key(f"{fingerprint.hex()}\0{request.salt}", request.adapter)
        keys = chained_keys(root, tokens, size)
        hit = pool.match(root, keys, tokens, len(tokens) - 1)
        pool.share(hit.blocks)
        missing = -(-len(tokens) // size) - hit.full
        if missing > pool.num_free:  # the prompt is longer than the memory
            pool.release(hit.blocks)
            return hit.tokens(size)
        table = [*hit.blocks, *pool.allocate(missing)]
        whole, parent = len(keys), keys[hit.full - 1] if hit.full else root
        full_tokens = tokens[hit.full * size : whole * size]
        pool.register_chain(table[hit.full : whole], parent, full_tokens, keys[hit.full :], hit.full)
        if rest := tokens[whole * size :]:
            pool.register(table[whole], keys[-1] if keys else root, rest, start=whole)
        pool.release(table)
        return hit.tokens(size)


def _unheard(event: Event) -> None:
    """Evictions within an estimate are not reported."""


@dataclass(slots=True)
class Bypassed:
    """Sequences that may not be cached for one reason; ``repeats`` are equal to an earlier one but for the seed."""

    requests: int = 0
    repeats: int = 0


@dataclass(slots=True)
class Tally:
    """The result: all work, what each level saves after those before it, and what the prefix cache saves alone."""

    total: Work = field(default_factory=Work)
    saved: dict[Layer, Work] = field(default_factory=lambda: {layer: Work() for layer in LEVELS})
    prefix_alone: Work = field(default_factory=Work)
    near: Work = field(default_factory=Work)
    """Requests that are similar to an earlier one, as far as no calibration certifies it; they are computed."""
    bypassed: dict[str, Bypassed] = field(default_factory=dict)
    timed: int = 0
    """Calls with a time of arrival."""
    separable: int = 0
    """Those whose duration is known too, which separates coalesced requests from exact hits."""
    disordered: int = 0
    tenants: Counter[str] = field(default_factory=Counter)

    def together(self) -> Work:
        """What all levels save."""
        whole = Work()
        for layer in LEVELS:
            whole = whole.plus(self.saved[layer])
        return whole


class Estimate:
    """Folds calls into ``tally``.

    Args:
        ttl: seconds until a response expires, unless its request sets another time.
        num_blocks, block_size: the engine's KV cache.
        similar: the semantic cache, if it is estimated.
        certified: whether it serves what it finds; otherwise that is only counted.
        times: the device's times, if they are known.
        most_keys: responses that are remembered.
    """

    def __init__(
        self,
        *,
        ttl: float,
        num_blocks: int,
        block_size: int,
        similar: SimilarRequests | None = None,
        certified: bool = False,
        times: DeviceTimes | None = None,
        most_keys: int = MOST_KEYS,
    ) -> None:
        self.tally = Tally()
        self._ttl = ttl
        self._similar = similar
        self._certified = certified
        self._times = times
        self._responses = StoredResponses(most_keys)
        self._uncached = StoredResponses(most_keys)
        self._blocks = PrefixBlocks(num_blocks, block_size)
        self._blocks_alone = PrefixBlocks(num_blocks, block_size)
        self._now = 0.0

    @property
    def forgotten(self) -> int:
        """Keys that were forgotten: equal requests that are further apart are not found."""
        return self._responses.forgotten + self._uncached.forgotten

    def add(self, call: LoggedCall) -> None:
        """Fold the next call, in the order of arrival."""
        self._advance(call)
        for times in (1, call.times - 1):  # the second and later ones find what the first has stored
            if times:
                self._add(call, times)

    def _advance(self, call: LoggedCall) -> None:
        if call.at is None:
            return
        self.tally.timed += call.times
        self.tally.separable += call.times * (call.seconds is not None or self._times is not None)
        self.tally.disordered += call.at < self._now
        self._now = max(self._now, call.at)

    def _add(self, call: LoggedCall, times: int) -> None:
        for sent in call.sequences:
            request = sent.query.request
            self.tally.tenants[request.tenant] += times
            prompt, output = len(request.tokens), sent.output_tokens
            self.tally.total.add(times, prompt, output, self._seconds(sent, 0))
            self._admit(self._blocks_alone, self.tally.prefix_alone, call, sent, times)
        # A call with a sequence that may not be cached is computed as a whole, as in the server.
        if why := next((s.query.allowed.why for s in call.sequences if not s.query.allowed.exact), ""):
            for sent in call.sequences:
                self._bypass(call, sent, why, times)
            return
        found = [self._find(sent.query) for sent in call.sequences]
        begun: set[bytes] = set()
        for sent, layer in zip(call.sequences, found, strict=True):
            query, whole = sent.query, (len(sent.query.request.tokens), sent.output_tokens)
            if layer in (None, Layer.SEMANTIC) and query.key in begun:
                layer = Layer.COALESCED
            if layer is Layer.SEMANTIC and not self._certified:
                self.tally.near.add(times, *whole, self._seconds(sent, 0))
            elif layer is not None:
                self.tally.saved[layer].add(times, *whole, self._seconds(sent, 0))
                continue
            if query.control.only_if_cached:
                continue
            self._compute(call, sent, times)
            self._store(call, sent)
            if query.allowed.coalesce:
                begun.add(query.key)

    def _find(self, query: CacheQuery) -> Layer | None:
        """The level that answers, before the engine is asked."""
        if query.control.no_cache:
            return None
        stored = self._responses.find(query.key, query.control, self._now)
        if stored is not None and stored.samples >= query.allowed.pool:
            if stored.ready <= self._now:
                return Layer.EXACT
            if query.allowed.coalesce:
                return Layer.COALESCED
        if not query.allowed.semantic or self._similar is None:
            return None
        key = self._similar.find(query)
        if key is None:
            return None
        near = self._responses.find(key, query.control, self._now)
        if near is None:
            self._similar.forget(key)
        return Layer.SEMANTIC if near is not None and near.ready <= self._now else None

    def _store(self, call: LoggedCall, sent: Sent) -> None:
        query, now = sent.query, self._now
        ttl = self._ttl if query.control.ttl is None else query.control.ttl
        before = self._responses.find(query.key, query.control, now) if query.allowed.pool else None
        ready = now if call.at is None else now + self._latency(call, sent)
        expires = float("inf") if call.at is None else ready + ttl
        samples = 1 if before is None else before.samples + 1
        stored = Stored(ready, ready, expires, frozenset(query.control.tags), samples)
        self._responses.store(query.key, stored)
        if query.allowed.semantic and self._similar is not None:
            self._similar.store(query)

    def _bypass(self, call: LoggedCall, sent: Sent, why: str, times: int) -> None:
        self._compute(call, sent, times)
        tally = self.tally.bypassed.setdefault(why, Bypassed())
        tally.requests += times
        named = replace(sent.query.request, seed=0)
        try:
            key = answer_key(beginning_key(call.fingerprint, named, continues=False), named)
        except Unkeyable:
            return
        before = self._uncached.find(key, sent.query.control, self._now)
        tally.repeats += times if before is not None else 0
        self._uncached.store(key, Stored(0.0, 0.0, float("inf"), frozenset(sent.query.control.tags)))

    def _compute(self, call: LoggedCall, sent: Sent, times: int) -> None:
        self._admit(self._blocks, self.tally.saved[Layer.PREFIX], call, sent, times)

    def _admit(self, blocks: PrefixBlocks, saved: Work, call: LoggedCall, sent: Sent, times: int) -> None:
        request = sent.query.request
        cached = blocks.admit(request, call.fingerprint)
        if cached and request.params.prompt_logprobs is None:
            seconds = self._seconds(sent, 0) - self._seconds(sent, cached)
            saved.add(times, cached, 0.0, seconds)

    def _seconds(self, sent: Sent, cached: int) -> float:
        if self._times is None:
            return 0.0
        return self._times.seconds(len(sent.query.request.tokens), cached, sent.output_tokens)

    def _latency(self, call: LoggedCall, sent: Sent) -> float:
        if call.seconds is not None:
            return call.seconds
        if self._times is None:
            return 0.0
        return self._times.latency(len(sent.query.request.tokens), sent.output_tokens)
