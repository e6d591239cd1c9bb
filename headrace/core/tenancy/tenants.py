"""Limits, weight and classes of each tenant, as frozen values.

The scheduler takes the weights, the gate takes the limits (`core.tenancy.quota` counts), the HTTP layer takes the
classes. A tenant without terms of its own has the default terms; each such tenant is counted separately.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.core.request import NO_SLO, Slo


class KvBound(NamedTuple):
    """A bound on KV tokens: ``tokens``, or a ``share`` (0 to 1) of the device's KV cache; the smaller if both."""

    tokens: int | None = None
    share: float | None = None

    def of(self, capacity: int) -> int | None:
        """The bound where the cache holds ``capacity`` tokens; None: no bound."""
        bounds = [] if self.tokens is None else [self.tokens]
        if self.share is not None:
            bounds.append(int(self.share * capacity))
        return min(bounds, default=None)


NO_KV_BOUND = KvBound()


# Classes of service: weight, minimum share and batching limits of each.
#
# A class has its own queue. Classes that have work share device time in proportion to their weights. The floor is a
# share that a class gets whatever the weights of the others are.


class ClassShare(NamedTuple):
    """A class's part of the device: its weight, and its least share (0 to 1) while it has work."""

    weight: float
    floor: float


@dataclass(frozen=True, slots=True)
class ServiceClass:
    """One class of service.

    ``level`` orders classes where time cannot be shared (preemption, slots): lower is served first.
    ``weight`` is its share of device time relative to the others, ``floor`` the least share (0 to 1) while it has
    work. ``prompt_tokens`` bounds the prompt tokens of this class that join in one step (0: no bound): small batches
    of prompts answer soon, large ones cost least. ``gather_seconds`` is how long its oldest waiting request may be
    held back to form a larger batch while other requests run. ``slo`` holds the latency targets of requests that
    state none. ``kv`` bounds the KV tokens that its running requests may hold together. ``most`` are the highest weight
    and floor that it may be given while it misses those targets (None: both stay).
    """

    name: str
    level: int
    weight: float
    floor: float = 0.0
    prompt_tokens: int = 0
    gather_seconds: float = 0.0
    slo: Slo = NO_SLO
    kv: KvBound = NO_KV_BOUND
    most: ClassShare | None = None


PRIORITY = ServiceClass("priority", 0, 8.0, 0.10, 512)
DEFAULT = ServiceClass("default", 1, 4.0, 0.10)
FLEX = ServiceClass("flex", 2, 1.0, 0.05, 0, 0.5)
BACKGROUND = ServiceClass("background", 3, 0.0)
"""Background work such as cache warming: it runs only while no other class has work."""

CLASSES = (PRIORITY, DEFAULT, FLEX, BACKGROUND)


def is_awaited(service_class: str) -> bool:
    """Whether a client waits for requests of this class."""
    return service_class != BACKGROUND.name


class TenantLimits(NamedTuple):
    """Bounds on one tenant's use; None: unbounded.

    Tokens are prompt tokens that were computed (cached tokens are free) plus generated tokens.
    ``concurrent_requests`` are calls that are open at the same time.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    concurrent_requests: int | None = None


UNLIMITED = TenantLimits()


@dataclass(frozen=True, slots=True)
class TenantTerms:
    """One tenant's terms.

    ``weight`` is its share of device time relative to other tenants of a class. A request that names no class is of
    ``default_class``; ``classes`` are those it may name (empty: all). ``limits`` bound all its calls together, except
    calls of ``models`` with limits of their own, which are counted separately. ``normalize`` are the per-request
    markers that are removed from its prompts or moved (None: the server's). ``kv`` bounds the KV tokens that its
    running requests may hold together.
    """

    weight: float = 1.0
    default_class: str = "default"
    classes: frozenset[str] = frozenset()
    limits: TenantLimits = UNLIMITED
    models: Mapping[str, TenantLimits] = field(default_factory=dict)
    normalize: frozenset[str] | None = None
    kv: KvBound = NO_KV_BOUND

    def may_use(self, service_class: str) -> bool:
        """Whether the tenant may name this class; its default class is always allowed."""
        return not self.classes or service_class in self.classes or service_class == self.default_class

    def limits_of(self, model: str) -> TenantLimits:
        """The bounds on calls of ``model``."""
        return self.models.get(model, self.limits)


@dataclass(frozen=True, slots=True)
class Tenants:
    """The terms of each named tenant, and the default terms of all others."""

    named: Mapping[str, TenantTerms] = field(default_factory=dict)
    default: TenantTerms = field(default_factory=TenantTerms)

    def terms(self, tenant: str) -> TenantTerms:
        """The terms of a tenant, named or not."""
        return self.named.get(tenant, self.default)

    def weights(self) -> dict[str, float]:
        """Weights of the named tenants, in units of the default weight."""
        return {name: terms.weight / self.default.weight for name, terms in self.named.items()}


EQUALS = Tenants()
"""All tenants have equal weight and no limit."""
