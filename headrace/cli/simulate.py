"""``headrace simulate``: the engine's own code in virtual time, over a trace or a synthetic workload.

Several policies are simulated one after the other over the same requests, and compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import headrace.cli.flags as flags
from headrace.cli.experiment import describe, read_experiment
from headrace.cli.flags import read_calls, read_speculation, wire_of, with_speculation
from headrace.cli.options import one_of, with_options
from headrace.cli.output import check_export, progress, show, writing, written
from headrace.cli.output import export as write_rows
from headrace.config import CacheOptions, ConfigError, Options, SchedulerOptions

if TYPE_CHECKING:
    from headrace.core.engine import Engine
    from headrace.lab.forced_acceptance import Speculation
    from headrace.lab.simulate.fleet import Wire
    from headrace.lab.simulate.outcome import Outcome, Part
    from headrace.lab.simulate.replica import Steering
    from headrace.lab.workload.call import Call
    from headrace.wiring.simulation import Machine


COMPARED = ("scheduling_policy", "queue_order", "admission_policy", "victim_policy", "eviction_policy")
"""Options that may be repeated: each combination is simulated."""


class MachineFlags(NamedTuple):
    """The flags of the simulated machine."""

    shape: str
    device: str
    degree: int
    weights: str
    kv: str
    calibration: Path | None
    front: bool
    max_model_len: int | None


class FleetFlags(NamedTuple):
    """The flags of the replicas, their queues and their drafts."""

    replicas: int
    prefill: Sequence[int]
    wire: Wire
    routing: str
    max_num_queued_reqs: int | None
    max_num_queued_tokens: int | None
    speculation: Speculation | None


class LoadFlags(NamedTuple):
    """The flags of the workload."""

    trace: Path | None
    workload: Sequence[str]
    requests: int | None
    resample: bool
    speedup: float
    max_tokens: int | None
    seed: int

    def calls(self) -> Iterator[Call]:
        """The requests from the beginning."""
        return read_calls(
            self.trace, self.workload, self.requests, self.speedup, self.seed, resample=self.resample
        )

    def describe(self) -> str:
        """The load in a few words, for titles."""
        source = self.trace.name if self.trace else ", ".join(self.workload)
        faster = f", {self.speedup:g} times as fast" if self.speedup != 1 else ""
        return f"{source}{faster}"


@with_options(CacheOptions, SchedulerOptions, several=COMPARED)
def simulate(
    given: Sequence[Options],
    shape: flags.Shape = "llama-3.1-8b",
    device: flags.Device = "H100-SXM",
    degree: flags.Degree = 1,
    weights: flags.Weights = "bfloat16",
    kv: flags.Kv = "bfloat16",
    calibration: flags.Calibration = None,
    front: flags.Front = True,
    max_model_len: flags.MaxModelLen = None,
    replicas: flags.Replicas = 1,
    prefill_replicas: flags.PrefillReplicas = None,
    transfer_bandwidth: flags.TransferBandwidth = flags.TRANSFER_GIGABYTES,
    transfer_latency: flags.TransferLatency = flags.TRANSFER_SECONDS,
    transfer_at_once: flags.TransferAtOnce = False,
    routing: flags.Routing = "least-loaded",
    max_num_queued_reqs: flags.MaxQueuedReqs = None,
    max_num_queued_tokens: flags.MaxQueuedTokens = None,
    trace: flags.Trace = None,
    workload: flags.Workload = None,
    requests: flags.Requests = None,
    resample: flags.Resample = False,
    speedup: flags.Speedup = 1.0,
    max_tokens: flags.MaxTokens = None,
    seed: flags.Seed = 0,
    acceptance: flags.Acceptance = None,
    draft_cost: flags.DraftCost = 0.0,
    slo_ttft: flags.SloTtft = None,
    slo_tpot: flags.SloTpot = None,
    slo_e2e: flags.SloE2e = None,
    experiment: flags.Experiment = None,
    plot: flags.Plot = None,
    output: flags.Output = None,
    export: flags.Export = None,
) -> None:
    """Simulate an engine, or several behind a router, without the device.

    With several --scheduling-policy, --queue-order or --prefill-replicas, each is compared with the first one.
    """
    check_export(export)
    on = MachineFlags(shape, device, degree, weights, kv, calibration, front, max_model_len)
    speculation = read_speculation(acceptance, draft_cost)
    wire = wire_of(transfer_bandwidth, transfer_latency, transfer_at_once, 1 if calibration else degree)
    pools = _pools(prefill_replicas or [0], replicas)
    fleet = FleetFlags(
        replicas, pools, wire, routing, max_num_queued_reqs, max_num_queued_tokens, speculation
    )
    load = LoadFlags(trace, workload or (), requests, resample, speedup, max_tokens, seed)
    targets = {"ttft": slo_ttft, "tpot": slo_tpot, "e2e": slo_e2e}
    slo = {name: seconds for name, seconds in targets.items() if seconds is not None}
    runs, rows, reports = _runs(given, on, fleet, load, slo, experiment, with_rows=export is not None)
    title = f"{_count(replicas)}{runs[0].machine.name}, {load.describe()}"
    show_runs(runs, title)
    if reports:
        print("\n".join(reports))
    if output is not None:
        write_runs(runs, _settings(runs[0], fleet, load), output)
    if plot is not None:
        plot_runs(runs, plot, title)
    write_rows(export, rows)


def _pools(prefill: Sequence[int], replicas: int) -> Sequence[int]:
    for count in prefill:
        if count >= replicas:
            raise ConfigError(
                f"--prefill-replicas {count}: at least one of --replicas {replicas} must generate tokens"
            )
    return tuple(dict.fromkeys(prefill))


def _with_pools(name: str, prefill: int, fleet: FleetFlags, *, alone: bool) -> str:
    """The name of a run with prefill and decode replicas."""
    if tuple(fleet.prefill) == (0,):
        return name
    pools = (
        f"{prefill} prefill, {fleet.replicas - prefill} decode" if prefill else f"{fleet.replicas} for both"
    )
    return pools if alone else f"{name}, {pools}"


class SimulatedRun(NamedTuple):
    """One simulated set of options with its results."""

    name: str
    scheduler: SchedulerOptions
    cache: CacheOptions
    machine: Machine
    outcome: Outcome
    experiments: Sequence[dict[str, Any]] = ()


def _runs(
    given: Sequence[Options],
    on: MachineFlags,
    fleet: FleetFlags,
    load: LoadFlags,
    slo: dict[str, float],
    experiment: Path | None,
    *,
    with_rows: bool,
) -> tuple[list[SimulatedRun], list[dict[str, Any]], list[str]]:
    """All runs, a row for each of their requests, and the lines of the experiment."""
    body = None if experiment is None else read_experiment(experiment)
    runs, rows, reports = [], [], []
    for (name, options), prefill in product(zip(_names(given), given, strict=True), fleet.prefill):
        trial = None if body is None else Trial(body)
        name = _with_pools(name, prefill, fleet, alone=len(given) == 1)
        run, its_rows = _simulate(name, options, on, fleet, prefill, load, slo, trial, with_rows=with_rows)
        runs.append(run)
        rows += its_rows
        reports += [] if trial is None else trial.lines(name)
    return runs, rows, reports


def _names(given: Sequence[Options]) -> list[str]:
    """The name of each run: its policy, and the other compared options that differ."""
    varied = [name for name in COMPARED[1:] if len({getattr(each.scheduler, name) for each in given}) > 1]
    return [
        ", ".join([each.scheduler.scheduling_policy, *(getattr(each.scheduler, name) for name in varied)])
        for each in given
    ]


def _simulate(
    name: str,
    options: Options,
    on: MachineFlags,
    flags: FleetFlags,
    prefill: int,
    load: LoadFlags,
    slo: dict[str, float],
    trial: Trial | None,
    *,
    with_rows: bool,
) -> tuple[SimulatedRun, list[dict[str, Any]]]:
    from headrace.core.request import Slo
    from headrace.core.tenancy.gate import Limits
    from headrace.lab.simulate.outcome import outcome
    from headrace.lab.simulate.runner import from_calls
    from headrace.lab.workload.call import Synthesis
    from headrace.wiring.simulation import ROUTINGS, make_fleet

    calls = load.calls()
    plans = with_speculation(options.scheduler, flags.speculation)
    options, machine = _machine(dataclasses.replace(options, scheduler=plans), on)
    fleet = make_fleet(
        options.scheduler,
        options.cache,
        machine,
        replicas=flags.replicas,
        prefill=prefill,
        wire=flags.wire,
        routing=one_of("--routing", flags.routing, tuple(ROUTINGS)),
        limits=Limits(flags.max_num_queued_reqs or 1 << 62, flags.max_num_queued_tokens or 1 << 62),
        with_rows=with_rows,
        speculation=flags.speculation,
        steer=None if trial is None else partial(trial.steer, options.scheduler),
    )
    wanted = Slo(slo.get("ttft"), slo.get("tpot"))
    with progress(f"simulating {name}", load.requests) as meter:
        fleet.run(from_calls(meter.count(calls), Synthesis(seed=load.seed), load.max_tokens, wanted))
    result = outcome(fleet.tally, slo, [replica.runner.busy_seconds for replica in fleet.replicas])
    rows = [{"run": name, "round": 1, **row} for row in fleet.tally.rows]
    reports = () if trial is None else trial.reports()
    return SimulatedRun(name, options.scheduler, options.cache, machine, result, reports), rows


def _machine(options: Options, on: MachineFlags) -> tuple[Options, Machine]:
    """The machine, and the options with the device's own default of ``max_num_seqs`` where none was chosen."""
    from headrace.lab.plan.roofline import KV_BYTES, WEIGHTS, Replica, UnknownDevice
    from headrace.lab.plan.roofline import device as device_spec
    from headrace.wiring.simulation import calibrated_machine, read_calibration, roofline_machine, shape_of

    if on.calibration is not None:
        calibration = read_calibration(on.calibration)
        return options, calibrated_machine(calibration, options.cache, on.max_model_len, on.front)
    try:
        spec = device_spec(on.device)
    except UnknownDevice as error:
        raise ConfigError(f"--device: {error}") from None
    model = shape_of(on.shape)
    if model.num_kv_heads % on.degree:
        raise ConfigError(f"--degree {on.degree}: {model.name} has {model.num_kv_heads} KV heads")
    precision = WEIGHTS[one_of("--weights", on.weights, WEIGHTS)]._replace(
        kv_bytes=KV_BYTES[one_of("--kv", on.kv, KV_BYTES)]
    )
    if "max_num_seqs" not in options.chosen:
        most = options.scheduler.max_num_batched_tokens or spec.max_num_seqs
        plans = dataclasses.replace(options.scheduler, max_num_seqs=min(spec.max_num_seqs, most))
        options = dataclasses.replace(options, scheduler=plans)
    replica = Replica(model, spec, on.degree, precision)
    return options, roofline_machine(replica, options.cache, options.scheduler, on.max_model_len)


def _count(replicas: int) -> str:
    return f"{replicas} replicas of " if replicas > 1 else ""


def _settings(run: SimulatedRun, fleet: FleetFlags, load: LoadFlags) -> dict[str, Any]:
    """The settings for the report, without time and host, so that equal runs write equal files."""
    return {
        "machine": run.machine.name,
        "replicas": fleet.replicas,
        "prefill_replicas": fleet.prefill,
        "transfer": fleet.wire._asdict(),
        "routing": fleet.routing,
        "trace": load.trace and load.trace.name,
        "workload": list(load.workload) or None,
        "requests": load.requests,
        "resample": load.resample,
        "speedup": load.speedup,
        "max_tokens": load.max_tokens,
        "max_model_len": run.machine.max_model_len,
        "kv_tokens": run.machine.kv_tokens,
        "seed": load.seed,
        "acceptance": fleet.speculation and fleet.speculation.rates,
        "draft_cost": fleet.speculation and fleet.speculation.cost,
    }


class Trial:
    """An experiment that is run in virtual time, on each replica."""

    def __init__(self, body: dict[str, Any]) -> None:
        from headrace.wiring.dry_run import Trial

        self._trial = Trial(body)

    def steer(self, plans: SchedulerOptions, engine: Engine) -> Steering:
        """Starts the experiment on an engine.

        Raises:
            ConfigError: a field of the experiment is invalid.
        """
        from headrace.core.request import InvalidParameter

        try:
            return self._trial.steer(plans, engine)
        except InvalidParameter as error:
            raise ConfigError(f"--experiment: {error}") from None

    def reports(self) -> list[dict[str, Any]]:
        """The experiment of each replica, as the server reports it."""
        return [each.report() for each in self._trial.experiments]

    def lines(self, name: str) -> list[str]:
        """The results as lines."""
        return [
            f"experiment, {name}",
            *(line for each in self.reports() for line in describe(each)),
        ]


SHOWN_PARTS = 30
"""Maximum number of tenants in the table; the JSON has all of them."""

FULL_PERCENT = 5.0
"""Share of the time with all slots taken, above which they count as a limit."""

IDLE_PERCENT = 80.0
"""Use of the KV cache below which memory does not count as the limit."""

MOST_SLOTS = 4096
"""The largest value of ``--max-num-seqs``."""


def show_runs(runs: Sequence[SimulatedRun], title: str) -> None:
    """The runs side by side, then each one's classes and tenants."""
    from headrace.lab.bench.report import Run, table

    columns = []
    for run in runs:
        failures = {f"rejected: {reason}": count for reason, count in run.outcome.failures.items()}
        slots = {"max_num_seqs": run.scheduler.max_num_seqs}
        facts = {**slots, **run.outcome.facts, **failures}
        columns.append(Run(run.name, (), run.outcome.summary, facts))
    show(table(columns, title))
    for run in runs:
        for kind, parts in (("class", run.outcome.classes), ("tenant", run.outcome.tenants)):
            if len(parts) > 1:
                _show_parts(f"{run.name}: per {kind}", parts)
    for run in runs:
        if (text := hint(run)) is not None:
            show(text)


def hint(run: SimulatedRun) -> str | None:
    """Advice if ``--max-num-seqs``, not memory, limits the run; otherwise None."""
    facts, slots = run.outcome.facts, run.scheduler.max_num_seqs
    full, used = facts["slots_full_percent"], facts["kv_used_percent_peak"]
    if full < FULL_PERCENT or used > IDLE_PERCENT or slots == MOST_SLOTS:
        return None
    more = min(MOST_SLOTS, int(slots * IDLE_PERCENT / max(used, 1.0)))
    return (
        f"hint: {run.name}: all {slots} slots were taken during {full:.0f} % of the time while requests waited, and "
        f"at most {used:.0f} % of the KV cache was used. Slots are the limit, not memory: try --max-num-seqs {more}"
    )


def _show_parts(title: str, parts: Sequence[Part]) -> None:
    from rich.table import Table

    shown = Table(title=title, title_justify="left", header_style="bold")
    columns = ("", "requests", "failed", "output tokens", "TTFT p50 ms", "TTFT p99 ms")
    for column in (*columns, "TPOT p50 ms", "TPOT p99 ms", "within SLO"):
        shown.add_column(column, justify="right" if column else "left")
    for part in sorted(parts, key=lambda part: -part.requests)[:SHOWN_PARTS]:
        shown.add_row(
            part.name,
            f"{part.requests:,}",
            f"{part.failed:,}",
            f"{part.output_tokens:,}",
            *(f"{1e3 * value:.1f}" for each in (part.ttft, part.tpot) for value in (each.p50, each.p99)),
            "-" if part.attained is None else f"{100 * part.attained:.1f} %",
        )
    show(shown)


def write_runs(runs: Sequence[SimulatedRun], settings: Mapping[str, Any], path: Path) -> None:
    """Writes the runs as JSON: a single run as the document, several by name under ``runs``."""
    from headrace.lab.bench import report

    documents = {run.name: _document(run, settings) for run in runs}
    content = documents[runs[0].name] if len(runs) == 1 else {"settings": settings, "runs": documents}
    with writing("--output", path):
        report.write(path, report.plain(content))
    written(path)


def _document(run: SimulatedRun, settings: Mapping[str, Any]) -> dict[str, Any]:
    outcome = run.outcome
    return {
        "settings": {
            **settings,
            "cache": asdict(run.cache),
            "scheduler": asdict(run.scheduler),
        },
        "summary": asdict(outcome.summary),
        "facts": outcome.facts,
        "failures": outcome.failures,
        "classes": [asdict(part) for part in outcome.classes],
        "tenants": [asdict(part) for part in outcome.tenants],
        "timeline": outcome.timeline,
        "experiments": run.experiments,
    }


def plot_runs(runs: Sequence[SimulatedRun], folder: Path, title: str) -> None:
    """Writes the plots of all runs into a folder."""
    from headrace.lab.plots import plot_outcomes
    from headrace.plots import NoPlots

    try:
        with writing("--plot", folder), progress("plotting"):
            paths = plot_outcomes({run.name: run.outcome for run in runs}, folder, title)
    except NoPlots as missing:
        show(str(missing))
        return
    for path in paths:
        written(path)
