"""Virtual time of classes, and of tenants within a class: how much service each has received.

```
 class priority (weight 8)  virtual 120.0 ─┬─ tenant a (weight 1)  virtual 80.0
                                           └─ tenant b (weight 2)  virtual 95.5
 class flex     (weight 1)  virtual 118.2 ─── tenant a (weight 1)  virtual 40.0
```
Each computed row is charged to its tenant and its class, divided by their weights; the lowest virtual time is served
next. This is start-time fair queueing over classes, and virtual token counters over tenants (Sheng et al., Fairness in
Serving Large Language Models, OSDI '24). The charge is the computed cost, so a cached prefix is free. A tenant that
begins to wait after a pause is lifted to the clock, less a bounded credit: a light tenant may send a few requests at
once, but it cannot save up more. The clock of a class is the virtual time of the tenant served last, or what it would
be by now if all tenants with requests had been served alike. New tenants start there; the clock moves on with the work
done, so a stream of new tenants cannot hold back those that were served before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from operator import attrgetter

from headrace.core.tenancy.kv_limits import NO_KV_BOUNDS, KvBounds, KvUse
from headrace.core.tenancy.tenants import ClassShare, ServiceClass

CREDIT_TOKENS = 8192.0  # see docs/decisions/scheduling.md#virtual-time-of-a-tenant
"""The most service, in tokens, that a tenant may be behind the others after a pause."""

SWEEP = 64
"""Idle accounts kept in addition to twice the number of live ones."""

_virtual = attrgetter("virtual")


class Account:
    """Service received by a class, or by a tenant of a class, over its weight; ``live`` counts its requests."""

    __slots__ = ("live", "name", "rate", "virtual")

    def __init__(self, name: str, weight: float, virtual: float = 0.0) -> None:
        self.name = name
        self.rate = 1.0 / weight if weight else 0.0
        self.virtual = virtual
        self.live = 0


class TenantAccount(Account):
    """A tenant of one class (``owner``); ``running`` counts its running requests. ``kv`` is shared with its accounts in
    other classes.
    """

    __slots__ = ("kv", "owner", "running")

    def __init__(self, name: str, weight: float, owner: ClassAccount, kv: KvUse) -> None:
        super().__init__(name, weight, owner.clock)
        self.owner = owner
        self.running = 0
        self.kv = kv

    def charge(self, cost: float) -> None:
        """Charge a row's cost to the tenant and its class."""
        self.virtual += cost * self.rate
        owner = self.owner
        owner.virtual += cost * owner.rate
        owner.clock += cost / max(owner.weight, 1.0 / self.rate)

    def take_slot(self, tokens: int) -> None:
        """A request of the tenant has started to run, and may hold ``tokens`` of KV."""
        self.running += 1
        self.kv.held += tokens
        self.owner.kv.held += tokens
        self.owner.running.add(self)

    def give_slot(self, tokens: int) -> None:
        """A request of the tenant, which might have held ``tokens`` of KV, has stopped running."""
        self.running -= 1
        self.kv.held -= tokens
        self.owner.kv.held -= tokens
        if not self.running:
            self.owner.running.discard(self)


class ClassAccount(Account):
    """A class of service with its tenants; ``clock`` is the virtual time of a tenant served like the others.

    ``weight`` is the sum over tenants with requests, ``running`` are the tenants with running requests.
    """

    __slots__ = ("clock", "kv", "running", "tenants", "terms", "weight")

    def __init__(self, terms: ServiceClass, kv_bound: int | None) -> None:
        super().__init__(terms.name, terms.weight)
        self.terms = terms
        self.clock = 0.0
        self.weight = 0.0
        self.kv = KvUse(kv_bound if terms.weight else None)
        self.tenants: dict[str, TenantAccount] = {}
        self.running: set[TenantAccount] = set()


class ShareLedger:
    """All accounts. ``weights`` are those of named tenants; all others have weight 1. ``kv`` bounds their memory."""

    def __init__(
        self, classes: Iterable[ServiceClass], weights: Mapping[str, float], kv: KvBounds = NO_KV_BOUNDS
    ) -> None:
        self.classes = {terms.name: ClassAccount(terms, kv.classes.get(terms.name)) for terms in classes}
        self._weights = weights
        self._kv = kv
        self.bounded = kv.any
        self.freed: list[KvUse] = []
        """Tenants whose waiting requests may fit now, because memory was given back or bounds have changed."""
        self._uses: dict[str, KvUse] = {}  # of tenants with a foreground account
        self._clock = 0.0

    def enter(self, service_class: str, tenant: str) -> TenantAccount:
        """The account of a new request.

        Raises:
            KeyError: there is no such class.
        """
        owner = self.classes[service_class]
        account = owner.tenants.get(tenant)
        if account is None:
            account = TenantAccount(tenant, self._weights.get(tenant, 1.0), owner, self._use(owner, tenant))
            owner.tenants[tenant] = account
        account.live += 1
        owner.live += 1
        if account.live == 1:
            owner.weight += 1.0 / account.rate
        if owner.live == 1:
            self._set_class_rates()
        return account

    def _use(self, owner: ClassAccount, tenant: str) -> KvUse:
        """The KV memory of a tenant in all foreground classes; background work has one of its own, without a bound."""
        if not owner.terms.weight:
            return KvUse(None)
        return self._uses.setdefault(tenant, KvUse(self._kv.of_tenant(tenant)))

    def set_kv_bounds(self, kv: KvBounds) -> None:
        """Replace the bounds of tenants; requests that run go on."""
        self._kv = self._kv._replace(tenants=kv.tenants, default=kv.default)
        self.bounded = self.bounded or kv.any
        for tenant, use in self._uses.items():
            use.bound = kv.of_tenant(tenant)
        self.freed += self._uses.values()

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Replace the tenants' weights; what tenants have been served so far stays charged."""
        self._weights = weights
        for owner in self.classes.values():
            for account in owner.tenants.values():
                account.rate = 1.0 / weights.get(account.name, 1.0)
            owner.weight = sum(1.0 / each.rate for each in owner.tenants.values() if each.live)

    def set_class_shares(self, shares: Mapping[str, ClassShare]) -> None:
        """Replace weight and floor of some classes; what they have been served so far stays charged."""
        for name, (weight, floor) in shares.items():
            account = self.classes[name]
            account.terms = replace(account.terms, weight=weight, floor=floor)
        self._set_class_rates()

    def lift(self, account: TenantAccount, *, alone: bool) -> None:
        """A tenant without waiting requests has one again; ``alone``: no request of its class waits."""
        owner = account.owner
        account.virtual = max(account.virtual, owner.clock - CREDIT_TOKENS * account.rate)
        if alone:
            owner.virtual = max(owner.virtual, self._clock)

    def serve(self, account: TenantAccount) -> None:
        """A request of this account leaves the queue to run."""
        owner = account.owner
        owner.clock = max(account.virtual, min(owner.clock, account.virtual + CREDIT_TOKENS))
        self._clock = max(self._clock, owner.virtual)

    def leave(self, account: TenantAccount) -> None:
        """A request has ended."""
        owner = account.owner
        account.live -= 1
        owner.live -= 1
        if not account.live:
            owner.weight -= 1.0 / account.rate
        if not account.live and account.virtual <= owner.clock:
            self._drop(owner, account.name)  # a new account would have the same virtual time
        elif len(owner.tenants) > 2 * owner.live + SWEEP:
            idle = sorted((each for each in owner.tenants.values() if not each.live), key=_virtual)
            for each in idle[
                : (len(idle) + 1) // 2
            ]:  # the lowest virtual time first: it has the least to lose
                self._drop(owner, each.name)
        if not owner.live:
            owner.weight = 0.0  # clears the rounding error of the sums
            self._set_class_rates()

    def _drop(self, owner: ClassAccount, tenant: str) -> None:
        del owner.tenants[tenant]
        if not any(tenant in each.tenants for each in self.classes.values() if each.terms.weight):
            self._uses.pop(tenant, None)

    def _set_class_rates(self) -> None:
        """Effective weights of the classes that have work: in proportion, but none below its floor."""
        active = [each for each in self.classes.values() if each.live and each.terms.weight]
        total = sum(each.terms.weight for each in active)
        held = {each.name for each in active if each.terms.weight < each.terms.floor * total}
        floors = sum(each.terms.floor for each in active if each.name in held)
        free = sum(each.terms.weight for each in active if each.name not in held)
        for each in active:
            share = (
                each.terms.floor if each.name in held else each.terms.weight / free * max(0.0, 1.0 - floors)
            )
            each.rate = 1.0 / share if share else 1e9


# Fairness of service between tenants: weighted max-min shares, and Jain's index over them.
#
# Demands differ, so equal service is not fair service: a tenant that demands little and gets all of it has lost nothing
# to one that demands much. Service is therefore compared with the weighted max-min share of the capacity.


def jain(values: Iterable[float]) -> float:
    """Jain's index of ``values``: 1 when all are equal, 1/n when one has everything; 1 of nothing.

    Jain, Chiu and Hawe, DEC-TR-301, 1984. To judge allocations under unequal demands, give it each allocation
    divided by the fair one, as they do.
    """
    listed = list(values)
    squares = math.fsum(value * value for value in listed)
    if squares == 0.0:
        return 1.0
    return math.fsum(listed) ** 2 / (len(listed) * squares)


def fair_shares(
    demands: Mapping[str, float], weights: Mapping[str, float], capacity: float
) -> dict[str, float]:
    """Weighted max-min shares of ``capacity``: no tenant gets more than its demand; what it leaves goes to the rest.

    ``weights`` has a positive entry for each name in ``demands``.
    """
    shares: dict[str, float] = {}
    left, weight_left = capacity, math.fsum(weights[name] for name in demands)
    for name in sorted(demands, key=lambda name: demands[name] / weights[name]):
        share = min(demands[name], left * min(1.0, weights[name] / weight_left)) if weight_left > 0 else left
        shares[name] = share
        left = max(0.0, left - share)
        weight_left -= weights[name]
    return shares
