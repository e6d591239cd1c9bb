"""A capacity plan as tables and lines: devices side by side, the cheapest fleet, and why others were rejected."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rich.table import Table

from headrace.lab.bench.report import milliseconds
from headrace.lab.forced_acceptance import Speculation
from headrace.lab.plan.capacity import Demand, Settings, Slo, best_drafts, drafted
from headrace.lab.plan.roofline import MEMORY_SHARE, ModelShape, Replica, chunk
from headrace.lab.plan.search import ON_DEMAND, Fleet, Supply, Trial, Verdict

STEADY_SHARE = 0.9
"""A simulation below this share of the demanded tokens/s was too short: it begins and ends with an empty fleet."""


def shape_line(shape: ModelShape, sheets: Sequence[Sheet]) -> str:
    """The model in a line."""
    idle = round(shape.idle_parameters(1))
    states = f", {shape.state_bytes / 2**20:.1f} MiB of states per sequence" if shape.state_bytes else ""
    active = f" ({(shape.num_parameters - idle) / 1e9:.3g} B per token)" if idle else ""
    return (
        f"{shape.name}: {shape.num_parameters / 1e9:.3g} B parameters{active},"
        f" {sheets[0].kv_bytes_per_token / 1024:.1f} KiB of KV cache per token{states};"
        f" prompts and contexts of {sheets[0].context:,} tokens"
    )


def sheet_table(sheets: Sequence[Sheet], utilization: float = 1.0) -> Table:
    """Devices side by side, with prices at this utilization."""
    used = "" if utilization == 1.0 else f" at {100 * utilization:g} % utilization"
    table = Table(header_style="bold")
    table.add_column("")
    for each in sheets:
        table.add_column(f"{each.degree} x {each.device}", justify="right")
    rows = {
        "weights GB": [f"{each.weight_bytes / 1e9:.2f}" for each in sheets],
        "workspace GB": [f"{each.workspace_bytes / 1e9:.2f}" for each in sheets],
        "KV cache tokens": [f"{each.kv_tokens:,}" if each.kv_tokens else "none" for each in sheets],
        "sequences in memory": [f"{each.sequences:,}" for each in sheets],
        **(
            {"with window groups": [f"{each.windowed:,}" if each.windowed else "-" for each in sheets]}
            if any(each.windowed for each in sheets)
            else {}
        ),
        **(
            {"checkpoints of states": [f"{each.state_cells:,}" for each in sheets]}
            if any(each.state_bytes for each in sheets)
            else {}
        ),
        "prefill s (MFU)": [
            f"{each.prefill_seconds:.3f} ({100 * each.prefill_mfu:.0f} %)" if each.fits else "-"
            for each in sheets
        ],
    }
    for batch in BATCHES:
        rows[f"decode {batch}: ms / tok/s"] = [_decode(each.decode, batch) for each in sheets]
    if any(each.expert_parallel for each in sheets):
        for batch in BATCHES:
            cells = [_decode(each.expert_parallel, batch) for each in sheets]
            rows[f"decode {batch}, expert parallel"] = cells
    rows |= {
        "MFU of the largest batch": [
            f"{100 * each.decode[-1].mfu:.0f} %" if each.decode else "-" for each in sheets
        ],
        "$ per hour": [f"{each.dollars_per_hour:.2f}" for each in sheets],
        f"$ per M prompt tokens{used}": [
            f"{each.prefill_dollars_per_million:.3f}" if each.fits else "-" for each in sheets
        ],
        f"$ per M output tokens{used}": [
            f"{min(d.dollars_per_million for d in each.decode):.3f}" if each.decode else "-"
            for each in sheets
        ],
    }
    for label, cells in rows.items():
        table.add_row(label, *cells)
    return table


def _decode(steps: Sequence[Decode], batch: int) -> str:
    found: Decode | None = next((each for each in steps if each.batch == batch), None)
    if found is None:
        return "-"
    drafts = f" ({found.drafts} drafts)" if found.drafts else ""
    return f"{1e3 * found.step_seconds:.2f} / {found.tokens_per_second:,.0f}{drafts}"


def demand_lines(demand: Demand, slo: Slo) -> list[str]:
    """Workload and latency targets as lines."""
    fresh = 100 * demand.fresh_tokens / demand.prompt_tokens
    return [
        f"demand    {demand.requests_per_second:.3g} requests/s of {demand.prompt_tokens:,.0f} prompt tokens"
        f" ({fresh:.0f} % of them not cached) and {demand.output_tokens:,.0f} output tokens",
        f"targets   TTFT {1e3 * slo.ttft:g} ms and TPOT {1e3 * slo.tpot:g} ms"
        f" for {100 * slo.share:g} % of the requests",
    ]


def verdict_lines(
    verdict: Verdict, demand: Demand, supply: Supply = ON_DEMAND, utilization: float = 1.0
) -> list[str]:
    """The cheapest fleet with its reserve, or the reasons why there is none, as lines.

    ``utilization`` is the mean load as a share of the demand; prices per token are those at it.
    """
    if verdict.best is None or verdict.trial is None:
        return ["no fleet meets the latency targets:", *(f"  {reason}" for reason in verdict.refused)]
    fleet, trial = verdict.best, verdict.trial
    tokens_per_hour = 3600 * demand.requests_per_second * demand.output_tokens * utilization
    load = "this load" if utilization == 1.0 else f"{100 * utilization:g} % of this load"
    total = supply.replicas(fleet.replicas)
    dollars = total * fleet.replica.dollars_per_hour * supply.price
    flags = f"--max-num-seqs {fleet.settings.max_num_seqs}"
    flags += f" --max-num-batched-tokens {fleet.settings.max_num_batched_tokens}"
    return [
        f"cheapest  {fleet_text(fleet)}: {fleet.dollars_per_hour:.2f} $ per hour,"
        f" {1e6 * fleet.dollars_per_hour / tokens_per_hour:.3f} $ per million output tokens at {load}",
        f"settings  {flags}",
        f"expected  {trial_text(trial)}",
        *_shortness(trial, demand),
        *(
            []
            if supply == ON_DEMAND
            else [
                f"to run    {total:,} replicas ({100 * supply.spot_share:g} % on spot machines), of which"
                f" {supply.away(total):.1f} are away on average: {dollars:,.2f} $ per hour,"
                f" {1e6 * dollars / tokens_per_hour:.3f} $ per million output tokens"
            ]
        ),
    ]


def _shortness(trial: Trial, demand: Demand) -> list[str]:
    """A warning if there were too few requests for a steady state: without queues the result is too optimistic."""
    wanted = demand.requests_per_second * demand.output_tokens
    if trial.output_tokens_per_second >= STEADY_SHARE * wanted:
        return []
    return [
        f"warning   {trial.output_tokens_per_second:,.0f} of {wanted:,.0f} tokens/s: the simulated requests end before"
        " queues can form; use more --requests"
    ]


def trials_table(verdict: Verdict) -> Table:
    """All simulated fleets."""
    table = Table(header_style="bold")
    for name in (
        "fleet",
        "step tokens",
        "$ per hour",
        "within SLO",
        "error",
        "TTFT p95 s",
        "TPOT p95 ms",
        "preemptions",
    ):
        table.add_column(name, justify="left" if name == "fleet" else "right")
    for fleet, trial in verdict.tried:
        table.add_row(
            fleet_text(fleet),
            str(fleet.settings.max_num_batched_tokens),
            f"{fleet.dollars_per_hour:.2f}",
            f"{100 * trial.attained:.1f} %",
            _error(trial),
            f"{trial.ttft_p95:.3f}",
            milliseconds(trial.tpot_p95),
            str(trial.preemptions),
        )
    return table


def fleet_text(fleet: Fleet) -> str:
    """A fleet as text."""
    replica = fleet.replica
    each = "" if replica.degree == 1 else f" of {replica.degree} devices"
    pools = f", {fleet.prefill:,} for prefill" if fleet.prefill else ""
    return f"{fleet.replicas:,} x {replica.device.name}{each}{pools}"


def trial_text(trial: Trial) -> str:
    """The figures of a simulation as text."""
    return (
        f"{100 * trial.attained:.1f} % ({_error(trial)}) of the requests within SLO, TTFT p95 {trial.ttft_p95:.3f} s,"
        f" TPOT p95 {milliseconds(trial.tpot_p95)} ms, {trial.output_tokens_per_second:,.0f} tokens/s"
    )


def _error(trial: Trial) -> str:
    """The sampling error of the share within SLO, in percentage points."""
    return "unknown" if math.isinf(trial.error) else f"± {100 * trial.error:.1f}"


BATCHES = (1, 8, 32, 64, 128, 256)
"""Batch sizes that a sheet shows."""


@dataclass(frozen=True, slots=True)
class Decode:
    """A decode step of ``batch`` sequences, with ``drafts`` drafted tokens each.

    ``mfu`` is relative to the devices' bf16 peak.
    """

    batch: int
    step_seconds: float
    tokens_per_second: float
    mfu: float
    dollars_per_million: float
    drafts: int = 0


@dataclass(frozen=True, slots=True)
class Sheet:
    """Figures of one replica. Bytes are summed over its devices; prices are those at the utilization of the sheet.

    ``sequences`` of ``context`` tokens fit in memory, ``windowed`` if window layers give blocks back (0: none does).
    ``decode`` has only batches that fit; ``expert_parallel`` has the same batches with whole experts on each device, if
    the devices can divide them. ``state_bytes`` are the recurrent states of a sequence, of which ``state_cells``
    checkpoints fit.
    """

    device: str
    degree: int
    context: int
    weight_bytes: int
    workspace_bytes: int
    kv_bytes_per_token: int
    kv_tokens: int
    sequences: int
    prefill_seconds: float
    prefill_mfu: float
    prefill_dollars_per_million: float
    decode: tuple[Decode, ...]
    dollars_per_hour: float
    state_bytes: int = 0
    state_cells: int = 0
    expert_parallel: tuple[Decode, ...] = ()
    windowed: int = 0

    @property
    def fits(self) -> bool:
        """Whether at least one sequence of the context fits."""
        return self.sequences > 0


def sheet(
    replica: Replica,
    settings: Settings,
    context: int,
    batches: Sequence[int] = BATCHES,
    speculation: Speculation | None = None,
    utilization: float = 1.0,
) -> Sheet:
    """The sheet of a replica for prompts and contexts of ``context`` tokens.

    It is paid for all the time and computes for a share ``utilization`` of it.
    """
    budget = replica.kv_budget(settings.max_num_batched_tokens, settings.max_num_seqs, MEMORY_SHARE)
    blocks, state_cells = replica.room(budget, settings.block_size)
    sequences = replica.sequences_that_fit(context, blocks, settings.block_size)
    per_second = replica.dollars_per_hour / 3600 / utilization
    prefill = replica.prefill_seconds(context, settings.max_num_batched_tokens)
    prefill_flops = replica.flops(chunk(0, context, last=True))

    def decode(of: Replica) -> tuple[Decode, ...]:
        return tuple(
            _decode_seconds(of, batch, context, per_second, speculation)
            for batch in batches
            if batch <= sequences
        )

    sparse, degree = replica.shape.sparse, replica.degree
    divided = sparse is not None and degree > 1 and sparse.experts % degree == 0
    return Sheet(
        device=replica.device.name,
        degree=replica.degree,
        context=context,
        weight_bytes=replica.weight_bytes,
        workspace_bytes=replica.workspace_bytes(settings.max_num_batched_tokens, settings.max_num_seqs),
        kv_bytes_per_token=replica.kv_bytes_per_token,
        kv_tokens=blocks * settings.block_size,
        sequences=sequences,
        prefill_seconds=prefill,
        prefill_mfu=prefill_flops / (prefill * replica.degree * replica.device.bf16_flops),
        prefill_dollars_per_million=1e6 * per_second * prefill / context,
        decode=decode(replica),
        dollars_per_hour=replica.dollars_per_hour,
        state_bytes=replica.shape.state_bytes,
        state_cells=state_cells,
        expert_parallel=decode(replace(replica, expert_parallel=True)) if divided else (),
        windowed=replica.windowed_sequences(
            context, budget, settings.block_size, settings.max_num_batched_tokens
        ),
    )


def _decode_seconds(
    replica: Replica, batch: int, context: int, dollars_per_second: float, speculation: Speculation | None
) -> Decode:
    found = best_drafts(
        replica, lambda drafts, _: drafted(batch, context, drafts), batch, context, speculation
    )
    load, seconds, tokens = drafted(batch, context, found.drafts), found.seconds, batch * found.tokens
    dollars = 1e6 * dollars_per_second * seconds / tokens
    return Decode(batch, seconds, tokens / seconds, replica.mfu(load), dollars, found.drafts)


# What tokens cost: continuous against static batching on one replica, and a fleet against the price of an
# API.
#
# A fleet costs the same whether it is used or not, an API charges for tokens. ``utilization`` is the mean
# load as a share of the load that the fleet is planned for, so every price per token is the price at full
# load divided by it:
#
#  fleet       dollars per hour / (utilization x tokens per hour at the planned load)
#  API         utilization x tokens per hour at the planned load x price
#  break-even  the utilization at which both cost the same

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
