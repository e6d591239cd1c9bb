"""Bounds on the KV memory of tenants and classes, and which waiting requests they hold back.

A running request counts with the most tokens that it may ever hold, prompt and output, as if no prefix were shared. So
the sum never exceeds a bound, and no running request has to give up its blocks for one. Background work does not count:
it gives up its blocks whenever others need them.

A held request waits, and requests of other tenants start before it. Within one tenant a small request of another class
may pass it only `MAX_PASSES` times.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from headrace.core.tenancy.tenants import ServiceClass, Tenants

MAX_PASSES = 16
"""How many requests of the same tenant may start before one that its bound holds back."""


class Claimant(Protocol):
    """A waiting sequence; ``finish_length`` is the most tokens that it may hold, ``account`` that of its queue."""

    account: Any
    finish_length: int


class KvBounds(NamedTuple):
    """The bounds in tokens of named tenants, of each other tenant, and of classes; None: no bound."""

    tenants: Mapping[str, int | None]
    default: int | None
    classes: Mapping[str, int | None]

    def of_tenant(self, tenant: str) -> int | None:
        """The bound of a tenant, named or not."""
        return self.tenants.get(tenant, self.default)

    @property
    def any(self) -> bool:
        """Whether anything is bounded."""
        bounds = (self.default, *self.tenants.values(), *self.classes.values())
        return any(each is not None for each in bounds)


NO_KV_BOUNDS = KvBounds({}, None, {})


def kv_bounds(tenants: Tenants, classes: Iterable[ServiceClass], capacity: int) -> KvBounds:
    """The bounds where the KV cache holds ``capacity`` tokens."""
    return KvBounds(
        {name: terms.kv.of(capacity) for name, terms in tenants.named.items()},
        tenants.default.kv.of(capacity),
        {each.name: each.kv.of(capacity) for each in classes},
    )


class KvUse:
    """KV tokens that the running requests of one tenant, or of one class, may hold; ``bound`` None: no bound.

    ``claim`` is the first request that the bound holds back, ``passes`` how many of the tenant have started since.
    ``aside`` are the queues that wait until some of it is given back.
    """

    __slots__ = ("aside", "bound", "claim", "held", "passes")

    def __init__(self, bound: int | None) -> None:
        self.bound = bound
        self.held = 0
        self.claim: Claimant | None = None
        self.passes = 0
        self.aside: list[Any] = []

    def exceeds(self, tokens: int) -> bool:
        """Whether ``tokens`` more would exceed the bound; never if nothing is held, so that each request can run."""
        return self.bound is not None and self.held > 0 and self.held + tokens > self.bound

    def holds(self, sequence: Claimant) -> bool:
        """Whether this sequence, the first of its queue, must wait; the first one that must is the claim from then on.

        The claim may wait behind others of its own queue by now, so those may start before it.
        """
        if self.exceeds(sequence.finish_length):
            if self.claim is None:
                self.claim, self.passes = sequence, 0
            return True
        claim = self.claim
        return claim is not None and claim.account is not sequence.account and self.passes >= MAX_PASSES

    def started(self, sequence: Claimant) -> None:
        """A sequence has started: it is the claim, or has passed it."""
        if self.claim is sequence:
            self.claim = None
        elif self.claim is not None:
            self.passes += 1

    def ended(self, sequence: Claimant) -> None:
        """A waiting sequence has ended."""
        if self.claim is sequence:
            self.claim = None
