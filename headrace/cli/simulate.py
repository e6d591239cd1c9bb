"""``headrace simulate``: the engine's own code in virtual time, over a trace or a made-up population of tenants."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.options import with_options
from headrace.cli.output import writing
from headrace.config import CacheOptions, ConfigError, Options, SchedulerOptions

if TYPE_CHECKING:
    from headrace.build.simulation import Machine
    from headrace.lab.simulate.outcome import Outcome
    from headrace.lab.workload.call import Call

WORKLOAD = "Workload options"
MACHINE = "Machine options"
SHOWN_PARTS = 30
"""Tenants that the table shows; the JSON has all of them."""


@with_options(CacheOptions, SchedulerOptions)
def simulate(
    given: Options,
    shape: Annotated[
        str, typer.Argument(help="Model: a known shape, or a folder or hub name with a config.json.")
    ] = "llama-3.1-8b",
    device: Annotated[
        str, typer.Option(help="A100-80G, H100-SXM, H200, MI300X or cpu.", rich_help_panel=MACHINE)
    ] = "H100-SXM",
    degree: Annotated[
        int, typer.Option(min=1, help="Devices per replica (tensor parallel).", rich_help_panel=MACHINE)
    ] = 1,
    weights: Annotated[
        str, typer.Option(help="bfloat16, int8 or int4.", rich_help_panel=MACHINE)
    ] = "bfloat16",
    kv: Annotated[
        str, typer.Option(help="Keys and values: bfloat16 or int8.", rich_help_panel=MACHINE)
    ] = "bfloat16",
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="File of `headrace bench calibrate`, instead of model and device.", rich_help_panel=MACHINE
        ),
    ] = None,
    front: Annotated[
        bool,
        typer.Option(help="With a calibration: its HTTP side before the engine.", rich_help_panel=MACHINE),
    ] = True,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Tokens of prompt and answer together.", rich_help_panel=MACHINE)
    ] = None,
    replicas: Annotated[
        int, typer.Option(min=1, help="Engines behind the router.", rich_help_panel=MACHINE)
    ] = 1,
    routing: Annotated[
        str, typer.Option(help="least-loaded, round-robin or prefix-affinity.", rich_help_panel=MACHINE)
    ] = "least-loaded",
    max_num_queued_reqs: Annotated[
        int | None,
        typer.Option(
            min=1, help="Requests that may wait per replica [default: all].", rich_help_panel=MACHINE
        ),
    ] = None,
    max_num_queued_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Prompt tokens that may wait per replica.", rich_help_panel=MACHINE),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="CSV or JSON lines; the header says which trace.", rich_help_panel=WORKLOAD),
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            help="A tenant instead of a trace: tenant=NAME,rate=R,arrivals=poisson|bursty:S|mmpp:X:S|diurnal,"
            "prompt=LENGTHS,answer=LENGTHS,turns=N,system=TOKENS,class=NAME. Repeatable.",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            min=1, help="So many [default: all of a trace, 1,000 of a workload].", rich_help_panel=WORKLOAD
        ),
    ] = None,
    resample: Annotated[
        bool,
        typer.Option(help="Draw --requests from the trace with replacement.", rich_help_panel=WORKLOAD),
    ] = False,
    speedup: Annotated[float, typer.Option(help="So many times the load.", rich_help_panel=WORKLOAD)] = 1.0,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="What every request asks for at most; answers end by themselves.",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.", rich_help_panel=WORKLOAD)] = 0,
    slo_ttft: Annotated[
        float | None, typer.Option(help="Seconds to the first token of a good request.")
    ] = None,
    slo_tpot: Annotated[float | None, typer.Option(help="Seconds per further token of one.")] = None,
    slo_e2e: Annotated[float | None, typer.Option(help="Seconds to the end of one.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Folder for pictures.")] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file.")] = None,
) -> None:
    """What a workload would see of an engine, or a fleet, on a device that need not be there."""
    from headrace.build.simulation import make_fleet
    from headrace.core.tenancy.gate import Limits
    from headrace.lab.simulate.asked import from_calls
    from headrace.lab.simulate.outcome import outcome
    from headrace.lab.workload.synthesis import Synthesis

    calls = read_calls(trace, workload or [], requests, speedup, seed, resample=resample)
    machine = _machine(given, shape, device, degree, weights, kv, calibration, front, max_model_len)
    limits = Limits(max_num_queued_reqs or 1 << 62, max_num_queued_tokens or 1 << 62)
    fleet = make_fleet(
        given.scheduler,
        given.cache,
        machine,
        replicas=replicas,
        routing=_one_of("--routing", routing, ("least-loaded", "round-robin", "prefix-affinity")),
        limits=limits,
    )
    fleet.run(from_calls(calls, Synthesis(seed=seed), max_tokens))
    slo = {
        name: at for name, at in (("ttft", slo_ttft), ("tpot", slo_tpot), ("e2e", slo_e2e)) if at is not None
    }
    told = outcome(fleet.tally, slo, [replica.runner.busy_seconds for replica in fleet.replicas])
    title = f"{replicas} x {machine.name}" if replicas > 1 else machine.name
    _show(told, title)
    if output is not None:
        settings = {
            "machine": machine.name,
            "replicas": replicas,
            "routing": routing,
            "trace": trace and trace.name,
            "workload": workload,
            "requests": requests,
            "resample": resample,
            "speedup": speedup,
            "max_tokens": max_tokens,
            "max_model_len": machine.max_model_len,
            "kv_tokens": machine.kv_tokens,
            "seed": seed,
        }
        _write(told, settings, given, output)
    if plot is not None:
        _plot(told, plot, title)


def read_calls(
    trace: Path | None,
    workload: list[str],
    requests: int | None,
    faster: float,
    seed: int,
    *,
    resample: bool = False,
) -> Iterator[Call]:
    """The calls of a trace or of a population, as the flags say.

    Raises:
        ConfigError: neither or both, or what cannot be read; of a line in the middle of the file when it is reached.
    """
    from headrace.lab.workload import population
    from headrace.lab.workload.reshape import resampled, speedup
    from headrace.lab.workload.traces import BadTrace, read_trace

    if (trace is None) == (not workload):
        raise ConfigError("say what to simulate: either --trace FILE or --workload (see --help)")
    if resample and (trace is None or requests is None):
        raise ConfigError("--resample draws --requests calls from a --trace: it needs both")
    calls: Iterable[Call]
    try:
        if trace is None:
            tenants = [population.parse(text) for text in workload]
            calls = population.calls(tenants, requests or 1000, seed)
        elif resample:
            calls = resampled(list(read_trace(trace)), requests or 0, seed)
        else:
            with trace.open():  # a file that is missing is told now, not in the middle
                calls = read_trace(trace, requests)
        return _readable(trace, speedup(calls, faster))
    except (BadTrace, population.BadPopulation, OSError, ValueError) as error:
        raise ConfigError(str(error)) from None


def _readable(trace: Path | None, calls: Iterator[Call]) -> Iterator[Call]:
    from headrace.lab.workload.traces import BadTrace

    try:
        yield from calls
    except BadTrace as error:
        raise ConfigError(str(error)) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{trace}: {error}") from None


def _machine(
    given: Options,
    shape: str,
    device: str,
    degree: int,
    weights: str,
    kv: str,
    calibration: Path | None,
    front: bool,
    max_model_len: int | None,
) -> Machine:
    from headrace.build.simulation import calibrated_machine, read_calibration, roofline_machine, shape_of
    from headrace.lab.plan.devices import UnknownDevice
    from headrace.lab.plan.devices import device as device_spec
    from headrace.lab.plan.roofline import KV_BYTES, WEIGHTS, Replica

    if calibration is not None:
        return calibrated_machine(read_calibration(calibration), given.cache, max_model_len, front)
    try:
        spec = device_spec(device)
    except UnknownDevice as error:
        raise ConfigError(f"--device: {error}") from None
    model = shape_of(shape)
    if model.num_kv_heads % degree:
        raise ConfigError(
            f"--degree {degree}: {model.name} has {model.num_kv_heads} heads of keys and values"
        )
    precision = WEIGHTS[_one_of("--weights", weights, WEIGHTS)]._replace(
        kv_bytes=KV_BYTES[_one_of("--kv", kv, KV_BYTES)]
    )
    return roofline_machine(
        Replica(model, spec, degree, precision), given.cache, given.scheduler, max_model_len
    )


def _one_of(flag: str, value: str, known: Iterable[str]) -> str:
    if value not in known:
        raise ConfigError(f"{flag} {value}: expected one of {', '.join(known)}")
    return value


def _show(told: Outcome, title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    from headrace.lab.bench.report import Run, table

    console = Console(soft_wrap=True, highlight=False)
    facts = {**told.facts, **{f"no answer: {reason}": count for reason, count in told.failures.items()}}
    console.print(table([Run("simulated", (), told.summary, facts)], title))
    for kind, parts in (("class", told.classes), ("tenant", told.tenants)):
        if len(parts) < 2:
            continue
        shown = Table(title=f"per {kind}", title_justify="left", header_style="bold")
        for column in (
            kind,
            "requests (failed)",
            "output tokens",
            "TTFT ms p50 / p99",
            "TPOT ms p50 / p99",
            "SLO met",
        ):
            shown.add_column(column, justify="left" if column == kind else "right")
        for part in sorted(parts, key=lambda part: -part.requests)[:SHOWN_PARTS]:
            shown.add_row(
                part.name,
                f"{part.requests} ({part.failed})",
                str(part.output_tokens),
                *(f"{1e3 * each.p50:.1f} / {1e3 * each.p99:.1f}" for each in (part.ttft, part.tpot)),
                "-" if part.attained is None else f"{100 * part.attained:.1f} %",
            )
        console.print(shown)


def _write(told: Outcome, settings: Mapping[str, Any], given: Options, path: Path) -> None:
    """Writes the run as JSON; without times of day or machine, so that equal runs make equal files."""
    from dataclasses import asdict

    from headrace.lab.bench import report

    content = {
        "settings": {**settings, "cache": asdict(given.cache), "scheduler": asdict(given.scheduler)},
        "summary": asdict(told.summary),
        "facts": told.facts,
        "failures": told.failures,
        "classes": [asdict(part) for part in told.classes],
        "tenants": [asdict(part) for part in told.tenants],
        "timeline": told.timeline,
    }
    with writing("--output", path):
        report.write(path, report.plain(content))
    typer.echo(f"written: {path}")


def _plot(told: Outcome, folder: Path, title: str) -> None:
    from headrace.lab.bench.plot import NoPlots
    from headrace.lab.simulate.plot import plot

    try:
        with writing("--plot", folder):
            for path in plot(told, folder, title):
                typer.echo(f"written: {path}")
    except NoPlots as missing:
        typer.echo(str(missing))
