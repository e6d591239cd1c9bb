"""What tokens cost: continuous against static batching on one replica, and a fleet against the price of an API.

A fleet costs the same whether it is used or not, an API charges for tokens. ``utilization`` is the mean load as a share
of the load that the fleet is planned for, so every price per token is the price at full load divided by it:

```
 fleet       dollars per hour / (utilization x tokens per hour at the planned load)
 API         utilization x tokens per hour at the planned load x price
 break-even  the utilization at which both cost the same
```
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.table import Table

from headrace.lab.plan.capacity import Demand

HOUR = 3600.0
MILLION = 1e6

GENERATIONS = 4
"""Requests per slot of a run at full load, so that its start and end weigh little."""


def slots_at_full_load(max_num_seqs: int, requests: int) -> int:
    """The slots of a replica in a run of so many requests: fewer than it has if these would not fill them for long."""
    return max(1, min(max_num_seqs, requests // GENERATIONS))


class Batching(NamedTuple):
    """One replica whose requests all wait from the start, under a policy of batching, without latency targets."""

    policy: str
    output_tokens_per_second: float
    requests_per_second: float

    def dollars_per_million(self, dollars_per_hour: float, utilization: float) -> float:
        """Dollars per million output tokens of a replica at this price and utilization."""
        return MILLION * dollars_per_hour / (HOUR * self.output_tokens_per_second * utilization)


class ApiPrice(NamedTuple):
    """The price of an API in dollars per million tokens; it charges for cached prompt tokens like for others."""

    input: float
    output: float

    def dollars_per_hour(self, demand: Demand) -> float:
        """What the API charges for an hour of this load."""
        request = demand.prompt_tokens * self.input + demand.output_tokens * self.output
        return HOUR * demand.requests_per_second * request / MILLION


@dataclass(frozen=True, slots=True)
class Prices:
    """The prices of a planned fleet.

    ``slots`` are those of the replica whose batching is compared, ``most`` those that its settings have.
    ``replica_dollars`` is the hourly price of one replica, ``fleet_dollars`` that of the fleet with its reserve.
    """

    demand: Demand
    utilization: float
    replica: str
    slots: int
    most: int
    replica_dollars: float
    fleet_dollars: float
    batching: Sequence[Batching]
    api: ApiPrice | None = None

    @property
    def break_even(self) -> float | None:
        """The utilization from which on the fleet is cheaper than the API; None without one."""
        return None if self.api is None else self.fleet_dollars / self.api.dollars_per_hour(self.demand)

    def document(self) -> dict[str, object]:
        """As plain values."""
        tokens = HOUR * self.demand.requests_per_second * self.demand.output_tokens
        return {
            "utilization": self.utilization,
            "replica": self.replica,
            "slots": self.slots,
            "dollars_per_hour": self.fleet_dollars,
            "dollars_per_million_output_tokens": MILLION * self.fleet_dollars / (tokens * self.utilization),
            "batching": [
                each._asdict()
                | {
                    "dollars_per_million_output_tokens": each.dollars_per_million(
                        self.replica_dollars, self.utilization
                    )
                }
                for each in self.batching
            ],
            "api": self.api
            and self.api._asdict()
            | {
                "dollars_per_hour": self.utilization * self.api.dollars_per_hour(self.demand),
                "break_even_utilization": self.break_even,
                "break_even_requests_per_second": (self.break_even or 0.0) * self.demand.requests_per_second,
            },
        }

    def table(self) -> Table:
        """The kinds of batching side by side."""
        share = f"{100 * self.utilization:g} %"
        table = Table(
            title=f"{self.replica} at full load: {self.slots} slots, all requests waiting, no latency targets",
            title_justify="left",
            header_style="bold",
        )
        columns = ["batching", "output tokens/s", "requests/s", "$ per M output tokens, full load"]
        columns += [] if self.utilization == 1.0 else [f"at {share} utilization"]
        for number, name in enumerate([*columns, f"/ {self.batching[0].policy}"]):
            table.add_column(name, justify="right" if number else "left")
        first = self.batching[0].output_tokens_per_second
        for each in self.batching:
            shares = dict.fromkeys((1.0, self.utilization))  # once if they are equal
            table.add_row(
                each.policy,
                f"{each.output_tokens_per_second:,.0f}",
                f"{each.requests_per_second:,.2f}",
                *(
                    f"{each.dollars_per_million(self.replica_dollars, each_share):.3f}"
                    for each_share in shares
                ),
                f"{first / each.output_tokens_per_second:.2f}x the price",
            )
        return table

    def lines(self) -> list[str]:
        """A warning if the run was short, and the comparison with the API."""
        lines = []
        if self.slots < self.most:
            lines.append(
                f"warning   {self.slots} of {self.most} slots were used, so that the requests fill them {GENERATIONS} "
                "times; use more --requests"
            )
        if self.api is None:
            return lines
        share, full = self.utilization, self.api.dollars_per_hour(self.demand)
        even, rate = self.fleet_dollars / full, self.demand.requests_per_second
        lines.append(
            f"API       {self.api.input:g} $ per million input and {self.api.output:g} $ per million output tokens: "
            f"{share * full:,.2f} $ per hour at {100 * share:g} % utilization; the fleet: {self.fleet_dollars:,.2f} $"
        )
        if even > 1.0:
            lines.append(
                f"break-even  none: even at full utilization the API is cheaper, by a factor of {even:.2f}"
            )
        else:
            lines.append(
                f"break-even  at {100 * even:.1f} % utilization, {even * rate:.3g} requests/s: above it the fleet is "
                "cheaper, below it the API"
            )
        return lines
