"""``headrace plan``: what a device can do for a model, and the cheapest fleet that meets latency targets."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.machines import (
    DEVICES,
    MACHINE,
    DraftFlags,
    Kv,
    Routing,
    Shape,
    TransferFlags,
    Weights,
    known_device,
    read_precision,
    with_speculation,
)
from headrace.cli.options import duration, one_of, with_options
from headrace.cli.output import progress, show
from headrace.cli.workloads import SLO, WORKLOAD, CallFlags
from headrace.config import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from headrace.cli.output import Meter
    from headrace.lab.forced_acceptance import Speculation
    from headrace.lab.plan.capacity import Demand, Slo
    from headrace.lab.plan.report import ApiPrice, Prices
    from headrace.lab.plan.roofline import DeviceSpec, ModelShape, Precision
    from headrace.lab.plan.search import Fleet, Supply, Trial, Verdict
    from headrace.lab.simulate.tally import Tally
    from headrace.lab.workload.work import Call


SUPPLY = "Failures and spot machines"
PRICES = "Prices"


@dataclass(frozen=True)
class DeviceFlags:
    """The model, and the devices that are considered for it."""

    model: Shape = "llama-3.1-8b"
    device: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Device to consider: {DEVICES}. Repeatable (default: A100-80G, H100-SXM, H200, MI300X and cpu)."
        ),
    ] = None
    price: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DEVICE=DOLLARS",
            help="Price of an hour of a device, for example H100-SXM=2.50. Repeatable (default: a typical list price).",
        ),
    ] = None
    weights: Weights = "bfloat16"
    kv: Kv = "bfloat16"
    context: Annotated[
        int,
        typer.Option(
            min=1, help="Tokens per prompt and context in the table of devices.", rich_help_panel=MACHINE
        ),
    ] = 1024


@dataclass(frozen=True)
class SupplyFlags:
    """Prices and failures of the machines; `headrace.lab.plan.search.Supply` explains them."""

    spot_share: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Share of replicas on spot machines, 0 to 1.", rich_help_panel=SUPPLY
        ),
    ] = 0.0
    spot_price: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Price of a spot machine, as a share of its usual price.",
            rich_help_panel=SUPPLY,
        ),
    ] = 0.4
    spot_interruptions: Annotated[
        float,
        typer.Option(min=0, help="Times per hour that a spot machine is taken away.", rich_help_panel=SUPPLY),
    ] = 0.05
    failures: Annotated[
        float, typer.Option(min=0, help="Failures per hour of a replica.", rich_help_panel=SUPPLY)
    ] = 0.0
    recovery: Annotated[
        float,
        typer.Option(
            parser=duration,
            metavar="DURATION",
            help="Time until a lost replica serves again.",
            rich_help_panel=SUPPLY,
        ),
    ] = 300.0

    def supply(self) -> Supply:
        """As the search takes it."""
        from headrace.lab.plan.search import Supply

        return Supply(
            *(self.spot_share, self.spot_price, self.spot_interruptions, self.failures, self.recovery)
        )


@dataclass(frozen=True)
class PriceFlags:
    """How much of the planned load there is on average, and the API that a fleet is compared with."""

    utilization: Annotated[
        float | None,
        typer.Option(
            help="Mean load as a share of the planned load, above 0 and at most 1: prices per token are those at this "
            "utilization, and continuous batching is compared with static batching (default: prices at full load, no "
            "comparison).",
            rich_help_panel=PRICES,
        ),
    ] = None
    api_price: Annotated[
        str | None,
        typer.Option(
            metavar="INPUT:OUTPUT",
            help="Price of an API in dollars per million input and output tokens, for example 0.15:0.60: the "
            "break-even utilization is reported, from which on the fleet is cheaper (default: none).",
            rich_help_panel=PRICES,
        ),
    ] = None

    @property
    def share(self) -> float:
        """The utilization, 1 if none was given.

        Raises:
            ConfigError: it is not a share.
        """
        if self.utilization is None:
            return 1.0
        if not 0 < self.utilization <= 1:
            raise ConfigError(f"--utilization {self.utilization:g}: expected a share above 0 and at most 1")
        return self.utilization

    def api(self) -> ApiPrice | None:
        """The price of the API.

        Raises:
            ConfigError: it cannot be parsed, or is not above 0.
        """
        from headrace.lab.plan.report import ApiPrice

        if self.api_price is None:
            return None
        try:
            price = ApiPrice(*map(float, self.api_price.split(":")))
        except (ValueError, TypeError):
            price = ApiPrice(math.nan, math.nan)
        if not (0 <= price.input < math.inf and 0 <= price.output < math.inf and sum(price) > 0):
            raise ConfigError(
                f"--api-price {self.api_price}: expected INPUT:OUTPUT in dollars per million tokens, for example "
                "0.15:0.60"
            )
        return price


@dataclass(frozen=True)
class Scenario:
    """The workload that a fleet must serve, its latency targets, and the fleets that are considered."""

    load: CallFlags
    drafts: DraftFlags
    slo_ttft: Annotated[
        float,
        typer.Option(parser=duration, metavar="DURATION", help="TTFT target.", rich_help_panel=SLO),
    ] = 2.0
    slo_tpot: Annotated[
        float,
        typer.Option(
            parser=duration,
            metavar="DURATION",
            help="TPOT target: time per token after the first.",
            rich_help_panel=SLO,
        ),
    ] = 0.1
    attainment: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Share of requests that must meet both targets, 0 to 1.",
            rich_help_panel=SLO,
        ),
    ] = 0.95
    routing: Routing = "least-loaded"
    disaggregate: Annotated[
        bool,
        typer.Option(
            "--disaggregate",
            help="Also consider fleets whose prompts are computed on replicas of their own (P/D).",
            rich_help_panel=MACHINE,
        ),
    ] = False
    transfer: TransferFlags = field(default_factory=TransferFlags)
    max_devices: Annotated[
        int, typer.Option(min=1, help="Maximum number of devices of a fleet.", rich_help_panel=MACHINE)
    ] = 64
    rate: Annotated[
        float | None,
        typer.Option(
            help="Requests per second that the fleet must serve: the workload is made that much denser (default: those "
            "of the workload).",
            rich_help_panel=WORKLOAD,
        ),
    ] = None
    machines: SupplyFlags = field(default_factory=SupplyFlags)
    prices: PriceFlags = field(default_factory=PriceFlags)

    @property
    def slo(self) -> Slo:
        """The latency targets."""
        from headrace.lab.plan.capacity import Slo

        return Slo(self.slo_ttft, self.slo_tpot, self.attainment)

    @property
    def given(self) -> bool:
        """Whether there is a workload."""
        return self.load.trace is not None or bool(self.load.workload)

    def calls(self) -> Sequence[Call]:
        """The workload, scaled to ``--rate`` requests per second.

        Raises:
            ConfigError: a rate that is not positive, or a workload that cannot be read.
        """
        from headrace.lab.workload.work import speedup

        calls, rate = list(self.load.calls()), self.rate
        if rate is None:
            return calls
        if not 0 < rate < float("inf"):
            raise ConfigError(f"--rate {rate:g}: expected a number of requests per second above 0")
        until = max((call.arrival for call in calls), default=0.0)
        return list(speedup(calls, rate * until / len(calls))) if until else calls


@with_options()
def plan(
    machines: DeviceFlags,
    scenario: Scenario,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show what devices can do for a model, and find the cheapest fleet that meets latency targets under a workload.

    Without a workload it prints memory, decoding, prefill and prices of one replica on each device, from rooflines.
    With --trace or --workload it also simulates fleets with the engine's own scheduler, cheapest first.
    """
    from headrace.lab.plan.report import shape_line, sheet_table
    from headrace.wiring.simulation import shape_of

    shape, precision = shape_of(machines.model), read_precision(machines.weights, machines.kv)
    devices = _devices(machines.device, machines.price or [])
    speculation, share = scenario.drafts.speculation(), scenario.prices.share
    if scenario.prices.api() is not None and not scenario.given:
        raise ConfigError(
            "--api-price compares a fleet with an API: give its workload with --trace or --workload"
        )
    sheets = [_sheet(shape, each, precision, machines.context, speculation, share) for each in devices]
    document = _described(shape, devices, sheets)
    lines: list[Any] = [shape_line(shape, sheets), sheet_table(sheets, share)]
    if scenario.given:
        fleet, section = _fleet(shape, devices, precision, scenario, speculation)
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


def _devices(names: Sequence[str] | None, prices: Sequence[str]) -> list[DeviceSpec]:
    from headrace.lab.plan.roofline import COMMON

    specs = [known_device("--device", name) for name in names] if names else COMMON
    chosen = {spec.name: spec for spec in specs}
    for text in prices:
        name, _, dollars = text.partition("=")
        spec = known_device(f"--price {text}", name)
        if spec.name not in chosen:
            raise ConfigError(f"--price {text}: {spec.name} is not among the devices")
        chosen[spec.name] = dataclasses.replace(chosen[spec.name], dollars_per_hour=_dollars(text, dollars))
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
    utilization: float,
) -> Any:
    """The data sheet of the smallest replica that holds the model; of one device if none does."""
    from headrace.lab.plan.capacity import Settings
    from headrace.lab.plan.report import sheet
    from headrace.lab.plan.roofline import Replica
    from headrace.lab.plan.search import degrees

    settings = Settings(max_num_seqs=256, max_num_batched_tokens=2048)
    sheets = [
        sheet(
            *(Replica(shape, device, degree, precision), settings, context),
            speculation=speculation,
            utilization=utilization,
        )
        for degree in degrees(shape, device)
    ]
    return next((each for each in sheets if each.fits), sheets[0])


def _fleet(
    shape: ModelShape,
    devices: Sequence[DeviceSpec],
    precision: Precision,
    scenario: Scenario,
    speculation: Speculation | None,
) -> tuple[dict[str, Any], list[Any]]:
    """The cheapest fleet as parts of the document, and as lines."""
    from headrace.lab.plan.capacity import BadDemand, demand
    from headrace.lab.plan.report import demand_lines, trials_table, verdict_lines
    from headrace.lab.plan.search import candidates, cheapest
    from headrace.wiring.simulation import ROUTINGS

    one_of("--routing", scenario.routing, tuple(ROUTINGS))
    calls, slo, supply = scenario.calls(), scenario.slo, scenario.machines.supply()
    try:
        asked = demand(calls)
    except BadDemand as error:
        raise ConfigError(str(error)) from None
    possible, refused = candidates(
        *(shape, devices, precision, asked, slo), speculation=speculation, split=scenario.disaggregate
    )
    with progress("simulating fleets") as meter:
        confirm = partial(_confirm, scenario, calls, asked.longest, speculation, meter)
        verdict = cheapest(possible, refused, asked, slo, confirm, scenario.max_devices)
    document = {
        "demand": _without_prompts(asked),
        "slo": dataclasses.asdict(slo),
        "verdict": _verdict(verdict, supply),
    }
    lines: list[Any] = [*demand_lines(asked, slo)]
    if verdict.tried:
        lines += [trials_table(verdict)]
    lines += verdict_lines(verdict, asked, supply, scenario.prices.share)
    compared = scenario.prices != PriceFlags()
    if compared and verdict.best is not None:
        prices = _prices(scenario, verdict.best, supply, asked, calls, speculation)
        document["prices"] = prices.document()
        lines += [prices.table(), *prices.lines()]
    return document, lines


def _prices(
    scenario: Scenario,
    fleet: Fleet,
    supply: Supply,
    demand: Demand,
    calls: Sequence[Call],
    speculation: Speculation | None,
) -> Prices:
    """What the tokens of a fleet cost; continuous and static batching are simulated on one of its replicas."""
    from headrace.lab.plan.report import Batching, Prices, slots_at_full_load
    from headrace.lab.simulate.tally import outcome

    total = supply.replicas(fleet.replicas)
    slots = slots_at_full_load(fleet.settings.max_num_seqs, len(calls))
    at_once = [call._replace(arrival=0.0) for call in calls]
    alone = fleet._replace(
        replicas=1, prefill_share=0.0, settings=fleet.settings._replace(max_num_seqs=slots)
    )
    batching = []
    for policy in ("continuous", "static"):
        with progress(f"simulating {policy} batching at full load"):
            static = policy == "static"
            tally = _simulated(scenario, at_once, demand.longest, speculation, alone, static=static)
        summary = outcome(tally, {}).summary
        batching.append(Batching(policy, summary.output_tokens_per_second, summary.requests_per_second))
    return Prices(
        demand,
        scenario.prices.share,
        f"{fleet.replica.degree} x {fleet.replica.device.name}",
        slots,
        fleet.settings.max_num_seqs,
        fleet.replica.dollars_per_hour,
        total * fleet.replica.dollars_per_hour * supply.price,
        batching,
        scenario.prices.api(),
    )


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


def _confirm(
    scenario: Scenario,
    calls: Sequence[Call],
    longest: int,
    speculation: Speculation | None,
    meter: Meter,
    fleet: Fleet,
) -> Trial:
    """Simulates the workload on a fleet, or on a sample of a large one."""
    from headrace.lab.plan.report import fleet_text
    from headrace.lab.plan.search import Trial, error_bound, simulated_replicas
    from headrace.lab.simulate.tally import outcome
    from headrace.lab.workload.work import speedup

    slo, sample = scenario.slo, simulated_replicas(fleet.replicas)
    meter.text = f"simulating {fleet_text(fleet)}"
    sampled = speedup(calls, sample / fleet.replicas)
    tally = _simulated(scenario, sampled, longest, speculation, fleet._replace(replicas=sample), slo)
    result = outcome(tally, {"ttft": slo.ttft, "tpot": slo.tpot})
    summary = result.summary
    return Trial(
        attained=summary.slo_share or 0.0,
        ttft_p95=summary.ttft.p95,
        tpot_p95=summary.tpot.p95,
        output_tokens_per_second=summary.output_tokens_per_second * fleet.replicas / sample,
        preemptions=result.facts["preemptions"],
        error=error_bound([_met(row, slo) for row in sorted(tally.rows, key=_arrival)]),
    )


def _simulated(
    scenario: Scenario,
    calls: Iterable[Call],
    longest: int,
    speculation: Speculation | None,
    fleet: Fleet,
    slo: Slo | None = None,
    *,
    static: bool = False,
) -> Tally:
    """Simulates calls on a fleet with the server's engine and policies on a roofline device."""
    from headrace.config import CacheOptions, SchedulerOptions
    from headrace.core.request import Slo as RequestSlo
    from headrace.lab.simulate.runner import from_calls
    from headrace.lab.workload.work import Synthesis
    from headrace.wiring.simulation import make_fleet, roofline_machine

    settings, replica = fleet.settings, fleet.replica
    plans = SchedulerOptions(
        max_num_seqs=settings.max_num_seqs, max_num_batched_tokens=settings.max_num_batched_tokens
    )
    if static:
        plans = dataclasses.replace(plans, scheduling_policy="static")
    plans = with_speculation(plans, speculation)
    host = HOST_BYTES * replica.degree if fleet.prefill_share else 0
    cache = CacheOptions(block_size=settings.block_size, kv_offload_bytes=host)
    machine = roofline_machine(replica, cache, plans, longest + settings.block_size)
    simulated = make_fleet(
        *(plans, cache, machine),
        replicas=fleet.replicas,
        prefill=fleet.prefill,
        wire=scenario.transfer.wire(replica.degree),
        routing=scenario.routing,
        speculation=speculation,
        with_rows=slo is not None,
    )
    targets = RequestSlo() if slo is None else RequestSlo(slo.ttft, slo.tpot)
    simulated.run(from_calls(calls, Synthesis(seed=scenario.load.seed), slo=targets))
    return simulated.tally


def _arrival(row: Mapping[str, Any]) -> float:
    return float(row["arrived_seconds"])


def _met(row: Mapping[str, Any], slo: Slo) -> bool:
    """Whether a simulated request met both targets; a failed one met none."""
    from headrace.lab.bench.stats import within

    times = {"ttft": row.get("ttft_seconds"), "tpot": row.get("tpot_seconds")}
    return "error" not in row and within(times, {"ttft": slo.ttft, "tpot": slo.tpot})
