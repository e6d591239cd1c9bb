"""One race: start the contenders, compare their outputs, and run them in alternating rounds on one workload."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.peers import install
from benchmarks.peers.contenders import COMPUTED, CONTENDERS, IN_PROCESS, MEANING, Contender, Demand
from benchmarks.peers.figures import FIGURES, Figure, ReplicaLoad, standings
from benchmarks.peers.install import NotReady
from benchmarks.peers.places import Places
from benchmarks.peers.quiet import FOREIGN, Watched, undisturbed
from benchmarks.peers.server import StoppedServer, first_tokens, start
from benchmarks.peers.shapes import SHAPES
from benchmarks.peers.weights import write_folder
from benchmarks.peers.workloads import Workload, workload
from benchmarks.stage import free_port, say
from headrace.lab import plots
from headrace.lab.bench import report
from headrace.lab.bench.report import Comparison, Run, compare
from headrace.lab.bench.stats import Target
from headrace.lab.workload.work import Work
from headrace.plots import load_pyplot

PROBE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Race:
    """The settings of a race: model shape, precision, workload, contenders, and number of cores."""

    model: str
    precision: str
    workload: Workload
    contenders: Sequence[str]
    rounds: int
    cores: int
    places: Places

    @property
    def title(self) -> str:
        """One line for table, picture and report."""
        load = self.workload
        at = f"{load.name}, {load.requests} requests, {load.concurrency} at once"
        return f"{self.model} {self.precision}: {at}; {self.cores} cores, {self.rounds} rounds"


def run(race: Race, output: Path) -> int:
    """Runs the race, prints its table, writes ``output`` and a picture beside it; returns how many requests failed.

    Raises:
        NotReady: a contender or Headrace's kernels are missing, or the report cannot be written.
        NoPlots: matplotlib is missing.
    """
    check(output)
    kernels = install.kernels(race.contenders)
    # The client and every server, which inherit it, share these cores.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: race.cores])
    shape = SHAPES[race.model]
    versions = {name: install.version(race.places, name) for name in race.contenders}
    folder = write_folder(shape, race.places.model(race.model))
    for name in race.contenders:
        say(f"{name}: {versions[name]}; {MEANING[race.precision][name]}")
    if kernels:
        say(f"headrace: kernels {kernels}")
    demand = Demand(
        race.workload.concurrency,
        race.workload.longest,
        race.cores,
        shape.kv_token_bytes,
        race.workload.shares_prefix,
    )
    with ExitStack() as stack:
        servers = [
            stack.enter_context(closing(_target(name, race, folder, demand))) for name in race.contenders
        ]
        agreement = _agreement(servers)
        targets = [
            Watched(each, each.pids) if isinstance(each, StoppedServer) else Watched(each) for each in servers
        ]
        for target in targets:
            target.run(_warming(race.workload))
        result = compare(targets, race.workload.draw, race.rounds, finished=_told)
    figures = FIGURES[race.workload.name]
    quiet = undisturbed(result.rounds)
    say(
        f"{len(quiet)} of {race.rounds} rounds were undisturbed"
        + ("" if quiet else ": all count, and none well")
    )
    rows = standings(quiet or result.rounds, figures)
    say(table(rows, figures, f"{race.title}; kernels of headrace: {kernels}" if kernels else race.title))
    _publish(race, result, rows, output, {"versions": versions, "kernels": kernels, "agreement": agreement})
    return sum(run.summary.failed for runs in result.rounds for run in runs)


def check(output: Path) -> None:
    """Find out before the measurement whether the report and its picture can be written.

    Raises:
        NoPlots: matplotlib is missing.
        NotReady: ``output`` cannot be written.
    """
    load_pyplot()
    if output.is_dir():
        raise NotReady(f"--output {output}: it is a folder")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output.parent):
            pass
    except OSError as error:
        raise NotReady(f"--output {output}: {error.strerror}") from None


def table(rows: Sequence[ReplicaLoad], figures: Sequence[Figure], title: str) -> Table:
    """Medians over rounds, and in brackets the ratio to the first contender."""
    shown = Table(title=title, title_justify="left", header_style="bold")
    shown.add_column("")
    for figure in figures:
        shown.add_column(figure.title, justify="right")
    for i, row in enumerate(rows):
        cells = [
            f"{row.values[figure.title]:,.1f}" + (f" ({row.ratios[figure.title]:.2f}x)" if i else "")
            for figure in figures
        ]
        shown.add_row(row.name + (f" ({row.failed} failed)" if row.failed else ""), *cells)
    return shown


def _target(name: str, race: Race, folder: Path, demand: Demand) -> Target:
    if name == IN_PROCESS:
        import torch

        from headrace.lab.bench.static_batching import TransformersStatic

        torch.set_num_threads(demand.threads)
        return TransformersStatic(name, str(folder), demand.rows, dtype=COMPUTED, closed=True)
    contender: Contender = CONTENDERS[name]
    model = contender.prepare(race.places, folder, race.precision)
    port = free_port()
    command = contender.command(race.places, model, port, demand, race.precision)
    environment = {**os.environ, "OMP_NUM_THREADS": str(demand.threads), "HF_HUB_OFFLINE": "1"}
    environment |= contender.environment(demand)
    return start(name, command, port, contender.ready, demand.rows, environment, contender.extra)


def _agreement(targets: Sequence[Target]) -> dict[str, int]:
    """The number of leading greedy tokens that each server has in common with the first; the weights are equal."""
    probe = Work("probe", tuple(range(300, 332)), PROBE_TOKENS, ignore_eos=True)
    told: dict[str, list[int]] = {}
    for target in targets:
        if isinstance(target, StoppedServer):
            with target.turn():
                told[target.name] = first_tokens(target.endpoint, probe)
    base = next(iter(told.values()), [])
    agreement = {
        name: next((i for i, (a, b) in enumerate(zip(tokens, base, strict=False)) if a != b), len(tokens))
        for name, tokens in told.items()
    }
    if len(agreement) > 1:
        say(f"first greedy tokens in common, of {PROBE_TOKENS}: {agreement}")
    return agreement


def _warming(load: Workload) -> list[Work]:
    """Short warm-up requests, so that connections and compiled kernels are not measured."""
    short = workload("decode", load.concurrency).draw(-1)
    return [Work(f"warm{i}", each.prompt, 8, ignore_eos=True) for i, each in enumerate(short)]


def _told(number: int, run: Run) -> None:
    speed = f"{run.summary.output_tokens_per_second:.1f} output tok/s in {run.summary.seconds:.1f} s"
    others = f"others took {run.facts[FOREIGN]:.0f} %"
    say(f"round {number + 1}, {run.target}: {speed}, {run.summary.failed} failed, {others}")
    for record in [record for record in run.records if record.error][:2]:
        say(f"failed: {record.id}: {record.error}")


def _publish(
    race: Race, result: Comparison, rows: Sequence[ReplicaLoad], output: Path, more: dict[str, Any]
) -> None:
    settings = {
        "model": race.model,
        "precision": race.precision,
        "meaning": {name: MEANING[race.precision][name] for name in race.contenders},
        "workload": asdict(race.workload),
        "rounds": race.rounds,
        "cores": race.cores,
    }
    told = {
        **more,
        "standings": [asdict(row) for row in rows],
        "undisturbed": len(undisturbed(result.rounds)),
        "ratios": result.ratios,
    }
    every = [run for runs in result.rounds for run in runs]
    report.write(output, report.document(every, settings, told))
    plots.plot(result.middle(), output.with_suffix(".png"), race.title)
    say(f"written: {output}")
