"""Usage of all tenants by day, class and model in an SQLite file, which outlives the server.

Updates only add to rows, so several servers can share a file. A killed process loses what it had not written yet. Each
row stores its prices, so a price change does not affect earlier costs. Days before the last `KEPT_DAYS` are deleted.
All methods block and must be called by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.files import Layout, open_database
from headrace.observe.cost.account import Account, Billed, Key, Saving, UnusedDay
from headrace.observe.cost.focus import focus_csv
from headrace.observe.cost.prices import Pricing, TokenPrices
from headrace.observe.cost.report import saved_fields, tenant_costs
from headrace.observe.cost.usage_journal import Used

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
