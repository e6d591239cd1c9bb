"""The cost ledger: a fold over events that divides the wall clock among requests, idle time and overhead.

```
 |<- idle ->|<- overhead ->|<------ step ------>|<- overhead ->|<-- step -->|<- idle ...
 no request  arrived, not   divided among the    between steps
 is open     planned yet    requests of its rows
```
A step lasts from its planning, or from the end of the previous step if later, to its commit. So overlapping device time
is counted once. Time in which requests are open and no step computes is overhead: waiting for disk reads or for a
static batch to fill, delivering events, and interrupted steps. Slices of embeddings run between steps, and are divided
among their calls by tokens.

**Conservation**: requests + idle + overhead = wall clock. `balance` computes both sides from separate sums.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from headrace.core.embedding import Embedded, EmbeddingSlice
from headrace.core.events import (
    AdmitReason,
    Admitted,
    Arrived,
    Emitted,
    Event,
    Finished,
    Stepped,
)
from headrace.observe.cost.prices import BY_TOKENS, Coefficients, Pricing, TokenPrices, shares
from headrace.observe.metrics_page import OTHER, MetricsPage

# What a request, or all requests of a tenant in a class on a day, have used.


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


MOST_TENANTS = 10_000
"""Maximum number of tenants with separate accounts; further tenants are counted together as ``other``."""

MOST_DAYS = 93
"""Number of days with separate accounts; older days are merged."""

MOST_ENDED = 10_000
"""Number of ended requests whose cost is kept."""

DAY_SECONDS = 86_400.0

POOLED_CLASS = "default"
"""The service class of calls to embedding models."""


class Balance(NamedTuple):
    """Wall-clock seconds since the ledger began, up to the last event, and the seconds of its parts."""

    wall: float
    attributed: float
    idle: float
    overhead: float

    @property
    def error(self) -> float:
        """Relative difference between the wall clock and the sum of its parts; 0 before the first event."""
        return abs(self.attributed + self.idle + self.overhead - self.wall) / self.wall if self.wall else 0.0


class Unused:
    """Unused seconds of a day."""

    __slots__ = ("idle", "overhead")

    def __init__(self) -> None:
        self.idle = self.overhead = 0.0


class CostLedger:
    """A `core.ports.Watcher`.

    ``coefficients`` returns the step time model that `core.prediction.step_times` has learned. ``began`` is the start
    of the ledger on the engine's clock; ``clock_offset`` is Unix time minus the engine's clock.
    """

    def __init__(
        self,
        pricing: Pricing,
        coefficients: Callable[[], Coefficients] = lambda: BY_TOKENS,
        *,
        began: float = 0.0,
        clock_offset: float = 0.0,
    ) -> None:
        self.pricing = pricing
        self.accounts: dict[Key, Account] = {}
        self.older: dict[str, Account] = {}
        """Usage of tenants on older days."""
        self.unused: dict[int, Unused] = {}
        """Idle seconds and overhead of each day (days since 1970, UTC)."""
        self.kinds = {"prefill": 0.0, "decode": 0.0, "mixed": 0.0}
        """Seconds of steps that contained only prefill rows, only decode rows, or both."""
        self._coefficients = coefficients
        self._clock_offset = clock_offset
        self.step_seconds = 0.0
        """Duration of the last step."""
        self.draft_seconds = 0.0
        """Time of draft models, within the attributed time."""
        self.began = self._mark = began  # time before the mark is already attributed
        self._idle_from = began  # when the last request ended
        self._live: dict[str, Tab] = {}
        self._pooled: dict[str, Tab] = {}  # calls to embedding models
        self._ended: OrderedDict[str, Tab] = OrderedDict()
        self._tenants: set[str] = set()
        self._older_unused = Unused()
        self.prefill_seconds = self.decode_seconds = 0.0
        """Seconds of steps that went to prefill rows and to decode rows."""
        self._prefill_tokens = self._output_tokens = 0

    # -- events ------------------------------------------------------------------------------------

    def fold(self, event: Event, now: float) -> None:
        kind = type(event)
        if kind is Emitted:
            self.fold_tokens((event,), now)  # type: ignore[arg-type]
        elif kind is Stepped:
            self._stepped(event, now)  # type: ignore[arg-type]
        elif isinstance(event, Arrived):
            at = now if event.at is None else min(event.at, now)
            if not self._live:
                self._rest_until(at)
            self._live[event.request_id] = Tab(event.tenant, event.service_class, event.prompt_tokens)
        elif isinstance(event, Admitted):
            if event.reason is AdmitReason.NEW:
                self._admitted(event, now)
        elif isinstance(event, Finished):
            self._finished(event, now)
        elif kind is EmbeddingSlice:
            self._sliced(event)  # type: ignore[arg-type]
        elif isinstance(event, Embedded):
            self._embedded(event)

    def fold_tokens(self, emitted: Sequence[Emitted], now: float) -> None:
        """Tokens of a step."""
        for request_id, tokens, _ in emitted:
            tab, count = self._live[request_id], len(tokens)
            tab.output_tokens += count
            tab.of.output_tokens += count
            self._output_tokens += count

    def _admitted(self, event: Admitted, now: float) -> None:
        tab = self._live[event.request_id]
        account = self._account(tab, self._day(now))
        account.requests += 1
        tab.cached_tokens, tab.prompt_tokens = event.cached_tokens, event.known_tokens - event.cached_tokens
        account.cached_tokens += tab.cached_tokens
        account.prompt_tokens += tab.prompt_tokens

    def _finished(self, event: Finished, now: float) -> None:
        tab = self._live.pop(event.request_id, None)
        if tab is None:  # rejected before it reached the engine
            return
        self._end(event.request_id, tab)
        if not self._live:
            self._idle_from = now

    def _end(self, request_id: str, tab: Tab) -> None:
        self._ended[request_id] = tab
        if len(self._ended) > MOST_ENDED:
            self._ended.popitem(last=False)

    def _stepped(self, event: Stepped, now: float) -> None:
        """A step's `Finished` events precede its `Stepped`, so its requests may have ended already."""
        began, request_ids, rows, drafting = event.work
        self._pass("overhead", began)
        seconds = self.step_seconds = max(0.0, now - self._mark)
        if seconds <= 0.0 or not rows:
            return
        self._mark = now
        decodes = event.decode_rows
        self.kinds["decode" if not event.prefill_rows else "mixed" if decodes else "prefill"] += seconds
        day = self._day(now)
        drafted = min(seconds, sum(drafting))
        parts = shares(rows, event.computed_tokens, seconds - drafted, self._coefficients())
        if drafted:
            self._draft(request_ids, drafting, drafted, parts)
        live, ended = self._live, self._ended
        for request_id, part in zip(request_ids, parts, strict=True):
            tab = live.get(request_id) or ended.get(request_id)
            if tab is None:
                self._unused(day).overhead += part
                continue
            tab.seconds += part
            if tab.day != day:
                self._account(tab, day)
            tab.of.seconds += part
        if event.prefill_rows:
            prefill = sum(parts[decodes:])
            self.prefill_seconds += prefill
            self.decode_seconds += seconds - prefill
            self._prefill_tokens += sum([row[2] for row in rows[decodes:]])
        else:
            self.decode_seconds += seconds

    def _sliced(self, event: EmbeddingSlice) -> None:
        began, ended, calls = event
        if self._live or any(call.request_id in self._pooled for call in calls):
            self._pass("overhead", began)
        else:
            self._rest_until(began)
        seconds, tokens = max(0.0, ended - self._mark), sum(call.tokens for call in calls)
        self._mark = max(self._mark, ended)
        self._idle_from = max(self._idle_from, ended)
        day = self._day(ended)
        for call in calls:
            tab = self._pooled.get(call.request_id)
            if tab is None:
                tab = self._pooled[call.request_id] = Tab(call.tenant, POOLED_CLASS, call.tokens)
                self._account(tab, day).requests += 1
            elif tab.day != day:
                self._account(tab, day)
            part = seconds * call.tokens / tokens
            tab.seconds += part
            tab.of.seconds += part

    def _embedded(self, event: Embedded) -> None:
        tab = self._pooled.pop(event.request_id, None)
        if tab is not None:  # else nothing of it was computed
            tab.prompt_tokens = event.computed_tokens
            tab.of.prompt_tokens += event.computed_tokens
            self._end(event.request_id, tab)

    def _draft(
        self, request_ids: tuple[str, ...], drafting: tuple[float, ...], seconds: float, parts: list[float]
    ) -> None:
        """Add the time of draft models to the rows that drafted; ``seconds`` of it belong to the step."""
        self.draft_seconds += seconds
        scale = seconds / sum(drafting)
        for row, (request_id, spent) in enumerate(zip(request_ids, drafting, strict=True)):
            parts[row] += scale * spent
            tab = self._live.get(request_id) or self._ended.get(request_id)
            if tab is not None:
                tab.draft_seconds += scale * spent

    def _rest_until(self, now: float) -> None:
        """Attributes time without open requests: overhead until the last request ended, then idle."""
        self._pass("overhead", self._idle_from)
        self._pass("idle", now)

    def _pass(self, kind: str, until: float) -> None:
        """Moves the mark; time across midnight is split between both days."""
        while self._mark < until:
            day = self._day(self._mark)
            end = min(until, (day + 1) * DAY_SECONDS - self._clock_offset)
            if end <= self._mark:  # midnight itself, which floats may miss
                end = until
            unused = self._unused(day)
            setattr(unused, kind, getattr(unused, kind) + end - self._mark)
            self._mark = end

    # -- accounts ----------------------------------------------------------------------------------

    def _day(self, now: float) -> int:
        return int((now + self._clock_offset) // DAY_SECONDS)

    def _unused(self, day: int) -> Unused:
        unused = self.unused.get(day)
        if unused is None:
            unused = self.unused[day] = Unused()
            for old in [each for each in self.unused if each <= day - MOST_DAYS]:
                gone = self.unused.pop(old)
                self._older_unused.idle += gone.idle
                self._older_unused.overhead += gone.overhead
        return unused

    def _account(self, tab: Tab, day: int) -> Account:
        """The account for a request's usage on this day."""
        tenant = tab.tenant
        if tenant not in self._tenants:
            if len(self._tenants) < MOST_TENANTS:
                self._tenants.add(tenant)
            else:
                tenant = OTHER
        key = Key(day, tenant, tab.service_class)
        account = self.accounts.get(key)
        if account is None:
            account = self.accounts[key] = Account()
            for old in [each for each in self.accounts if each.day <= day - MOST_DAYS]:
                self.older.setdefault(old.tenant, Account()).add(self.accounts.pop(old))
        tab.day, tab.of = day, account
        return account

    # -- answers -----------------------------------------------------------------------------------

    def cost(self, request_id: str) -> Cost:
        """The cost of a request so far; 0 if it did not reach the engine.

        A row that was in flight when its request ended is added when its step ends.
        """
        tab = self._live.get(request_id) or self._ended.get(request_id) or self._pooled.get(request_id)
        return NOTHING if tab is None else tab.cost(self.pricing)

    def draft_seconds_of(self, request_id: str) -> float:
        """Seconds of a request's device time that draft models used."""
        tab = self._live.get(request_id) or self._ended.get(request_id)
        return 0.0 if tab is None else tab.draft_seconds

    @property
    def open_requests(self) -> int:
        """Requests that have arrived and not ended."""
        return len(self._live)

    def balance(self, now: float | None = None) -> Balance:
        """Both sides of the conservation law; with ``now``, idle time since the last event is included."""
        attributed = sum(each.seconds for each in (*self.accounts.values(), *self.older.values()))
        days, mark = [*self.unused.values(), self._older_unused], self._mark
        idle, overhead = sum(day.idle for day in days), sum(day.overhead for day in days)
        if now is not None and not self._live and now > max(mark, self._idle_from):
            rested = max(mark, self._idle_from)
            idle, overhead, mark = idle + now - rested, overhead + rested - mark, now
        return Balance(mark - self.began, attributed, idle, overhead)

    def token_prices(self) -> TokenPrices:
        """The configured token prices, or those measured here from the price of the device."""
        if self.pricing.by_token:
            return self.pricing.tokens
        million = 1e6 * self.pricing.device_second
        return TokenPrices(
            prompt=million * self.prefill_seconds / max(1, self._prefill_tokens),
            output=million * self.decode_seconds / max(1, self._output_tokens),
        )


# Metrics of the cost ledger: device time by use and by kind of step, cost of each tenant, and the check of the sum.


class CostMeter:
    """Writes to ``page`` before it is rendered.

    ``clock`` is the engine's. Tenants beyond the first ``tenants`` are counted as ``other``.
    """

    def __init__(
        self, page: MetricsPage, ledger: CostLedger, clock: Callable[[], float], tenants: int = 100
    ) -> None:
        self._ledger = ledger
        self._clock = clock
        self._device = page.counter(
            "device_seconds",
            "Wall clock by use: attributed to requests, idle (no request is open), or overhead (requests are open, "
            "but no step computes).",
            ["use"],
        )
        self._kinds = page.counter(
            "step_kind_seconds",
            "Time of steps that contained only prefill rows, only decode rows, or both (mixed).",
            ["kind"],
        )
        self._tenants = page.counter(
            "tenant_cost", "Cost of a tenant's requests, in --currency.", ["tenant"], limit=tenants
        )
        self._seconds = page.counter(
            "tenant_device_seconds", "Device time of a tenant's requests.", ["tenant"], limit=tenants
        )
        self._error = page.gauge(
            "cost_conservation_error",
            "Relative difference between the wall clock and the sum of attributed, idle and overhead time; above 0.001 "
            "it is a bug.",
        ).of()
        page.before_render(self.measure)

    def measure(self) -> None:
        """Bring all metrics up to date."""
        balance = self._ledger.balance(self._clock())
        for use in ("attributed", "idle", "overhead"):
            cell = self._device.of(use)
            cell.value = max(
                cell.value, getattr(balance, use)
            )  # what is idle now may turn out to be overhead
        for kind, seconds in self._ledger.kinds.items():
            self._kinds.of(kind).value = seconds
        self._error.value = balance.error
        totals: dict[str, Account] = {}
        recent = ((key.tenant, account) for key, account in self._ledger.accounts.items())
        for tenant, account in (*self._ledger.older.items(), *recent):
            totals.setdefault(tenant, Account()).add(account)
        costs: dict[int, float] = {}
        for tenant, account in totals.items():
            cost = account.cost(self._ledger.pricing)
            for family, value in ((self._tenants, cost.total), (self._seconds, cost.device_seconds)):
                cell = family.of(tenant)
                costs[id(cell)] = costs.get(id(cell), 0.0) + value
                cell.value = costs[id(cell)]
