"""``headrace plan``: what a device can do for a model, and the cheapest fleet that meets latency targets."""

from __future__ import annotations

import dataclasses
import json
import math
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

import headrace.cli.flags as flags
from headrace.cli.flags import read_speculation, with_speculation
from headrace.cli.options import duration, one_of
from headrace.cli.output import progress, show
from headrace.config import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from headrace.cli.output import Meter
    from headrace.lab.forced_acceptance import Speculation
    from headrace.lab.plan.capacity import Settings, Slo
    from headrace.lab.plan.roofline import DeviceSpec, ModelShape, Precision, Replica
    from headrace.lab.plan.search import Fleet, Supply, Trial, Verdict
    from headrace.lab.simulate.fleet import Wire
    from headrace.lab.workload.call import Call


SUPPLY = "Failures and spot machines"

Devices = Annotated[
    list[str] | None,
    typer.Option(
        help=f"Device to consider: {flags.DEVICES}. Repeatable (default: A100-80G, H100-SXM, H200, "
        "MI300X and cpu)."
    ),
]
Prices = Annotated[
    list[str] | None,
    typer.Option(
        metavar="DEVICE=DOLLARS",
        help="Price of an hour of a device, for example H100-SXM=2.50. Repeatable (default: a typical list price).",
    ),
]
Context = Annotated[
    int,
    typer.Option(
        min=1, help="Tokens per prompt and context in the table of devices.", rich_help_panel=flags.MACHINE
    ),
]
SloTtft = Annotated[
    float,
    typer.Option(
        parser=duration,
        metavar="DURATION",
        help="TTFT target.",
        rich_help_panel=flags.SLO,
    ),
]
SloTpot = Annotated[
    float,
    typer.Option(
        parser=duration,
        metavar="DURATION",
        help="TPOT target: time per token after the first.",
        rich_help_panel=flags.SLO,
    ),
]
Attainment = Annotated[
    float,
    typer.Option(
        min=0, max=1, help="Share of requests that must meet both targets, 0 to 1.", rich_help_panel=flags.SLO
    ),
]
MaxDevices = Annotated[
    int, typer.Option(min=1, help="Maximum number of devices of a fleet.", rich_help_panel=flags.MACHINE)
]


Rate = Annotated[
    float | None,
    typer.Option(
        help="Requests per second that the fleet must serve: the workload is made that much denser (default: those "
        "of the workload).",
        rich_help_panel=flags.WORKLOAD,
    ),
]
SpotShare = Annotated[
    float,
    typer.Option(min=0, max=1, help="Share of replicas on spot machines, 0 to 1.", rich_help_panel=SUPPLY),
]
SpotPrice = Annotated[
    float,
    typer.Option(
        min=0, max=1, help="Price of a spot machine, as a share of its usual price.", rich_help_panel=SUPPLY
    ),
]
SpotInterruptions = Annotated[
    float,
    typer.Option(min=0, help="Times per hour that a spot machine is taken away.", rich_help_panel=SUPPLY),
]
Failures = Annotated[
    float, typer.Option(min=0, help="Failures per hour of a replica.", rich_help_panel=SUPPLY)
]
Recovery = Annotated[
    float,
    typer.Option(
        parser=duration,
        metavar="DURATION",
        help="Time until a lost replica serves again.",
        rich_help_panel=SUPPLY,
    ),
]


Split = Annotated[
    bool,
    typer.Option(
        "--disaggregate",
        help="Also consider fleets whose prompts are computed on replicas of their own (P/D).",
        rich_help_panel=flags.MACHINE,
    ),
]


def plan(
    model: flags.Shape = "llama-3.1-8b",
    device: Devices = None,
    price: Prices = None,
    weights: flags.Weights = "bfloat16",
    kv: flags.Kv = "bfloat16",
    context: Context = 1024,
    trace: flags.Trace = None,
    workload: flags.Workload = None,
    requests: flags.Requests = None,
    speedup: flags.Speedup = 1.0,
    seed: flags.Seed = 0,
    acceptance: flags.Acceptance = None,
    draft_cost: flags.DraftCost = 0.0,
    slo_ttft: SloTtft = 2.0,
    slo_tpot: SloTpot = 0.1,
    attainment: Attainment = 0.95,
    routing: flags.Routing = "least-loaded",
    disaggregate: Split = False,
    transfer_bandwidth: flags.TransferBandwidth = flags.TRANSFER_GIGABYTES,
    transfer_latency: flags.TransferLatency = flags.TRANSFER_SECONDS,
    transfer_at_once: flags.TransferAtOnce = False,
    max_devices: MaxDevices = 64,
    rate: Rate = None,
    spot_share: SpotShare = 0.0,
    spot_price: SpotPrice = 0.4,
    spot_interruptions: SpotInterruptions = 0.05,
    failures: Failures = 0.0,
    recovery: Recovery = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show what devices can do for a model, and find the cheapest fleet that meets latency targets under a workload.

    Without a workload it prints memory, decoding, prefill and prices of one replica on each device, from rooflines.
    With --trace or --workload it also simulates fleets with the engine's own scheduler, cheapest first.
    """
    from headrace.cli.flags import read_calls, wire_of
    from headrace.lab.plan.capacity import Slo
    from headrace.lab.plan.report import shape_line, sheet_table
    from headrace.lab.plan.search import Supply
    from headrace.wiring.simulation import shape_of

    shape, precision, devices = shape_of(model), _precision(weights, kv), _devices(device, price or [])
    speculation = read_speculation(acceptance, draft_cost)
    sheets = [_sheet(shape, each, precision, context, speculation) for each in devices]
    document = _described(shape, devices, sheets)
    lines: list[Any] = [shape_line(shape, sheets), sheet_table(sheets)]
    if trace is not None or workload:
        calls = _at_rate(list(read_calls(trace, workload or [], requests, speedup, seed)), rate)
        supply = Supply(spot_share, spot_price, spot_interruptions, failures, recovery)
        slo = Slo(slo_ttft, slo_tpot, attainment)
        wire = partial(wire_of, transfer_bandwidth, transfer_latency, transfer_at_once)
        wanted = Wanted(calls, slo, routing, max_devices, seed, speculation, supply, disaggregate, wire)
        fleet, section = _fleet(shape, devices, precision, wanted)
        document |= fleet
        lines += section
    if as_json:
        print(json.dumps(document, indent=1))
    else:
        show(*lines)


def _described(shape: ModelShape, devices: Sequence[DeviceSpec], sheets: Sequence[Any]) -> dict[str, Any]:
    """Model and devices as parts of the document."""
    return {
        "model": dataclasses.asdict(shape) | {"num_parameters": shape.num_parameters},
        "devices": [dataclasses.asdict(each) for each in devices],
        "sheets": [dataclasses.asdict(each) for each in sheets],
    }


def _at_rate(calls: list[Call], rate: float | None) -> list[Call]:
    """The workload, scaled to ``rate`` requests per second."""
    from headrace.lab.workload.call import speedup

    if rate is None:
        return calls
    if not 0 < rate < float("inf"):
        raise ConfigError(f"--rate {rate:g}: expected a number of requests per second above 0")
    until = max((call.arrival for call in calls), default=0.0)
    return list(speedup(calls, rate * until / len(calls))) if until else calls


def _precision(weights: str, kv: str) -> Precision:
    from headrace.lab.plan.roofline import KV_BYTES, WEIGHTS

    kv_bytes = KV_BYTES[one_of("--kv", kv, KV_BYTES)]
    return WEIGHTS[one_of("--weights", weights, WEIGHTS)]._replace(kv_bytes=kv_bytes)


def _devices(names: Sequence[str] | None, prices: Sequence[str]) -> list[DeviceSpec]:
    from headrace.lab.plan.roofline import COMMON, UnknownDevice
    from headrace.lab.plan.roofline import device as known

    flag = "--device"
    try:
        chosen = {spec.name: spec for spec in (map(known, names) if names else COMMON)}
        for text in prices:
            name, _, dollars = text.partition("=")
            flag = f"--price {text}"
            spec = known(name)
            if spec.name not in chosen:
                raise ConfigError(f"--price {text}: {spec.name} is not among the devices")
            chosen[spec.name] = dataclasses.replace(
                chosen[spec.name], dollars_per_hour=_dollars(text, dollars)
            )
    except UnknownDevice as error:
        raise ConfigError(f"{flag}: {error}") from None
    return list(chosen.values())


def _dollars(text: str, dollars: str) -> float:
    try:
        value = float(dollars)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"--price {text}: expected DEVICE=DOLLARS, for example H100-SXM=2.50")
    return value


def _sheet(
    shape: ModelShape,
    device: DeviceSpec,
    precision: Precision,
    context: int,
    speculation: Speculation | None,
) -> Any:
    """The data sheet of the smallest replica that holds the model; of one device if none does."""
    from headrace.lab.plan.capacity import Settings
    from headrace.lab.plan.report import sheet
    from headrace.lab.plan.roofline import Replica
    from headrace.lab.plan.search import degrees

    settings = Settings(max_num_seqs=256, max_num_batched_tokens=2048)
    sheets = [
        sheet(Replica(shape, device, degree, precision), settings, context, speculation=speculation)
        for degree in degrees(shape, device)
    ]
    return next((each for each in sheets if each.fits), sheets[0])


def _fleet(
    shape: ModelShape, devices: Sequence[DeviceSpec], precision: Precision, wanted: Wanted
) -> tuple[dict[str, Any], list[Any]]:
    """The cheapest fleet as parts of the document, and as lines."""
    from headrace.lab.plan.report import demand_lines, trials_table, verdict_lines

    demand, verdict = _search(shape, devices, precision, wanted)
    document = {
        "demand": _without_prompts(demand),
        "slo": dataclasses.asdict(wanted.slo),
        "verdict": _verdict(verdict, wanted.supply),
    }
    lines: list[Any] = [*demand_lines(demand, wanted.slo)]
    if verdict.tried:
        lines += [trials_table(verdict)]
    return document, [*lines, *verdict_lines(verdict, demand, wanted.supply)]


def _search(
    shape: ModelShape, devices: Sequence[DeviceSpec], precision: Precision, wanted: Wanted
) -> tuple[Any, Verdict]:
    """The demand of a workload, and the cheapest fleet for it."""
    from headrace.lab.plan.capacity import BadDemand, demand
    from headrace.lab.plan.search import candidates, cheapest
    from headrace.wiring.simulation import ROUTINGS

    one_of("--routing", wanted.routing, tuple(ROUTINGS))
    try:
        asked = demand(wanted.calls)
    except BadDemand as error:
        raise ConfigError(str(error)) from None
    possible, refused = candidates(
        shape,
        devices,
        precision,
        asked,
        wanted.slo,
        speculation=wanted.speculation,
        split=wanted.split,
    )
    with progress("simulating fleets") as meter:
        confirm = confirmation(wanted, asked.longest, meter)
        return asked, cheapest(possible, refused, asked, wanted.slo, confirm, wanted.max_devices)


def _without_prompts(demand: Any) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(demand).items() if name != "prompts"}


def _verdict(verdict: Verdict, supply: Supply) -> dict[str, Any]:
    def fleet(each: Fleet) -> dict[str, Any]:
        return {
            "device": each.replica.device.name,
            "degree": each.replica.degree,
            "replicas": each.replicas,
            "prefill_replicas": each.prefill,
            "dollars_per_hour": each.dollars_per_hour,
            **each.settings._asdict(),
        }

    total = supply.replicas(verdict.best.replicas) if verdict.best else 0
    return {
        "best": fleet(verdict.best) if verdict.best else None,
        "supply": dataclasses.asdict(supply) | {"replicas": total},
        "tried": [
            fleet(each) | trial._asdict() | {"error": None if math.isinf(trial.error) else trial.error}
            for each, trial in verdict.tried
        ],
        "refused": list(verdict.refused),
    }


HOST_BYTES = 32 << 30
"""Host memory for pulled blocks, for each device of a replica in a fleet with prefill replicas."""


class Wanted(NamedTuple):
    """The requirements of a fleet."""

    calls: Sequence[Call]
    slo: Slo
    routing: str
    max_devices: int
    seed: int
    speculation: Speculation | None
    supply: Supply
    split: bool
    wire: Callable[[int], Wire]


def confirmation(wanted: Wanted, longest: int, meter: Meter) -> Callable[[Fleet], Trial]:
    """Returns a function that simulates a fleet with the server's engine and policies on a roofline device."""
    from headrace.config import CacheOptions, SchedulerOptions
    from headrace.core.request import Slo as RequestSlo
    from headrace.lab.plan.report import fleet_text
    from headrace.lab.plan.search import Trial, error_bound, prefill_replicas, simulated_replicas
    from headrace.lab.simulate.outcome import outcome
    from headrace.lab.simulate.runner import from_calls
    from headrace.lab.workload.call import Synthesis, speedup
    from headrace.wiring.simulation import make_fleet, roofline_machine

    slo = wanted.slo

    def confirm(fleet: Fleet) -> Trial:
        settings: Settings = fleet.settings
        replica: Replica = fleet.replica
        meter.text = f"simulating {fleet_text(fleet)}"
        plans = SchedulerOptions(
            max_num_seqs=settings.max_num_seqs, max_num_batched_tokens=settings.max_num_batched_tokens
        )
        plans = with_speculation(plans, wanted.speculation)
        host = HOST_BYTES * replica.degree if fleet.prefill_share else 0
        cache = CacheOptions(block_size=settings.block_size, kv_offload_bytes=host)
        machine = roofline_machine(replica, cache, plans, longest + settings.block_size)
        sample = simulated_replicas(fleet.replicas)
        simulated = make_fleet(
            *(plans, cache, machine),
            replicas=sample,
            prefill=prefill_replicas(sample, fleet.prefill_share),
            wire=wanted.wire(replica.degree),
            routing=wanted.routing,
            speculation=wanted.speculation,
            with_rows=True,
        )
        targets = RequestSlo(slo.ttft, slo.tpot)
        calls = speedup(wanted.calls, sample / fleet.replicas)
        simulated.run(from_calls(calls, Synthesis(seed=wanted.seed), slo=targets))
        result = outcome(simulated.tally, {"ttft": slo.ttft, "tpot": slo.tpot})
        summary = result.summary
        return Trial(
            attained=(summary.goodput or 0.0) * summary.seconds / summary.requests,
            ttft_p95=summary.ttft.p95,
            tpot_p95=summary.tpot.p95,
            output_tokens_per_second=summary.output_tokens_per_second * fleet.replicas / sample,
            preemptions=result.facts["preemptions"],
            error=error_bound([_met(row, slo) for row in sorted(simulated.tally.rows, key=_arrival)]),
        )

    return confirm


def _arrival(row: Mapping[str, Any]) -> float:
    return float(row["arrived_seconds"])


def _met(row: Mapping[str, Any], slo: Slo) -> bool:
    """Whether a simulated request met both targets. A failed one has no TTFT; a single token has no TPOT to miss."""
    ttft = float(row.get("ttft_seconds", math.inf))
    tpot = float(row.get("tpot_seconds") or 0.0)
    return ttft <= slo.ttft and tpot <= slo.tpot
