"""Savings of the caches by tenant and layer: the tenant's part of ``GET /v1/cache/stats``.

`observe.cache_metrics` counts the same events for the whole server. Misses are not counted here, because the event of a
lookup does not name the tenant.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

from headrace.core.events import AdmitReason, Admitted, Arrived, Event, Finished, Layer, Spared
from headrace.observe.cost.ledger import Saving
from headrace.observe.cost.prices import TokenPrices, free
from headrace.observe.cost.report import saved_fields
from headrace.observe.metrics_page import OTHER

MAX_TENANTS = 10_000
"""Maximum number of tenants with separate counts; further ones are counted together as ``other``."""


class _Saved:
    """The counts of one tenant and one layer."""

    __slots__ = ("hits", "output_tokens", "prompt_tokens")

    def __init__(self) -> None:
        self.hits = self.prompt_tokens = self.output_tokens = 0

    def add(self, prompt_tokens: int, output_tokens: int) -> None:
        self.hits += 1
        self.prompt_tokens += prompt_tokens
        self.output_tokens += output_tokens


class Tokens(Protocol):
    """Numbers of prompt and output tokens."""

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def output_tokens(self) -> int: ...


class TenantSavings:
    """A `core.ports.Watcher` that counts hits and saved tokens per tenant and layer."""

    fold_tokens = None

    def __init__(self, prices: Callable[[], TokenPrices] = free) -> None:
        self._prices = prices
        self._saved: dict[str, dict[Layer, _Saved]] = {}
        self._tenants: dict[str, str] = {}  # of the open requests

    def fold(self, event: Event, now: float) -> None:
        if isinstance(event, Arrived):
            self._tenants[event.request_id] = event.tenant
        elif isinstance(event, Admitted):
            tenant = self._tenants.get(event.request_id)
            if event.reason is AdmitReason.NEW and event.cached_tokens and tenant is not None:
                self._of(tenant)[Layer.PREFIX].add(event.cached_tokens, 0)
        elif isinstance(event, Finished):
            self._tenants.pop(event.request_id, None)
        elif isinstance(event, Spared):
            self._of(event.tenant)[event.layer].add(event.prompt_tokens, event.output_tokens)

    def stats(self, tenant: str) -> dict[str, Any]:
        """One tenant's savings by layer, as plain values for JSON."""
        return {"tenant": tenant, "layers": saved_fields(self.savings(tenant))["saved"]}

    def totals(self) -> dict[tuple[str, Layer], tuple[int, int, int]]:
        """Hits, saved prompt tokens and saved output tokens of each tenant and layer."""
        return {
            (tenant, layer): (counts.hits, counts.prompt_tokens, counts.output_tokens)
            for tenant, layers in self._saved.items()
            for layer, counts in layers.items()
        }

    def savings(self, tenant: str) -> list[Saving]:
        """A tenant's savings by layer."""
        found = self._saved.get(tenant, {})
        return [
            Saving(
                tenant, layer.value, each.hits, each.prompt_tokens, each.output_tokens, self.cost(layer, each)
            )
            for layer, each in sorted(found.items())
        ]

    def cost(self, layer: Layer, saved: Tokens) -> float:
        """The cost of tokens that a layer saved, at the present prices."""
        prices = self._prices()
        if layer is Layer.PREFIX:
            return prices.saved_by_prefix(saved.prompt_tokens)
        return prices.saved(saved.prompt_tokens, saved.output_tokens)

    def _of(self, tenant: str) -> dict[Layer, _Saved]:
        name = tenant if tenant in self._saved or len(self._saved) < MAX_TENANTS else OTHER
        return self._saved.setdefault(name, defaultdict(_Saved))
