"""``headrace plan``: what a device can do for a model, and the cheapest fleet that keeps a promise."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.config import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace.lab.plan.capacity import Settings, Slo
    from headrace.lab.plan.devices import DeviceSpec
    from headrace.lab.plan.roofline import Precision, Replica
    from headrace.lab.plan.search import Fleet, Trial, Verdict
    from headrace.lab.plan.shapes import ModelShape
    from headrace.lab.workload.call import Call

WORKLOAD = "Workload options"
PROMISE = "Promise options"
MODEL = "Model options"


def plan(
    model: Annotated[
        str, typer.Argument(help="A known shape, or a folder or hub name with a config.json.")
    ] = "llama-3.1-8b",
    device: Annotated[
        list[str] | None,
        typer.Option(help="A100-80G, H100-SXM, H200, MI300X or cpu; repeatable [default: all]."),
    ] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(metavar="DEVICE=DOLLARS", help="What an hour of a device costs you; repeatable."),
    ] = None,
    weights: Annotated[str, typer.Option(help="bfloat16, int8 or int4.", rich_help_panel=MODEL)] = "bfloat16",
    kv: Annotated[
        str, typer.Option(help="Keys and values: bfloat16 or int8.", rich_help_panel=MODEL)
    ] = "bfloat16",
    context: Annotated[
        int, typer.Option(min=1, help="Tokens of the prompts and contexts shown.", rich_help_panel=MODEL)
    ] = 1024,
    trace: Annotated[
        Path | None,
        typer.Option(help="CSV or JSON lines; the header says which trace.", rich_help_panel=WORKLOAD),
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            help="A tenant instead of a trace: rate=R,prompt=LENGTHS,answer=LENGTHS,… as for simulate.",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            min=1, help="So many [default: all of a trace, 1,000 of a workload].", rich_help_panel=WORKLOAD
        ),
    ] = None,
    speedup: Annotated[float, typer.Option(help="So many times the load.", rich_help_panel=WORKLOAD)] = 1.0,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.", rich_help_panel=WORKLOAD)] = 0,
    slo_ttft: Annotated[
        float, typer.Option(min=0, help="Seconds to the first token.", rich_help_panel=PROMISE)
    ] = 2.0,
    slo_tpot: Annotated[
        float, typer.Option(min=0, help="Seconds per further token.", rich_help_panel=PROMISE)
    ] = 0.1,
    attainment: Annotated[
        float,
        typer.Option(min=0, max=1, help="Share of requests that get both.", rich_help_panel=PROMISE),
    ] = 0.95,
    routing: Annotated[
        str, typer.Option(help="least-loaded, round-robin or prefix-affinity.", rich_help_panel=PROMISE)
    ] = "least-loaded",
    max_devices: Annotated[
        int, typer.Option(min=1, help="Devices of a fleet at most.", rich_help_panel=PROMISE)
    ] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """What devices can do for a model, and, for a workload, the cheapest fleet that keeps a promise.

    Without a workload: memory, decoding, prefill and prices of one replica on each device, from rooflines. With
    --trace or --workload the fleets that arithmetic allows are simulated, the cheapest first, with the engine's
    own scheduler.
    """
    from headrace.build.simulation import shape_of
    from headrace.cli.simulate import read_calls
    from headrace.lab.plan.capacity import Slo
    from headrace.lab.plan.report import demand_lines, shape_line, sheet_table, trials_table, verdict_lines

    shape, precision, devices = shape_of(model), _precision(weights, kv), _devices(device, price or [])
    sheets = [_sheet(shape, each, precision, context) for each in devices]
    told: dict[str, Any] = {
        "model": dataclasses.asdict(shape) | {"num_parameters": shape.num_parameters},
        "devices": [dataclasses.asdict(each) for each in devices],
        "sheets": [dataclasses.asdict(each) for each in sheets],
    }
    lines: list[Any] = [shape_line(shape, sheets), sheet_table(sheets)]
    if trace is not None or workload:
        calls = list(read_calls(trace, workload or [], requests, speedup, seed))
        slo = Slo(slo_ttft, slo_tpot, attainment)
        wanted, verdict = _search(shape, devices, precision, calls, slo, routing, max_devices, seed)
        told |= {
            "demand": _without_prompts(wanted),
            "slo": dataclasses.asdict(slo),
            "verdict": _told(verdict),
        }
        lines += [*demand_lines(wanted, slo)]
        if verdict.tried:
            lines += [trials_table(verdict)]
        lines += verdict_lines(verdict, wanted)
    _print(told, lines, as_json)


def _precision(weights: str, kv: str) -> Precision:
    from headrace.lab.plan.roofline import KV_BYTES, WEIGHTS

    for flag, value, known in (("--weights", weights, WEIGHTS), ("--kv", kv, KV_BYTES)):
        if value not in known:
            raise ConfigError(f"{flag} {value}: expected one of {', '.join(known)}")
    return WEIGHTS[weights]._replace(kv_bytes=KV_BYTES[kv])


def _devices(names: Sequence[str] | None, prices: Sequence[str]) -> list[DeviceSpec]:
    from headrace.lab.plan.devices import DEVICES, UnknownDevice
    from headrace.lab.plan.devices import device as known

    try:
        chosen = {spec.name: spec for spec in (map(known, names) if names else DEVICES.values())}
        for text in prices:
            name, _, dollars = text.partition("=")
            spec = known(name)
            if spec.name not in chosen:
                raise ConfigError(f"--price {text}: {spec.name} is not among the devices")
            chosen[spec.name] = dataclasses.replace(
                chosen[spec.name], dollars_per_hour=_dollars(text, dollars)
            )
    except UnknownDevice as error:
        raise ConfigError(str(error)) from None
    return list(chosen.values())


def _dollars(text: str, dollars: str) -> float:
    try:
        value = float(dollars)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"--price {text}: expected DEVICE=DOLLARS, for example H100-SXM=2.50")
    return value


def _sheet(shape: ModelShape, device: DeviceSpec, precision: Precision, context: int) -> Any:
    """The sheet of the smallest replica that holds the model; of one device where none does."""
    from headrace.lab.plan.capacity import Settings
    from headrace.lab.plan.roofline import Replica
    from headrace.lab.plan.search import degrees
    from headrace.lab.plan.sheet import sheet

    settings = Settings(max_num_seqs=256, max_num_batched_tokens=2048)
    sheets = [
        sheet(Replica(shape, device, degree, precision), settings, context)
        for degree in degrees(shape, device)
    ]
    return next((each for each in sheets if each.fits), sheets[0])


def _search(
    shape: ModelShape,
    devices: Sequence[DeviceSpec],
    precision: Precision,
    calls: Sequence[Call],
    slo: Slo,
    routing: str,
    max_devices: int,
    seed: int,
) -> tuple[Any, Verdict]:
    from headrace.build.simulation import ROUTINGS
    from headrace.lab.plan.demand import BadDemand, demand
    from headrace.lab.plan.search import candidates, cheapest

    if routing not in ROUTINGS:
        raise ConfigError(f"--routing {routing}: expected one of {', '.join(ROUTINGS)}")
    try:
        wanted = demand(calls)
    except BadDemand as error:
        raise ConfigError(str(error)) from None
    possible, refused = candidates(shape, devices, precision, wanted, slo)
    confirm = _confirm(calls, slo, routing, wanted.longest, seed)
    return wanted, cheapest(possible, refused, wanted, slo, confirm, max_devices)


def _confirm(
    calls: Sequence[Call], slo: Slo, routing: str, longest: int, seed: int
) -> Callable[[Fleet], Trial]:
    """A simulation of a fleet: the engine and the policies that a server would have, over a roofline."""
    from headrace.build.simulation import make_fleet, roofline_machine
    from headrace.config import CacheOptions, SchedulerOptions
    from headrace.lab.plan.search import Trial
    from headrace.lab.simulate.outcome import outcome
    from headrace.lab.simulate.requests import from_calls
    from headrace.lab.workload.synthesis import Synthesis

    def confirm(fleet: Fleet) -> Trial:
        settings: Settings = fleet.settings
        replica: Replica = fleet.replica
        plans = SchedulerOptions(
            max_num_seqs=settings.max_num_seqs, max_num_batched_tokens=settings.max_num_batched_tokens
        )
        cache = CacheOptions(block_size=settings.block_size)
        machine = roofline_machine(replica, cache, plans, longest + settings.block_size)
        simulated = make_fleet(plans, cache, machine, replicas=fleet.replicas, routing=routing)
        simulated.run(from_calls(calls, Synthesis(seed=seed)))
        told = outcome(simulated.tally, {"ttft": slo.ttft, "tpot": slo.tpot})
        summary = told.summary
        return Trial(
            attained=(summary.goodput or 0.0) * summary.seconds / summary.requests,
            ttft_p95=summary.ttft.p95,
            tpot_p95=summary.tpot.p95,
            output_tokens_per_second=summary.output_tokens_per_second,
            preemptions=told.facts["preemptions"],
        )

    return confirm


def _without_prompts(demand: Any) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(demand).items() if name != "prompts"}


def _told(verdict: Verdict) -> dict[str, Any]:
    def fleet(each: Fleet) -> dict[str, Any]:
        return {
            "device": each.replica.device.name,
            "degree": each.replica.degree,
            "replicas": each.replicas,
            "dollars_per_hour": each.dollars_per_hour,
            **each.settings._asdict(),
        }

    return {
        "best": fleet(verdict.best) if verdict.best else None,
        "tried": [fleet(each) | trial._asdict() for each, trial in verdict.tried],
        "refused": list(verdict.refused),
    }


def _print(told: dict[str, Any], lines: Sequence[Any], as_json: bool) -> None:
    from rich.console import Console

    if as_json:
        print(json.dumps(told, indent=1))
        return
    console = Console(highlight=False, soft_wrap=True)
    for line in lines:
        console.print(line, markup=False)
