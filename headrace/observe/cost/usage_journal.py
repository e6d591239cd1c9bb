"""Usage and savings since the last read, so that a file can accumulate them over restarts.

`CostLedger` and `TenantSavings` count since the server started. The journal returns only the increase since its last
call. Savings belong to the day on which they are returned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from headrace.observe.cost.account import Account, Billed, Key, Saving, UnusedDay
from headrace.observe.cost.ledger import DAY_SECONDS
from headrace.observe.cost.report import CostReport
from headrace.observe.cost.tenant_savings import TenantSavings


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
