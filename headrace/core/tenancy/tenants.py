"""What each tenant may do and how much of the machine is his: terms as frozen values.

The scheduler takes the weights, the gate takes the limits (`core.tenancy.quota` counts), the edge takes the classes.
A tenant that nobody named has the default terms, and each such tenant has them for himself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class TenantLimits(NamedTuple):
    """Bounds on one tenant's use; None: unbounded.

    Tokens are those computed for prompts (what a cached prefix spares costs nothing) and those generated.
    ``concurrent_requests`` are calls that are open at once.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    concurrent_requests: int | None = None


UNLIMITED = TenantLimits()


@dataclass(frozen=True, slots=True)
class TenantTerms:
    """One tenant's terms.

    ``weight`` is his share of device time beside other tenants of a class. A request that names no class is of
    ``default_class``; ``classes`` are those he may name (empty: all). ``limits`` bound all his calls together, except
    those of the ``models`` that have limits of their own: these are counted apart.
    """

    weight: float = 1.0
    default_class: str = "default"
    classes: frozenset[str] = frozenset()
    limits: TenantLimits = UNLIMITED
    models: Mapping[str, TenantLimits] = field(default_factory=dict)

    def may_use(self, service_class: str) -> bool:
        """Whether he may ask for this class; the one that he gets unasked is always his."""
        return not self.classes or service_class in self.classes or service_class == self.default_class

    def limits_of(self, model: str) -> TenantLimits:
        """The bounds on calls of ``model``."""
        return self.models.get(model, self.limits)


@dataclass(frozen=True, slots=True)
class Tenants:
    """All that were named, and the terms of all others."""

    named: Mapping[str, TenantTerms] = field(default_factory=dict)
    default: TenantTerms = field(default_factory=TenantTerms)

    def terms(self, tenant: str) -> TenantTerms:
        """The terms of a tenant, named or not."""
        return self.named.get(tenant, self.default)

    def weights(self) -> dict[str, float]:
        """Weights of those who were named, in units of the weight of all others."""
        return {name: terms.weight / self.default.weight for name, terms in self.named.items()}


EQUALS = Tenants()
"""Everybody alike and nobody limited."""
