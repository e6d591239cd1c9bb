"""``headrace simulate``: the engine's own code in virtual time, over a trace or a synthetic workload.

Several policies are simulated one after the other over the same requests, and compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from headrace.cli.experiment import describe, read_experiment
from headrace.cli.machines import DraftFlags, FleetFlags, MachineFlags, make_machine, with_speculation
from headrace.cli.options import one_of, with_options
from headrace.cli.output import check_export, plotted, progress, show, write, written
from headrace.cli.output import export as write_rows
from headrace.cli.workloads import WORKLOAD, Export, SimulatedCallFlags, TargetFlags
from headrace.config import CacheOptions, ConfigError, Options, SchedulerOptions

if TYPE_CHECKING:
    from headrace.core.engine import Engine
    from headrace.lab.forced_acceptance import Speculation
    from headrace.lab.simulate.fleet import Steering, Wire
    from headrace.lab.simulate.tally import Outcome
    from headrace.wiring.simulation import Machine


COMPARED = ("scheduling_policy", "queue_order", "admission_policy", "victim_policy", "eviction_policy")
"""Options that may be repeated: each combination is simulated."""


@dataclass(frozen=True)
class Scenario:
    """All that is simulated, beside the options of the engine."""

    machine: MachineFlags
    fleet: FleetFlags
    load: SimulatedCallFlags
    drafts: DraftFlags
    targets: TargetFlags
    experiment: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Run an experiment, as headrace experiment start does on a server, in virtual time (default: none).",
            rich_help_panel=WORKLOAD,
        ),
    ] = None

    @property
    def wire(self) -> Wire:
        """The connection between prefill and decode replicas."""
        return self.fleet.transfer.wire(1 if self.machine.calibration else self.machine.degree)

    def name(self, policy: str, prefill: int, *, alone: bool) -> str:
        """The name of a run with prefill and decode replicas."""
        replicas = self.fleet.replicas
        if self.fleet.pools() == (0,):
            return policy
        pools = f"{prefill} prefill, {replicas - prefill} decode" if prefill else f"{replicas} for both"
        return pools if alone else f"{policy}, {pools}"

    def settings(self, machine: Machine, speculation: Speculation | None) -> dict[str, Any]:
        """The settings for the report, without time and host, so that equal runs write equal files."""
        fleet, load = self.fleet, self.load
        return {
            "machine": machine.name,
            "replicas": fleet.replicas,
            "prefill_replicas": fleet.pools(),
            "transfer": self.wire._asdict(),
            "routing": fleet.routing,
            "trace": load.trace and load.trace.name,
            "workload": load.workload,
            "requests": load.requests,
            "resample": load.resample,
            "speedup": load.speedup,
            "max_tokens": load.max_tokens,
            "max_model_len": machine.max_model_len,
            "kv_tokens": machine.kv_tokens,
            "seed": load.seed,
            "acceptance": speculation and speculation.rates,
            "draft_cost": speculation and speculation.cost,
        }


@with_options(CacheOptions, SchedulerOptions, several=COMPARED)
def simulate(
    given: Sequence[Options],
    scenario: Scenario,
    plot: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder for plots (default: none).")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False, writable=True, metavar="FILE", help="JSON file of the results (default: none)."
        ),
    ] = None,
    export: Export = None,
) -> None:
    """Simulate an engine, or several behind a router, without the device.

    With several --scheduling-policy, --queue-order or --prefill-replicas, each is compared with the first one.
    """
    check_export(export)
    speculation = scenario.drafts.speculation()
    runs, rows, reports = _runs(given, scenario, speculation, with_rows=export is not None)
    replicas = scenario.fleet.replicas
    several = f"{replicas} replicas of " if replicas > 1 else ""
    title = f"{several}{runs[0].machine.name}, {scenario.load.describe()}"
    show_runs(runs, title)
    if reports:
        print("\n".join(reports))
    if output is not None:
        write_runs(runs, scenario.settings(runs[0].machine, speculation), output)
    if plot is not None:
        _plot(runs, plot, title)
    write_rows(export, rows)


class SimulatedRun(NamedTuple):
    """One simulated set of options with its results."""

    name: str
    scheduler: SchedulerOptions
    cache: CacheOptions
    machine: Machine
    outcome: Outcome
    experiments: Sequence[dict[str, Any]] = ()


def _runs(
    given: Sequence[Options], scenario: Scenario, speculation: Speculation | None, *, with_rows: bool
) -> tuple[list[SimulatedRun], list[dict[str, Any]], list[str]]:
    """All runs, a row for each of their requests, and the lines of the experiment."""
    body = None if scenario.experiment is None else read_experiment(scenario.experiment)
    runs, rows, reports = [], [], []
    for (policy, options), prefill in product(zip(_names(given), given, strict=True), scenario.fleet.pools()):
        trial = None if body is None else Trial(body)
        name = scenario.name(policy, prefill, alone=len(given) == 1)
        run, its_rows = _simulate(name, options, scenario, prefill, speculation, trial, with_rows=with_rows)
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
    scenario: Scenario,
    prefill: int,
    speculation: Speculation | None,
    trial: Trial | None,
    *,
    with_rows: bool,
) -> tuple[SimulatedRun, list[dict[str, Any]]]:
    from headrace.core.request import Slo
    from headrace.core.tenancy.gate import Limits
    from headrace.lab.simulate.runner import from_calls
    from headrace.lab.simulate.tally import outcome
    from headrace.lab.workload.work import Synthesis
    from headrace.wiring.simulation import ROUTINGS, make_fleet

    flags, load, slo = scenario.fleet, scenario.load, scenario.targets.slo
    calls = load.calls()
    plans = with_speculation(options.scheduler, speculation)
    options, machine = make_machine(scenario.machine, dataclasses.replace(options, scheduler=plans))
    fleet = make_fleet(
        options.scheduler,
        options.cache,
        machine,
        replicas=flags.replicas,
        prefill=prefill,
        wire=scenario.wire,
        routing=one_of("--routing", flags.routing, tuple(ROUTINGS)),
        limits=Limits(flags.max_num_queued_reqs or 1 << 62, flags.max_num_queued_tokens or 1 << 62),
        with_rows=with_rows,
        speculation=speculation,
        steer=None if trial is None else partial(trial.steer, options.scheduler),
    )
    wanted = Slo(slo.get("ttft"), slo.get("tpot"))
    with progress(f"simulating {name}", load.requests) as meter:
        fleet.run(from_calls(meter.count(calls), Synthesis(seed=load.seed), load.max_tokens, wanted))
    result = outcome(fleet.tally, slo, [replica.runner.busy_seconds for replica in fleet.replicas])
    rows = [{"run": name, "round": 1, **row} for row in fleet.tally.rows]
    reports = () if trial is None else trial.reports()
    return SimulatedRun(name, options.scheduler, options.cache, machine, result, reports), rows


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


FULL_PERCENT = 5.0
"""Share of the time with all slots taken, above which they count as a limit."""

IDLE_PERCENT = 80.0
"""Use of the KV cache below which memory does not count as the limit."""

MOST_SLOTS = 4096
"""The largest value of ``--max-num-seqs``."""


def show_runs(runs: Sequence[SimulatedRun], title: str) -> None:
    """The runs side by side, then each one's classes and tenants."""
    from headrace.lab.bench.report import MOST_GROUPS, Run, group_table, table

    columns = []
    for run in runs:
        failures = {f"rejected: {reason}": count for reason, count in run.outcome.failures.items()}
        slots = {"max_num_seqs": run.scheduler.max_num_seqs}
        facts = {**slots, **run.outcome.facts, **failures}
        columns.append(Run(run.name, (), run.outcome.summary, facts))
    show(table(columns, title))
    for run in runs:
        for kind, groups in (("class", run.outcome.classes), ("tenant", run.outcome.tenants)):
            if len(groups) > 1:
                largest = sorted(groups, key=lambda group: -group.requests)[:MOST_GROUPS]
                show(group_table(f"{run.name}: per {kind}", largest))
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


def write_runs(runs: Sequence[SimulatedRun], settings: Mapping[str, Any], path: Path) -> None:
    """Writes the runs as JSON: a single run as the document, several by name under ``runs``."""
    from headrace.lab.bench import report

    documents = {run.name: _document(run, settings) for run in runs}
    content = documents[runs[0].name] if len(runs) == 1 else {"settings": settings, "runs": documents}
    write(path, report.plain(content))
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


def _plot(runs: Sequence[SimulatedRun], folder: Path, title: str) -> None:
    from headrace.lab.plots import plot_outcomes

    outcomes = {run.name: run.outcome for run in runs}
    for path in plotted("--plot", folder, lambda: plot_outcomes(outcomes, folder, title)):
        written(path)
