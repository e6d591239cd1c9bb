"""``headrace bench``: builds what is to be measured and lets `headrace.lab.bench` measure it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.bench_targets import (
    check_lengths,
    make_server_target,
    make_target,
    read_spec,
    side_by_side,
    target_rows,
    time_batch,
)
from headrace.cli.calibrate import calibrate
from headrace.cli.options import with_options
from headrace.cli.output import writing
from headrace.cli.roofline import roofline
from headrace.config import CacheOptions, ConfigError, ModelOptions, Options, SchedulerOptions

if TYPE_CHECKING:
    from headrace.lab.bench.record import Target
    from headrace.lab.bench.report import Run
    from headrace.lab.workload import Work
    from headrace.lab.workload.dataset import Dataset

bench_app = typer.Typer(help="Measure engines and servers.", no_args_is_help=True)
bench_app.command()(calibrate)
bench_app.command()(roofline)

PANEL = "Workload options"

DatasetName = Annotated[
    str,
    typer.Option(
        help="high-variance, high-variance-chats, fixed, log-normal, shared-prefix, jsonl or trace.",
        rich_help_panel=PANEL,
    ),
]
DatasetPath = Annotated[str | None, typer.Option(help="File of jsonl or trace.", rich_help_panel=PANEL)]
NumPrompts = Annotated[int, typer.Option(min=1, help="Requests.", rich_help_panel=PANEL)]
InputLen = Annotated[int, typer.Option(min=1, help="Prompt tokens.", rich_help_panel=PANEL)]
OutputLen = Annotated[int, typer.Option(min=1, help="Answer tokens.", rich_help_panel=PANEL)]
PrefixLen = Annotated[int, typer.Option(min=1, help="Tokens that prompts share.", rich_help_panel=PANEL)]
WorkloadSeed = Annotated[int, typer.Option(help="What the workload is drawn from.", rich_help_panel=PANEL)]
RequestRate = Annotated[
    float, typer.Option(help="Requests per second, Poisson; inf: all at once.", rich_help_panel=PANEL)
]
Burstiness = Annotated[
    float, typer.Option(min=0.01, help="Below 1: burstier than Poisson.", rich_help_panel=PANEL)
]
Goodput = Annotated[
    list[str] | None,
    typer.Option(help="A bound in seconds that good requests meet: ttft:1.0, tpot:0.1, itl:…, e2e:…"),
]
Output = Annotated[
    Path | None, typer.Option(help="JSON file, with a PNG beside it [default: bench-results/…]")
]
Warmup = Annotated[int, typer.Option(min=0, help="Requests run beforehand, not measured.")]


@bench_app.command()
@with_options(ModelOptions, CacheOptions, SchedulerOptions)
def throughput(
    given: Options,
    backend: Annotated[
        str, typer.Option(help="headrace, headrace-static or transformers-static.")
    ] = "headrace",
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of transformers-static.")] = 16,
    dataset_name: DatasetName = "high-variance",
    dataset_path: DatasetPath = None,
    num_prompts: NumPrompts = 300,
    input_len: InputLen = 24,
    output_len: OutputLen = 128,
    prefix_len: PrefixLen = 1000,
    workload_seed: WorkloadSeed = 0,
    warmup: Warmup = 4,
    goodput: Goodput = None,
    output: Output = None,
) -> None:
    """Offline: all requests at once, as fast as it goes."""
    from headrace.lab.bench.measure import measure
    from headrace.lab.workload.dataset import Dataset

    dataset = Dataset(
        dataset_name, dataset_path, num_prompts, input_len, output_len, prefix_len, workload_seed
    )
    work, slo = _draw(dataset), _slo(goodput)
    text = f"{backend},batch_size={batch_size}" if backend == "transformers-static" else backend
    spec = read_spec(text)
    target = make_target(spec, given)
    try:
        _warm([target], work[:warmup])
        run = measure(target, work, slo)
    finally:
        target.close()
    settings = {"dataset": dataset, "warmup": warmup, "options": _parts(given)}
    _tell("throughput", [run], output, settings, _bound(run, target_rows(spec, given)))
    _refuse_failures([run])


@bench_app.command()
@with_options(ModelOptions, CacheOptions, SchedulerOptions)
def latency(
    given: Options,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests that run as one batch.")] = 8,
    input_len: InputLen = 32,
    output_len: OutputLen = 128,
    workload_seed: WorkloadSeed = 0,
    output: Output = None,
) -> None:
    """One batch of a fixed shape: where the time of a step goes, and what it costs outside the forward."""
    from headrace.build.model import load
    from headrace.core.request import Request, SamplingParams
    from headrace.lab.bench import report
    from headrace.lab.bench.latency import Stopwatch, latency_table
    from headrace.lab.workload.dataset import Dataset

    loaded = load(dataclasses.replace(given, scheduler=side_by_side(given.scheduler, batch_size)))
    check_lengths(input_len, output_len, loaded.ledger.max_model_len)
    engine, runner = loaded.engine, loaded.runner
    engine.runner = stopwatch = Stopwatch(runner)
    for seed in (workload_seed + 1, workload_seed):  # the first batch warms up
        dataset = Dataset("fixed", None, batch_size, input_len, output_len, seed=seed)
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        requests = [Request(f"{seed}-{w.id}", _tokens(w), params) for w in _draw(dataset)]
        times = time_batch(engine, stopwatch, lambda: runner.seconds, requests)
    title = f"{given.model.model}: batch of {batch_size}, {input_len} + {output_len} tokens"
    _print(latency_table(times, title))
    settings = {"dataset": dataset, "options": _parts(given)}
    path = _path(output, "latency")
    _write(path, report.document([], _values(settings), {"steps": _values(times)}))
    _print(f"written: {path}")


@bench_app.command()
def serve(
    base_url: Annotated[str, typer.Option(help="Any OpenAI-compatible server.")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="Model name [default: the server's first].")] = "",
    api_key: Annotated[str, typer.Option(help="Sent as bearer token.")] = "",
    extra_body: Annotated[str, typer.Option(help="JSON object added to every body.")] = "{}",
    dataset_name: DatasetName = "high-variance",
    dataset_path: DatasetPath = None,
    num_prompts: NumPrompts = 300,
    input_len: InputLen = 24,
    output_len: OutputLen = 128,
    prefix_len: PrefixLen = 1000,
    workload_seed: WorkloadSeed = 0,
    request_rate: RequestRate = math.inf,
    burstiness: Burstiness = 1.0,
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests open at once: a closed loop.")
    ] = None,
    warmup: Warmup = 4,
    goodput: Goodput = None,
    output: Output = None,
) -> None:
    """Load a server over HTTP: an open loop at a rate, or a closed loop of a concurrency."""
    from headrace.lab.bench.measure import measure
    from headrace.lab.workload.dataset import Dataset

    dataset = Dataset(
        *(dataset_name, dataset_path, num_prompts, input_len, output_len, prefix_len, workload_seed),
        *(request_rate, burstiness),
    )
    work, slo = _draw(dataset), _slo(goodput)
    target = make_server_target("server", base_url, model, api_key, extra_body, max_concurrency)
    _warm([target], work[:warmup])
    run = measure(target, work, slo)
    settings = {"dataset": dataset, "warmup": warmup, "base_url": base_url, "concurrency": max_concurrency}
    _tell("serve", [run], output, settings)
    _refuse_failures([run])


@bench_app.command()
@with_options(ModelOptions, CacheOptions, SchedulerOptions)
def compare(
    given: Options,
    target: Annotated[
        list[str],
        typer.Option(
            help="[NAME=]KIND[,OPTION=VALUE…]; KIND is headrace, headrace-static, transformers-static or a "
            "URL. Give two or more; ratios are to the first."
        ),
    ],
    rounds: Annotated[int, typer.Option(min=1, help="Alternating rounds.")] = 3,
    dataset_name: DatasetName = "high-variance",
    dataset_path: DatasetPath = None,
    num_prompts: NumPrompts = 300,
    input_len: InputLen = 24,
    output_len: OutputLen = 128,
    prefix_len: PrefixLen = 1000,
    workload_seed: WorkloadSeed = 0,
    request_rate: RequestRate = math.inf,
    burstiness: Burstiness = 1.0,
    warmup: Warmup = 4,
    goodput: Goodput = None,
    output: Output = None,
) -> None:
    """Two or more targets on one workload in alternating rounds, each with its own draw: medians and ratios."""
    from headrace.lab.bench import measure
    from headrace.lab.workload.dataset import Dataset

    dataset = Dataset(
        *(dataset_name, dataset_path, num_prompts, input_len, output_len, prefix_len, workload_seed),
        *(request_rate, burstiness),
    )
    slo = _slo(goodput)

    def drawn(number: int) -> Sequence[Work]:
        """The round's own work: a server that keeps prefixes knows the prompts of the round before."""
        return _draw(dataclasses.replace(dataset, seed=workload_seed + number))

    warming = drawn(rounds)[:warmup]  # of a round that is not, so that each is new to all
    specs = [read_spec(text) for text in target]
    if len({spec.name for spec in specs}) < max(2, len(specs)):
        raise ConfigError("compare needs two or more targets of different names")
    targets: list[Target] = []
    try:
        targets += [make_target(spec, given) for spec in specs]
        _warm(targets, warming)
        result = measure.compare(targets, drawn, rounds, slo, _told)
    finally:
        for each in targets:
            each.close()
    settings = {
        "dataset": dataset,
        "warmup": warmup,
        "targets": target,
        "rounds": rounds,
        "options": _parts(given),
    }
    # What waits for the slowest of a batch is a static target.
    batch = next((target_rows(spec, given) for spec in specs if "static" in spec.kind), None)
    more = {"ratios": result.ratios, **_bound(result.rounds[0][0], batch)}
    every = [run for runs in result.rounds for run in runs]
    _tell("compare", result.middle(), output, settings, more, every)
    for name, ratios in result.ratios.items():
        shown = ", ".join(f"{figure} {ratio:.3f}" for figure, ratio in ratios.items() if ratio == ratio)
        _print(f"{name} to {targets[0].name}, medians of {rounds} rounds: {shown}")
    _refuse_failures(every)


def _draw(dataset: Dataset) -> Sequence[Work]:
    from headrace.lab.workload.dataset import BadDataset
    from headrace.lab.workload.files import BadLine

    if not dataset.rate > 0:
        raise ConfigError(f"--request-rate {dataset.rate}: expected a number above 0")
    if dataset.burstiness == math.inf:  # no gaps could be drawn
        raise ConfigError("--burstiness inf: expected a finite number")
    try:
        work: Sequence[Work] = dataset.draw()
    except (BadDataset, BadLine, OSError) as error:
        raise ConfigError(str(error)) from None
    return work


def _tokens(work: Work) -> tuple[int, ...]:
    return work.prompt  # type: ignore[return-value]


def _slo(goodput: Sequence[str] | None) -> dict[str, float]:
    from headrace.lab.bench.stats import SLO_NAMES

    slo = {}
    for bound in (part for text in goodput or () for part in text.split()):
        name, colon, seconds = bound.partition(":")
        try:
            slo[name] = float(seconds)
        except ValueError:
            colon = ""
        if not colon or name not in SLO_NAMES or not slo[name] > 0:
            names = ", ".join(SLO_NAMES)
            raise ConfigError(f"--goodput {bound}: expected NAME:SECONDS, NAME of {names}, SECONDS above 0")
    return slo


def _warm(targets: Sequence[Target], work: Sequence[Work]) -> None:
    """Runs a little work unmeasured: first uses, connections and compiled kernels are not the subject."""
    at_once = [dataclasses.replace(each, arrival=0.0) for each in work]
    for target in targets if at_once else ():
        target.run(at_once)


def _bound(run: Run, batch: int | None) -> dict[str, dict[str, float]]:
    """What refilling a batch could gain on the answer lengths that were seen, in steps (see `lab.workload.bound`);
    nothing where no batch is known."""
    from headrace.lab.workload.bound import bound

    lengths = [record.output_tokens for record in run.records if record.output_tokens]
    if not lengths or not batch:
        return {}
    limits = bound(lengths, batch)
    told = {"batch": batch, **dataclasses.asdict(limits), "gain": limits.gain, "most": limits.most}
    return {"bound": told}


def _refuse_failures(runs: Sequence[Run]) -> None:
    """Ends the command with 1 where a request failed, after all has been told."""
    if any(run.summary.failed for run in runs):
        raise typer.Exit(1)


def _told(number: int, run: Run) -> None:
    speed = f"{run.summary.output_tokens_per_second:.1f} output tok/s"
    _print(f"round {number + 1}, {run.target}: {speed}, {run.summary.failed} failed")


def _tell(
    command: str,
    shown: Sequence[Run],
    output: Path | None,
    settings: Mapping[str, Any],
    more: Mapping[str, Any] | None = None,
    every: Sequence[Run] | None = None,
) -> None:
    """Prints a table of the runs ``shown`` and writes ``every`` run as JSON, and the plot beside it."""
    from headrace.lab.bench import plot, report

    _print(report.table(shown, f"bench {command}"))
    for each in (table for run in shown for table in report.group_tables(run)):
        _print(each)
    failed = [record for run in shown for record in run.records if record.error]
    for record in failed[:3]:
        _print(f"failed: {record.id}: {record.error}")
    path = _path(output, command)
    _write(path, report.document(every or shown, _values(settings), more))
    _print(f"written: {path}")
    try:
        plot.plot(shown, path.with_suffix(".png"), f"headrace bench {command}")
    except plot.NoPlots as missing:
        _print(str(missing))


def _write(path: Path, told: Mapping[str, Any]) -> None:
    from headrace.lab.bench import report

    with writing("--output", path):
        report.write(path, told)


def _path(output: Path | None, command: str) -> Path:
    return output or Path("bench-results") / f"{command}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"


def _parts(given: Options) -> dict[str, Any]:
    """The options that a measurement depends on; the server's, with its keys, are no part of a report."""
    return {"model": given.model, "cache": given.cache, "scheduler": given.scheduler}


def _values(value: Any) -> Any:
    """Dataclasses within ``value`` as dictionaries."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {key: _values(inner) for key, inner in value.items()}
    return [_values(inner) for inner in value] if isinstance(value, list) else value


def _print(what: Any) -> None:
    from rich.console import Console

    Console().print(what, highlight=False, soft_wrap=True)
