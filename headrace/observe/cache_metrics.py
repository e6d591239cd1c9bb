"""Counts what the caches saved: lookups, hits, time, tokens and cost of each cache layer.

```
 layer      hit                                             saved
 exact      the response of an equal request was cached     prompt and output tokens
 semantic   the response of a similar request was served    prompt and output tokens
 coalesced  another request was computing the response      prompt and output tokens
 partial    an unfinished response was resumed              output tokens
 prefix     blocks of the prompt were in the KV cache       prompt tokens
```
`observe.metrics` passes it events. ``/metrics`` shows its metrics and ``/v1/cache/stats`` its `stats`. Lookups in the
prefix cache are part of a step; a `TimedPool` measures them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from headrace.core.events import Audited, Evicted, EvictReason, Layer, LookedUp, Lookup, Spared, StoreFaulted
from headrace.core.memory.block_pool import BlockPool
from headrace.core.memory.prefix_hit import PrefixHit
from headrace.core.ports import StoreFacts
from headrace.observe.cost.prices import TokenPrices, free
from headrace.observe.metrics_page import Histogram, MetricsPage

LOOKUP_SECONDS = (0.00001, 0.00005, 0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5)

Sizes = Mapping[Layer, Mapping[str, StoreFacts]]
"""Entries and bytes of the stores of each layer, by name."""


class CacheMetrics:
    """Counts by layer; ``sizes`` is called when the counts are read, ``prices`` when tokens are saved."""

    def __init__(
        self,
        page: MetricsPage,
        prices: Callable[[], TokenPrices] = free,
        sizes: Callable[[], Sizes] = dict,
    ) -> None:
        self._prices = prices
        self._sizes = sizes
        self._evicted_blocks = 0
        layer = ["layer"]
        self._hits = page.counter("response_cache_hits", "Requests that a cache layer served.", layer)
        self._misses = page.counter("response_cache_misses", "Lookups that found nothing to serve.", layer)
        self._reasons = page.counter(
            "response_cache_miss_reasons",
            "Lookups that found nothing to serve, by reason, where it is known.",
            ["layer", "reason"],
        )
        self._certificates = page.counter(
            "response_cache_certified_hits",
            "Lookups of similar requests that found a response to serve, by the certificate of its threshold.",
            ["layer", "certificate"],
        )
        self._bypasses = page.counter(
            "response_cache_bypasses", "Requests that are not cacheable, by reason.", ["reason"]
        )
        self._tokens = page.counter(
            "saved_tokens", "Tokens that were served from a cache instead of computed.", ["layer", "kind"]
        )
        self._cost = page.counter(
            "saved_cost",
            "Cost of the saved tokens, at the prices of tokens or the measured cost of the device.",
            layer,
        )
        self._faults = page.counter(
            "response_cache_faults",
            "Lookups and writes that a cache store failed, by kind of fault.",
            ["store", "fault"],
        )
        self._audits = page.counter(
            "response_cache_audits",
            "Cached responses that were compared with computed ones, by result.",
            ["layer", "outcome"],
        )
        self._disabled = page.counter(
            "response_cache_refuted",
            "Cache partitions disabled because audits exceeded the configured error bound.",
            ["layer", "scope"],
        )
        self._evictions = page.counter("response_cache_evictions", "Entries evicted to make room.", layer)
        self._bytes = page.gauge("response_cache_bytes", "Bytes in all stores of a layer.", layer)
        self._entries = page.gauge("response_cache_entries", "Entries in all stores of a layer.", layer)
        self._seconds = page.histogram(
            "response_cache_lookup_seconds", "Time of a lookup.", LOOKUP_SECONDS, layer
        )

    def looked_up(self, event: LookedUp, now: float) -> None:
        """A cache was searched, or bypassed."""
        if event.outcome is Lookup.BYPASS:
            self._bypasses.of(event.reason).value += 1
            return
        self._seconds.of(event.layer.value).observe(event.seconds)
        if event.outcome is Lookup.MISS:
            self._misses.of(event.layer.value).value += 1
            if event.reason:
                self._reasons.of(event.layer.value, event.reason).value += 1
        elif event.reason:
            self._certificates.of(event.layer.value, event.reason).value += 1

    def spared(self, event: Spared, now: float) -> None:
        """A request was served from a cache."""
        layer = event.layer.value
        self._hits.of(layer).value += 1
        self._tokens.of(layer, "prompt").value += event.prompt_tokens
        self._tokens.of(layer, "output").value += event.output_tokens
        self._cost.of(layer).value += self._prices().saved(event.prompt_tokens, event.output_tokens)

    def audited(self, event: Audited, now: float) -> None:
        """A cached response was compared with a computed one."""
        self._audits.of(event.layer.value, "right" if event.right else "wrong").value += 1
        if event.refuted is not None:
            self._disabled.of(event.layer.value, event.refuted.value).value += 1

    def shared(self, cached_tokens: int) -> None:
        """A request was admitted for the first time, with ``cached_tokens`` of its prompt in the prefix cache."""
        layer = Layer.PREFIX.value
        if not cached_tokens:
            self._misses.of(layer).value += 1
            return
        self._hits.of(layer).value += 1
        self._tokens.of(layer, "prompt").value += cached_tokens
        self._cost.of(layer).value += self._prices().saved_by_prefix(cached_tokens)

    def time_prefix(self, lookups: Histogram) -> None:
        """Show ``lookups`` as the time of lookups in the prefix cache."""
        self._seconds.series[(Layer.PREFIX.value,)] = lookups

    def faulted(self, event: StoreFaulted, now: float) -> None:
        """A store failed."""
        self._faults.of(event.store, event.fault.value).value += 1

    def evicted(self, event: Evicted, now: float) -> None:
        """Blocks of the prefix cache were evicted."""
        if event.reason is not EvictReason.RESET:
            self._evicted_blocks += len(event.blocks)

    def measure(self) -> None:
        """Measure the sizes of all stores."""
        for layer, stores in self._measured().items():
            self._bytes.of(layer.value).value = sum(facts.nbytes or 0 for facts in stores.values())
            self._entries.of(layer.value).value = sum(facts.entries or 0 for facts in stores.values())
            self._evictions.of(layer.value).value = sum(facts.evictions for facts in stores.values())

    def stats(self) -> dict[str, Any]:
        """All counts by layer, as plain values for JSON."""
        sizes = self._measured()
        named = {name for family in (self._hits, self._misses) for (name,) in family.series}
        layers = [layer for layer in Layer if layer in sizes or layer.value in named]
        return {
            "layers": {
                layer.value: self._of(layer.value) | _stores(sizes.get(layer, {})) for layer in layers
            },
            "bypasses": {reason: int(cell.value) for (reason,), cell in self._bypasses.series.items()},
            "faults": {
                f"{store}:{fault}": int(cell.value) for (store, fault), cell in self._faults.series.items()
            },
        }

    def _measured(self) -> Sizes:
        """Sizes of all stores, with the evictions of the prefix cache, which arrive as events."""
        sizes = dict(self._sizes())
        if Layer.PREFIX in sizes:
            sizes[Layer.PREFIX] = {
                name: facts._replace(evictions=self._evicted_blocks)
                for name, facts in sizes[Layer.PREFIX].items()
            }
        return sizes

    def _of(self, layer: str) -> dict[str, Any]:
        hits, misses = self._hits.of(layer).value, self._misses.of(layer).value
        seconds = self._seconds.of(layer)
        count = sum(seconds.counts)
        return {
            "hits": int(hits),
            "misses": int(misses),
            "hit_rate": hits / (hits + misses) if hits + misses else None,
            "lookups": count,
            "lookup_seconds_mean": seconds.total / count if count else None,
            "misses_by_reason": {
                reason: int(cell.value)
                for (each, reason), cell in self._reasons.series.items()
                if each == layer
            },
            "audited_right": int(self._audits.of(layer, "right").value),
            "audited_wrong": int(self._audits.of(layer, "wrong").value),
            "refuted": {
                scope: int(cell.value)
                for (each, scope), cell in self._disabled.series.items()
                if each == layer
            },
            "saved_prompt_tokens": int(self._tokens.of(layer, "prompt").value),
            "saved_output_tokens": int(self._tokens.of(layer, "output").value),
            "saved_cost": self._cost.of(layer).value,
        }


def _stores(stores: Mapping[str, StoreFacts]) -> dict[str, Any]:
    if not stores:
        return {}
    return {
        "stores": {
            name: {"entries": facts.entries, "bytes": facts.nbytes, "evictions": facts.evictions}
            for name, facts in stores.items()
        }
    }


# Metrics of encoded images.


class ImageCounts(NamedTuple):
    """Images of requests, those of them that had been encoded before, the memory of encoded images, and the time spent
    encoding.
    """

    queries: int
    hits: int
    nbytes: int
    seconds: float


class ImageMetrics:
    """The counts on a page, read when it is rendered; the first two have vLLM's names."""

    def __init__(self, page: MetricsPage, counts: Callable[[], ImageCounts]) -> None:
        self._counts = counts
        self._cells = (
            page.counter("mm_cache_queries", "Images of requests, looked up among the encoded ones.").of(),
            page.counter("mm_cache_hits", "Images of requests that had been encoded before.").of(),
            page.gauge("mm_cache_bytes", "Memory of encoded images, in bytes.").of(),
            page.counter("image_encoder_seconds", "Time spent encoding images, in seconds.").of(),
        )
        page.before_render(self._measure)

    def _measure(self) -> None:
        for cell, value in zip(self._cells, self._counts(), strict=True):
            cell.value = value


# A block pool that measures its lookups in the prefix cache.
#
# The core knows no clock, so the time is taken around `BlockPool.match`. A lookup that a step repeats for a
# request that still waits counts again.


class TimedPool(BlockPool):
    """A `BlockPool` with the seconds of its lookups in ``lookups``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.lookups = Histogram(LOOKUP_SECONDS)

    def match(
        self, root: bytes, keys: Sequence[bytes], tokens: Sequence[int], limit: int, *, may_wait: bool = True
    ) -> PrefixHit:
        began = time.perf_counter()
        hit = super().match(root, keys, tokens, limit, may_wait=may_wait)
        self.lookups.observe(time.perf_counter() - began)
        return hit
