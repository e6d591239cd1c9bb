"""Who has been served how much: virtual time of classes, and of tenants within a class.

```
 class priority (weight 8)  virtual 120.0 ─┬─ tenant a (weight 1)  virtual 80.0
                                           └─ tenant b (weight 2)  virtual 95.5
 class flex     (weight 1)  virtual 118.2 ─── tenant a (weight 1)  virtual 40.0
```
Each row that is computed is charged to its tenant and its class, divided by their weights; whoever has the least goes
next. That is start-time fair queueing over classes, and virtual token counters over tenants (Sheng et al., Fairness in
Serving Large Language Models, OSDI '24), charged by computed cost, so that a prefix that is found costs its owner
nothing. One that begins to wait after a pause is lifted to the clock, less a bounded credit: who asks for little need
not wait with a few requests at once, and saves up nothing more. A class's clock is where the last one served stood, or
would stand by now if all who have requests were served alike: newcomers begin there, and however many come, they do not
keep it, and those who were served before, for ever where it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter

from headrace.core.tenancy.classes import ServiceClass

CREDIT_TOKENS = 8192.0
"""Cost, in tokens, that a tenant may have been served less than the others at most: some requests at once."""

SWEEP = 64
"""Idle accounts kept beside twice as many as are live."""

_virtual = attrgetter("virtual")


class Account:
    """What one class, or one tenant of a class, has been served, over its weight; ``live`` requests use it."""

    __slots__ = ("live", "name", "rate", "virtual")

    def __init__(self, name: str, weight: float, virtual: float = 0.0) -> None:
        self.name = name
        self.rate = 1.0 / weight if weight else 0.0
        self.virtual = virtual
        self.live = 0


class TenantAccount(Account):
    """A tenant of one class, its ``owner``; ``running`` of its requests do."""

    __slots__ = ("owner", "running")

    def __init__(self, name: str, weight: float, owner: ClassAccount) -> None:
        super().__init__(name, weight, owner.clock)
        self.owner = owner
        self.running = 0

    def charge(self, cost: float) -> None:
        """Book a row's cost here and with the class."""
        self.virtual += cost * self.rate
        owner = self.owner
        owner.virtual += cost * owner.rate
        owner.clock += cost / max(owner.weight, 1.0 / self.rate)

    def take_slot(self) -> None:
        """One more of its requests runs."""
        self.running += 1
        self.owner.running.add(self)

    def give_slot(self) -> None:
        """One of its requests runs no more."""
        self.running -= 1
        if not self.running:
            self.owner.running.discard(self)


class ClassAccount(Account):
    """A class of service with its tenants; ``clock`` is where one stands who has been served as the others were.

    ``weight`` is that of all who have requests, ``running`` are those of them who have some that run.
    """

    __slots__ = ("clock", "running", "tenants", "terms", "weight")

    def __init__(self, terms: ServiceClass) -> None:
        super().__init__(terms.name, terms.weight)
        self.terms = terms
        self.clock = 0.0
        self.weight = 0.0
        self.tenants: dict[str, TenantAccount] = {}
        self.running: set[TenantAccount] = set()


class ShareLedger:
    """All accounts. ``weights`` are the tenants' (1 for one not named)."""

    def __init__(self, classes: Iterable[ServiceClass], weights: Mapping[str, float]) -> None:
        self.classes = {terms.name: ClassAccount(terms) for terms in classes}
        self._weights = weights
        self._clock = 0.0

    def enter(self, service_class: str, tenant: str) -> TenantAccount:
        """A request begins to live; its account.

        Raises:
            KeyError: there is no such class.
        """
        owner = self.classes[service_class]
        account = owner.tenants.get(tenant)
        if account is None:
            account = TenantAccount(tenant, self._weights.get(tenant, 1.0), owner)
            owner.tenants[tenant] = account
        account.live += 1
        owner.live += 1
        if account.live == 1:
            owner.weight += 1.0 / account.rate
        if owner.live == 1:
            self._share_out()
        return account

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Replace the tenants' weights; what tenants have been served so far stays charged."""
        self._weights = weights
        for owner in self.classes.values():
            for account in owner.tenants.values():
                account.rate = 1.0 / weights.get(account.name, 1.0)
            owner.weight = sum(1.0 / each.rate for each in owner.tenants.values() if each.live)

    def lift(self, account: TenantAccount, *, alone: bool) -> None:
        """A tenant of whom nobody waited has somebody waiting again; ``alone``: nobody of its class waits."""
        owner = account.owner
        account.virtual = max(account.virtual, owner.clock - CREDIT_TOKENS * account.rate)
        if alone:
            owner.virtual = max(owner.virtual, self._clock)

    def serve(self, account: TenantAccount) -> None:
        """One of this account's requests leaves the queue to run."""
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
            del owner.tenants[account.name]  # a new one in its place will stand no better
        elif len(owner.tenants) > 2 * owner.live + SWEEP:
            idle = sorted((each for each in owner.tenants.values() if not each.live), key=_virtual)
            for each in idle[: (len(idle) + 1) // 2]:  # who owes least is forgiven first
                del owner.tenants[each.name]
        if not owner.live:
            owner.weight = 0.0  # sums of floats leave something behind
            self._share_out()

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
