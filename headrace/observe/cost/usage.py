"""Usage and savings since the last read, so that a file can accumulate them over restarts.

`CostLedger` and `TenantSavings` count since the server started. The journal returns only the increase since its last
call. Savings belong to the day on which they are returned.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from headrace.core.events import AdmitReason, Admitted, Arrived, Event, Finished, Layer, Spared
from headrace.files import Layout, open_database
from headrace.observe.cost.ledger import DAY_SECONDS, Account, Billed, Key, Saving, UnusedDay
from headrace.observe.cost.prices import Pricing, TokenPrices, free
from headrace.observe.cost.report import CostReport, focus_csv, saved_fields, tenant_costs
from headrace.observe.metrics_page import OTHER

# Savings of the caches by tenant and layer: the tenant's part of ``GET /v1/cache/stats``.
#
# `observe.cache_metrics` counts the same events for the whole server. Misses are not counted here, because
# the event of a lookup does not name the tenant.

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


class Used(NamedTuple):
    """Additions to the accounts, to the unused time of days, and to the savings of ``day``."""

    day: int
    rows: list[Billed]
    unused: list[UnusedDay]
    savings: list[Saving]

    @property
    def empty(self) -> bool:
        """Whether there is nothing to add."""
        return not (self.rows or self.unused or self.savings)


class _Tokens(NamedTuple):
    prompt_tokens: int
    output_tokens: int


class UsageJournal:
    """``clock`` returns Unix time."""

    def __init__(self, report: CostReport, savings: TenantSavings, clock: Callable[[], float]) -> None:
        self._report = report
        self._savings = savings
        self._clock = clock
        self._accounts: dict[Key, tuple[float, int, int, int, int]] = {}
        self._unused: dict[int, tuple[float, float]] = {}
        self._saved: dict[tuple[str, str], tuple[int, int, int]] = {}

    def take(self) -> Used:
        """The increase since the last call."""
        return Used(int(self._clock() // DAY_SECONDS), self._rows(), self._days(), self._layers())

    def _rows(self) -> list[Billed]:
        found = []
        earlier, self._accounts = self._accounts, {}  # accounts that the ledger has merged are forgotten
        for each in self._report.rows():
            account = each.account
            new = (
                *(account.seconds, account.requests),
                *(account.prompt_tokens, account.cached_tokens, account.output_tokens),
            )
            self._accounts[each.key] = new
            old = earlier.get(each.key, (0.0, 0, 0, 0, 0))
            if new == old:
                continue
            added = Account()
            added.seconds, added.requests = new[0] - old[0], new[1] - old[1]
            added.prompt_tokens, added.cached_tokens = new[2] - old[2], new[3] - old[3]
            added.output_tokens = new[4] - old[4]
            found.append(each._replace(account=added))
        return found

    def _days(self) -> list[UnusedDay]:
        found = []
        earlier, self._unused = self._unused, {}
        for each in self._report.unused_days():
            self._unused[each.day] = (each.idle, each.overhead)
            idle, overhead = earlier.get(each.day, (0.0, 0.0))
            if (each.idle, each.overhead) != (idle, overhead):
                found.append(each._replace(idle=each.idle - idle, overhead=each.overhead - overhead))
        return found

    def _layers(self) -> list[Saving]:
        found = []
        for (tenant, layer), new in self._savings.totals().items():
            old = self._saved.get((tenant, layer), (0, 0, 0))
            if new != old:
                self._saved[tenant, layer] = new
                hits, prompt, output = (a - b for a, b in zip(new, old, strict=True))
                cost = self._savings.cost(layer, _Tokens(prompt, output))
                found.append(Saving(tenant, layer.value, hits, prompt, output, cost))
        return found


# Usage of all tenants by day, class and model in an SQLite file, which outlives the server.

KEPT_DAYS = 400
"""Number of days to keep: about 13 months."""

_TABLES = """
CREATE TABLE accounts (
    day INTEGER, tenant TEXT, service_class TEXT, model TEXT,
    device_price REAL, prompt_price REAL, cached_price REAL, output_price REAL, currency TEXT,
    seconds REAL, requests INTEGER, prompt_tokens INTEGER, cached_tokens INTEGER, output_tokens INTEGER,
    PRIMARY KEY (tenant, day, service_class, model, device_price, prompt_price, cached_price, output_price, currency)
) WITHOUT ROWID;
CREATE TABLE unused (
    day INTEGER, model TEXT,
    device_price REAL, prompt_price REAL, cached_price REAL, output_price REAL, currency TEXT,
    idle REAL, overhead REAL,
    PRIMARY KEY (day, model, device_price, prompt_price, cached_price, output_price, currency)
) WITHOUT ROWID;
CREATE TABLE saved (
    day INTEGER, tenant TEXT, layer TEXT, hits INTEGER, prompt_tokens INTEGER, output_tokens INTEGER, cost REAL,
    PRIMARY KEY (tenant, layer, day)
) WITHOUT ROWID;
"""
LAYOUT = Layout("a usage file", "accounts", (_TABLES,))
_ADD_ACCOUNT = """
INSERT INTO accounts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET seconds = seconds + excluded.seconds, requests = requests + excluded.requests,
    prompt_tokens = prompt_tokens + excluded.prompt_tokens, cached_tokens = cached_tokens + excluded.cached_tokens,
    output_tokens = output_tokens + excluded.output_tokens
"""
_ADD_UNUSED = """
INSERT INTO unused VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET idle = idle + excluded.idle, overhead = overhead + excluded.overhead
"""
_ADD_SAVED = """
INSERT INTO saved VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET hits = hits + excluded.hits, prompt_tokens = prompt_tokens + excluded.prompt_tokens,
    output_tokens = output_tokens + excluded.output_tokens, cost = cost + excluded.cost
"""
_ACCOUNTS = "SELECT * FROM accounts ORDER BY day, tenant, service_class, model"
_ACCOUNTS_OF = "SELECT * FROM accounts WHERE tenant = ? ORDER BY day, service_class, model"
_FORGET = tuple(f"DELETE FROM {table} WHERE day <= ?" for table in ("accounts", "unused", "saved"))  # noqa: S608


class UsageStore:
    """The file ``path``; ``currency`` is that of sums.

    Raises:
        OSError: the file cannot be used as a usage file.
    """

    def __init__(self, path: Path, currency: str) -> None:
        self._currency = currency
        self._database = open_database(path, LAYOUT, synchronous="FULL")

    def add(self, used: Used) -> None:
        """Add to the accounts, in one transaction."""
        database = self._database
        database.execute("BEGIN IMMEDIATE")
        with database:
            for key, model, pricing, account in used.rows:
                use = (account.seconds, account.requests)
                tokens = (account.prompt_tokens, account.cached_tokens, account.output_tokens)
                database.execute(_ADD_ACCOUNT, (*key, model, *_flat(pricing), *use, *tokens))
            for each in used.unused:
                times = (each.idle, each.overhead)
                database.execute(_ADD_UNUSED, (each.day, each.model, *_flat(each.pricing), *times))
            for saving in used.savings:
                database.execute(_ADD_SAVED, (used.day, *saving))
            for forget in _FORGET:
                database.execute(forget, (used.day - KEPT_DAYS,))

    def rows(self, tenant: str | None = None) -> Iterator[Billed]:
        """The accounts of a tenant (None: of all tenants) in order of day, tenant and class."""
        query, given = (_ACCOUNTS, ()) if tenant is None else (_ACCOUNTS_OF, (tenant,))
        for day, name, service_class, model, *rest in self._database.execute(query, given):
            account = Account()
            account.seconds, account.requests = rest[5:7]
            account.prompt_tokens, account.cached_tokens, account.output_tokens = rest[7:]
            yield Billed(Key(day, name, service_class), model, _priced(rest[:5]), account)

    def unused_days(self) -> Iterator[UnusedDay]:
        """The unused time of each day."""
        for day, model, *rest in self._database.execute("SELECT * FROM unused ORDER BY day, model"):
            yield UnusedDay(day, model, _priced(rest[:5]), *rest[5:])

    def tenants(self) -> list[str]:
        """All tenants with usage or savings."""
        query = "SELECT tenant FROM accounts UNION SELECT tenant FROM saved ORDER BY tenant"
        return [name for (name,) in self._database.execute(query)]

    def tenant(self, tenant: str) -> dict[str, Any]:
        """The cost of one tenant by day, class and model, and what each cache layer saved."""
        query = (
            "SELECT tenant, layer, sum(hits), sum(prompt_tokens), sum(output_tokens), sum(cost) FROM saved"
            " WHERE tenant = ? GROUP BY layer ORDER BY layer"
        )
        savings = [Saving(*each) for each in self._database.execute(query, (tenant,))]
        return {**tenant_costs(self.rows(tenant), self._currency), **saved_fields(savings)}

    def focus(self, tenant: str | None) -> str:
        """The accounts as CSV in the columns of FOCUS."""
        return focus_csv(self, tenant)

    def close(self) -> None:
        """Close the file."""
        self._database.close()


def _flat(pricing: Pricing) -> tuple[float | str, ...]:
    return (pricing.device_second, *pricing.tokens, pricing.currency)


def _priced(values: list[Any]) -> Pricing:
    return Pricing(values[0], TokenPrices(*values[1:4]), values[4])
