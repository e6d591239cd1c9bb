"""A capacity plan as tables and lines: devices side by side, the cheapest fleet, and why others were rejected."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.table import Table

from headrace.lab.plan.capacity import Slo
from headrace.lab.plan.demand import Demand
from headrace.lab.plan.search import Fleet, Trial, Verdict
from headrace.lab.plan.shapes import ModelShape
from headrace.lab.plan.sheet import BATCHES, Decode, Sheet
from headrace.lab.plan.supply import ON_DEMAND, Supply

STEADY_SHARE = 0.9
"""A simulation below this share of the demanded tokens/s was too short: it begins and ends with an empty fleet."""


def shape_line(shape: ModelShape, sheets: Sequence[Sheet]) -> str:
    """The model in a line."""
    return (
        f"{shape.name}: {shape.num_parameters / 1e9:.3g} B parameters, {sheets[0].kv_bytes_per_token / 1024:.1f} KiB"
        f" of KV cache per token; prompts and contexts of {sheets[0].context:,} tokens"
    )


def sheet_table(sheets: Sequence[Sheet]) -> Table:
    """Devices side by side."""
    table = Table(header_style="bold")
    table.add_column("")
    for each in sheets:
        table.add_column(f"{each.degree} x {each.device}", justify="right")
    rows = {
        "weights GB": [f"{each.weight_bytes / 1e9:.2f}" for each in sheets],
        "workspace GB": [f"{each.workspace_bytes / 1e9:.2f}" for each in sheets],
        "KV cache tokens": [f"{each.kv_tokens:,}" if each.kv_tokens else "none" for each in sheets],
        "sequences in memory": [f"{each.sequences:,}" for each in sheets],
        "prefill s (MFU)": [
            f"{each.prefill_seconds:.3f} ({100 * each.prefill_mfu:.0f} %)" if each.fits else "-"
            for each in sheets
        ],
    }
    for batch in BATCHES:
        rows[f"decode {batch}: ms / tok/s"] = [_decode(each, batch) for each in sheets]
    rows |= {
        "MFU of the largest batch": [
            f"{100 * each.decode[-1].mfu:.0f} %" if each.decode else "-" for each in sheets
        ],
        "$ per hour": [f"{each.dollars_per_hour:.2f}" for each in sheets],
        "$ per M prompt tokens": [
            f"{each.prefill_dollars_per_million:.3f}" if each.fits else "-" for each in sheets
        ],
        "$ per M output tokens": [
            f"{min(d.dollars_per_million for d in each.decode):.3f}" if each.decode else "-"
            for each in sheets
        ],
    }
    for label, cells in rows.items():
        table.add_row(label, *cells)
    return table


def _decode(sheet: Sheet, batch: int) -> str:
    found: Decode | None = next((each for each in sheet.decode if each.batch == batch), None)
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


def verdict_lines(verdict: Verdict, demand: Demand, supply: Supply = ON_DEMAND) -> list[str]:
    """The cheapest fleet with its reserve, or the reasons why there is none, as lines."""
    if verdict.best is None or verdict.trial is None:
        return ["no fleet meets the latency targets:", *(f"  {reason}" for reason in verdict.refused)]
    fleet, trial = verdict.best, verdict.trial
    tokens_per_hour = 3600 * demand.requests_per_second * demand.output_tokens
    total = supply.replicas(fleet.replicas)
    dollars = total * fleet.replica.dollars_per_hour * supply.price
    flags = f"--max-num-seqs {fleet.settings.max_num_seqs}"
    flags += f" --max-num-batched-tokens {fleet.settings.max_num_batched_tokens}"
    return [
        f"cheapest  {fleet_text(fleet)}: {fleet.dollars_per_hour:.2f} $ per hour,"
        f" {1e6 * fleet.dollars_per_hour / tokens_per_hour:.3f} $ per million output tokens at this load",
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
            _milliseconds(trial.tpot_p95),
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
        f" TPOT p95 {_milliseconds(trial.tpot_p95)} ms, {trial.output_tokens_per_second:,.0f} tokens/s"
    )


def _error(trial: Trial) -> str:
    """The sampling error of the share within SLO, in percentage points."""
    return "unknown" if math.isinf(trial.error) else f"± {100 * trial.error:.1f}"


def _milliseconds(seconds: float) -> str:
    """Milliseconds, or a dash if no output had a second token."""
    return "-" if math.isnan(seconds) else f"{1e3 * seconds:.1f}"
