"""Who has been served how much: virtual time of classes, and of tenants within a class.

```
 class priority (weight 8)  virtual 120.0 ─┬─ tenant a (weight 1)  virtual 80.0
                                           └─ tenant b (weight 2)  virtual 95.5
 class flex     (weight 1)  virtual 118.2 ─── tenant a (weight 1)  virtual 40.0
```
Each row that is computed is charged to its tenant and its class, divided by their weights; whoever has the least goes
next. That is start-time fair queueing over classes, and virtual token counters over tenants (Sheng et al., Fairness in
Serving Large Language Models, OSDI '24), charged by computed cost, so that a prefix that is found costs its owner
nothing. One that comes back after a pause is lifted to the least of those who stayed: being away saves up no credit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from headrace.core.classes import ServiceClass

SWEEP = 64
"""Idle accounts kept beside twice as many as are live."""


class Account:
    """What one class, or one tenant of a class, has been served, over its weight; ``live`` requests use it."""

    __slots__ = ("live", "name", "rate", "virtual")

    def __init__(self, name: str, weight: float) -> None:
        self.name = name
        self.rate = 1.0 / weight if weight else 0.0
        self.virtual = 0.0
        self.live = 0


class TenantAccount(Account):
    """A tenant of one class; ``owner`` is the class."""

    __slots__ = ("owner",)

    def __init__(self, name: str, weight: float, owner: ClassAccount) -> None:
        super().__init__(name, weight)
        self.owner = owner

    def charge(self, cost: float) -> None:
        """Book a row's cost here and with the class."""
        self.virtual += cost * self.rate
        owner = self.owner
        owner.virtual += cost * owner.rate


class ClassAccount(Account):
    """A class of service with its tenants."""

    __slots__ = ("tenants", "terms")

    def __init__(self, terms: ServiceClass) -> None:
        super().__init__(terms.name, terms.weight)
        self.terms = terms
        self.tenants: dict[str, TenantAccount] = {}


class Books:
    """All accounts. ``weights`` are the tenants' (1 for one not named)."""

    def __init__(self, classes: Iterable[ServiceClass], weights: Mapping[str, float]) -> None:
        self.classes = {terms.name: ClassAccount(terms) for terms in classes}
        self._weights = weights

    def enter(self, service_class: str, tenant: str) -> TenantAccount:
        """A request begins to live; its account, lifted to its peers' if it was idle.

        Raises:
            KeyError: there is no such class.
        """
        owner = self.classes[service_class]
        account = owner.tenants.get(tenant)
        if account is None:
            account = TenantAccount(tenant, self._weights.get(tenant, 1.0), owner)
            self._lift(account, owner.tenants.values())
            owner.tenants[tenant] = account
        elif not account.live:
            self._lift(account, owner.tenants.values())
        if not owner.live:
            self._lift(owner, self.classes.values())
        account.live += 1
        owner.live += 1
        if owner.live == 1:
            self._share_out()
        return account

    def leave(self, account: TenantAccount) -> None:
        """A request has ended."""
        owner = account.owner
        account.live -= 1
        owner.live -= 1
        if not account.live:
            self._forget(owner)
        if not owner.live:
            self._share_out()

    def _lift(self, account: Account, peers: Iterable[Account]) -> None:
        floor = min((peer.virtual for peer in peers if peer.live), default=account.virtual)
        account.virtual = max(account.virtual, floor)

    def _forget(self, owner: ClassAccount) -> None:
        """Drop idle accounts that are not ahead of anybody: a new one in their place would stand no better."""
        least = min((each.virtual for each in owner.tenants.values() if each.live), default=math.inf)
        if len(owner.tenants) > 2 * owner.live + SWEEP or least == math.inf:
            idle = [each for each in owner.tenants.values() if not each.live and each.virtual <= least]
            for each in idle:
                del owner.tenants[each.name]

    def _share_out(self) -> None:
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
