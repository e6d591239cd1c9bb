"""The ledger of what was not computed: per layer its look-ups, hits, time, tokens and money.

```
 exact      Spared: a whole answer was kept              prompt + output tokens
 semantic   Spared: a near question's answer served      prompt + output tokens
 coalesced  Spared: another call was computing it        prompt + output tokens
 partial    Spared: an answer was taken up where it      output tokens
            had been left
 prefix     Admitted: blocks of the prompt were there    prompt tokens
```
A fold over the same events as all metrics; `observe.metrics` shows its families, ``/v1/cache/stats`` its `stats`. The
prefix cache looks up within a step, whose time is that of the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.core.cache.response.entry import StoreFacts
from headrace.core.events import Audited, Evicted, EvictReason, Layer, LookedUp, Lookup, Spared, StoreFaulted
from headrace.observe.metrics_page import MetricsPage

LOOKUP_SECONDS = (0.00001, 0.00005, 0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5)
_MILLION = 1e6


@dataclass(frozen=True, slots=True)
class Prices:
    """What a million tokens cost, in whatever currency: of the prompt and of the answer."""

    input: float = 0.0
    output: float = 0.0

    def of(self, prompt_tokens: int, output_tokens: int) -> float:
        """What a call of so many tokens costs."""
        return (prompt_tokens * self.input + output_tokens * self.output) / _MILLION


FREE = Prices()


Sizes = Mapping[Layer, Mapping[str, StoreFacts]]
"""How full each layer's stores are, by their names."""


class CacheLedger:
    """Counts by layer; ``sizes`` is asked when somebody reads."""

    def __init__(self, sheet: MetricsPage, prices: Prices = FREE, sizes: Callable[[], Sizes] = dict) -> None:
        self._prices = prices
        self._sizes = sizes
        self._evicted_blocks = 0
        layer = ["layer"]
        self._hits = sheet.counter("response_cache_hits", "Requests answered without computing.", layer)
        self._misses = sheet.counter("response_cache_misses", "Look-ups that found nothing to serve.", layer)
        self._reasons = sheet.counter(
            "response_cache_miss_reasons",
            "Why look-ups found nothing, where it is known.",
            ["layer", "reason"],
        )
        self._bypasses = sheet.counter(
            "response_cache_bypasses", "Requests that no cache may answer.", ["reason"]
        )
        self._tokens = sheet.counter("saved_tokens", "Tokens not computed.", ["layer", "kind"])
        self._money = sheet.counter("saved_cost", "What they would have cost, by the prices given.", layer)
        self._faults = sheet.counter(
            "response_cache_faults", "Look-ups and writes that a store failed.", ["store", "fault"]
        )
        self._audits = sheet.counter(
            "response_cache_audits", "Kept answers compared with computed ones.", ["layer", "outcome"]
        )
        self._refuted = sheet.counter(
            "response_cache_refuted",
            "Tenants and partitions to whom audits have refuted the promise.",
            ["layer", "scope"],
        )
        self._evictions = sheet.counter("response_cache_evictions", "Entries dropped for room.", layer)
        self._bytes = sheet.gauge("response_cache_bytes", "Bytes held, all stores together.", layer)
        self._entries = sheet.gauge("response_cache_entries", "Entries held, all stores together.", layer)
        self._seconds = sheet.histogram(
            "response_cache_lookup_seconds", "Time of a look-up.", LOOKUP_SECONDS, layer
        )

    def looked_up(self, event: LookedUp, now: float) -> None:
        """A cache was asked, or was not."""
        if event.outcome is Lookup.BYPASS:
            self._bypasses.of(event.reason).value += 1
            return
        self._seconds.of(event.layer.value).observe(event.seconds)
        if event.outcome is Lookup.MISS:
            self._misses.of(event.layer.value).value += 1
            if event.reason:
                self._reasons.of(event.layer.value, event.reason).value += 1

    def spared(self, event: Spared, now: float) -> None:
        """A request was answered without computing."""
        layer = event.layer.value
        self._hits.of(layer).value += 1
        self._tokens.of(layer, "prompt").value += event.prompt_tokens
        self._tokens.of(layer, "output").value += event.output_tokens
        self._money.of(layer).value += self._prices.of(event.prompt_tokens, event.output_tokens)

    def audited(self, event: Audited, now: float) -> None:
        """A kept answer was compared with a computed one."""
        self._audits.of(event.layer.value, "right" if event.right else "wrong").value += 1
        if event.refuted is not None:
            self._refuted.of(event.layer.value, event.refuted.value).value += 1

    def shared(self, cached_tokens: int) -> None:
        """A request was admitted for the first time, with ``cached_tokens`` of its prompt computed before."""
        layer = Layer.PREFIX.value
        if not cached_tokens:
            self._misses.of(layer).value += 1
            return
        self._hits.of(layer).value += 1
        self._tokens.of(layer, "prompt").value += cached_tokens
        self._money.of(layer).value += self._prices.of(cached_tokens, 0)

    def faulted(self, event: StoreFaulted, now: float) -> None:
        """A store could not be used."""
        self._faults.of(event.store, event.fault.value).value += 1

    def evicted(self, event: Evicted, now: float) -> None:
        """Blocks of the prefix cache were needed for something else."""
        if event.reason is not EvictReason.RESET:
            self._evicted_blocks += len(event.blocks)

    def measure(self) -> None:
        """Ask how full everything is."""
        for layer, stores in self._full().items():
            self._bytes.of(layer.value).value = sum(facts.nbytes or 0 for facts in stores.values())
            self._entries.of(layer.value).value = sum(facts.entries or 0 for facts in stores.values())
            self._evictions.of(layer.value).value = sum(facts.evictions for facts in stores.values())

    def stats(self) -> dict[str, Any]:
        """Everything by layer, as plain values for JSON."""
        sizes = self._full()
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

    def _full(self) -> Sizes:
        """How full everything is; the engine tells its evictions as events instead of counting them."""
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
                for (each, scope), cell in self._refuted.series.items()
                if each == layer
            },
            "saved_prompt_tokens": int(self._tokens.of(layer, "prompt").value),
            "saved_output_tokens": int(self._tokens.of(layer, "output").value),
            "saved_cost": self._money.of(layer).value,
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
