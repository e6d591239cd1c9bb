"""What a request, or all requests of a tenant in a class on a day, have used."""

from __future__ import annotations

from typing import NamedTuple

from headrace.observe.cost.prices import Pricing


class Key(NamedTuple):
    """An account: the day (days since 1970, UTC), tenant and service class."""

    day: int
    tenant: str
    service_class: str


class Cost(NamedTuple):
    """A cost: ``total`` is by tokens if these have prices, otherwise by device time."""

    total: float
    device: float
    tokens: float
    device_seconds: float


NOTHING = Cost(0.0, 0.0, 0.0, 0.0)


class Account:
    """Device time and tokens. ``prompt_tokens`` are without the ``cached_tokens``."""

    __slots__ = ("cached_tokens", "output_tokens", "prompt_tokens", "requests", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.requests = self.prompt_tokens = self.cached_tokens = self.output_tokens = 0

    def cost(self, pricing: Pricing) -> Cost:
        """The cost at these prices."""
        device = self.seconds * pricing.device_second
        tokens = pricing.tokens.of(self.prompt_tokens, self.cached_tokens, self.output_tokens)
        return Cost(tokens if pricing.by_token else device, device, tokens, self.seconds)

    def add(self, other: Account) -> None:
        """Add the usage of another account."""
        self.seconds += other.seconds
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.output_tokens += other.output_tokens


class Billed(NamedTuple):
    """An account with its key and the prices that applied."""

    key: Key
    model: str
    pricing: Pricing
    account: Account


class UnusedDay(NamedTuple):
    """Unused seconds of a day, and the prices that applied."""

    day: int
    model: str
    pricing: Pricing
    idle: float
    overhead: float


class Saving(NamedTuple):
    """Hits, tokens and cost that a cache layer saved for a tenant."""

    tenant: str
    layer: str
    hits: int
    prompt_tokens: int
    output_tokens: int
    cost: float


class Tab(Account):
    """The account of one request. Its usage is also added to the account ``of`` its tenant and class on ``day``.

    ``seconds`` include ``draft_seconds`` of draft models.
    """

    __slots__ = ("day", "draft_seconds", "of", "service_class", "tenant")

    def __init__(self, tenant: str, service_class: str, prompt_tokens: int) -> None:
        super().__init__()
        self.tenant = tenant
        self.service_class = service_class
        self.requests = 1
        self.day = -1
        self.draft_seconds = 0.0
        self.of: Account = self
