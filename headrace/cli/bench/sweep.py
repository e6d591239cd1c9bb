"""``headrace bench sweep``: throughput, latency and memory over batch size, concurrency and chunk size."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.bench import place as where
from headrace.cli.flags import (
    DatasetName,
    DatasetPath,
    InputLen,
    OutputLen,
    PrefixLen,
    WorkloadSeed,
    draw,
)
from headrace.cli.options import duration, one_of, with_options
from headrace.cli.output import measured_options, plain, progress, report_path, show, write, writing, written
from headrace.config import CacheOptions, ConfigError, ModelOptions, Options, SchedulerOptions

if TYPE_CHECKING:
    from headrace.lab.bench.report import Run
    from headrace.lab.tuning.sweep import Axis, Point, Trial
    from headrace.lab.workload.dataset import Dataset
    from headrace.lab.workload.work import Work
    from headrace.wiring.evaluator import Evaluator

AXES = ("batch-size", "concurrency", "chunk-size")
POLICIES = ("continuous", "static")

_FIVE_MINUTES: Any = "5m"  # typer parses it

Budget = Annotated[
    float,
    typer.Option(parser=duration, metavar="DURATION", help="Time after which no further trial begins."),
]


@with_options(ModelOptions, CacheOptions, SchedulerOptions)
def sweep(
    given: Options,
    axis: Annotated[
        list[str],
        typer.Option(help="What to vary: batch-size, concurrency or chunk-size. Repeatable."),
    ] = list(AXES),  # noqa: B006
    policy: Annotated[
        list[str],
        typer.Option(help="Batching to measure: continuous or static. Repeatable."),
    ] = list(POLICIES),  # noqa: B006
    batch_size: Annotated[
        list[int], typer.Option(min=1, max=4096, help="Slots of the engine (max-num-seqs). Repeatable.")
    ] = [1, 2, 4, 8, 16, 32, 64],  # noqa: B006
    concurrency: Annotated[
        list[int], typer.Option(min=1, help="Open requests of a closed loop. Repeatable.")
    ] = [1, 4, 16, 64, 128],  # noqa: B006
    chunk_size: Annotated[
        list[int], typer.Option(min=1, help="Tokens of a step (max-num-batched-tokens). Repeatable.")
    ] = [64, 128, 256, 512, 1024],  # noqa: B006
    simulated_device: where.SimulatedDevice = "",
    calibration: where.Calibration = None,
    degree: where.Degree = 1,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Rounds over all values (default: 3, and 1 of a simulated device)."),
    ] = None,
    budget: Budget = _FIVE_MINUTES,
    dataset_name: DatasetName = "log-normal",
    dataset_path: DatasetPath = None,
    input_len: InputLen = 64,
    output_len: OutputLen = 32,
    prefix_len: PrefixLen = 1000,
    workload_seed: WorkloadSeed = 0,
    output: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            writable=True,
            metavar="FILE",
            help="JSON file of the report; a CSV and a PNG are written beside it (default: in bench-results/).",
        ),
    ] = None,
) -> None:
    """Find the best batch size, concurrency and chunk size: throughput, latency and memory at each value.

    The chunk size is varied without --mixed-prefill-ratio and --max-step-seconds, which would bound chunks below it.
    """
    from headrace.lab.tuning.sweep import Axis
    from headrace.lab.workload.dataset import Dataset

    wanted = dict(zip(AXES, (batch_size, concurrency, chunk_size), strict=True))
    values = {Axis(one_of("--axis", each, AXES)): wanted[each] for each in axis}
    policies = [one_of("--policy", each, POLICIES) for each in dict.fromkeys(policy)]
    dataset = Dataset(dataset_name, dataset_path, 1, input_len, output_len, prefix_len, workload_seed)
    place = where.Place(simulated_device, calibration, degree)
    times = rounds or (1 if place.simulated else 3)
    _sweep(given, place, values, policies, dataset, times, budget, report_path(output, "sweep"))


def _sweep(
    given: Options,
    place: where.Place,
    values: Mapping[Axis, Sequence[int]],
    policies: Sequence[str],
    dataset: Dataset,
    rounds: int,
    budget: float,
    path: Path,
) -> None:
    from headrace.lab.tuning.sweep import Axis, plan, requests_of

    trials, slots = plan(values, policies), given.scheduler.max_num_seqs
    dataset = replace(dataset, count=max(requests_of(each, slots) for each in trials))
    work = [replace(each, arrival=0.0) for each in draw(dataset)]
    check_prompts(work)
    most = max([slots, *values.get(Axis.BATCH, ())])
    evaluator = where.open_evaluator(given, place, most, most_tokens(given, values.get(Axis.CHUNK)))
    try:
        check_trials(evaluator, given, trials)
        points = _measure(evaluator, given, trials, work, rounds, budget)
    finally:
        evaluator.close()
    settings = {
        "engine": evaluator.name,
        "dataset": dataset,
        "rounds": rounds,
        "budget": budget,
        "options": measured_options(given),
    }
    _tell(evaluator.name, dataset, points, settings, path)
    _warn(points, len(trials), budget)


def _warn(points: Sequence[Point], trials: int, budget: float) -> None:
    """Reports trials that were not run.

    Raises:
        ConfigError: requests failed.
    """
    if left := trials - len(points):
        show(f"{left} of {trials} trials were not run: --budget {budget:g} s was spent.")
    if failed := sum(each.failed for each in points):
        raise ConfigError(
            f"{failed} requests failed, so their points are not reliable: use shorter prompts and outputs "
            "(--input-len, --output-len), or a larger KV cache"
        )


def check_prompts(work: Sequence[Work]) -> None:
    """Raises `ConfigError` unless prompts are token ids."""
    if any(not isinstance(each.prompt, tuple) or not isinstance(each.prompt[0], int) for each in work):
        raise ConfigError(
            "--dataset-name: a sweep needs a workload of token ids, such as log-normal or trace"
        )


def most_tokens(given: Options, chunks: Sequence[int] | None) -> int | None:
    """The maximum tokens of a step in the trials; None for the default."""
    own = given.scheduler.max_num_batched_tokens
    return max([*(chunks or ()), own or max(1024, given.scheduler.max_num_seqs)]) if chunks or own else None


def plans_of(trial: Trial, plans: SchedulerOptions) -> SchedulerOptions:
    """The scheduler options of a trial."""
    from headrace.lab.tuning.sweep import Axis

    if trial.policy == "static":
        plans = replace(plans, scheduling_policy="static")
    if trial.axis is Axis.BATCH:
        return replace(plans, max_num_seqs=trial.value)
    if trial.axis is Axis.CHUNK:
        return replace(
            plans, max_num_batched_tokens=trial.value, mixed_prefill_ratio=0.0, max_step_seconds=0.0
        )
    return plans


def check_trials(evaluator: Evaluator, given: Options, trials: Sequence[Trial]) -> None:
    """Raises `ConfigError` if a value conflicts with the other options."""
    for trial in trials:
        try:
            evaluator.tokens(plans_of(trial, given.scheduler))
        except ConfigError as error:
            raise ConfigError(f"--{trial.axis} {trial.value}: {error}") from None


def _measure(
    evaluator: Evaluator,
    given: Options,
    trials: Sequence[Trial],
    work: Sequence[Work],
    rounds: int,
    budget: float,
) -> list[Point]:
    from headrace.lab.tuning.sweep import Axis, ideal, lengths, point, requests_of, tokens_per_second
    from headrace.lab.tuning.sweep import sweep as run_trials

    slots = given.scheduler.max_num_seqs
    with progress("sweep", rounds * len(trials)) as meter:

        def run(trial: Trial) -> Run:
            meter.text = f"{trial.axis.words} {trial.value}, {trial.policy}"
            open_ = trial.value if trial.axis is Axis.CONCURRENCY else None
            plans = plans_of(trial, given.scheduler)
            done = evaluator.run(plans, work[: requests_of(trial, slots)], concurrency=open_)
            meter.done += 1
            return done

        runs = run_trials(trials, run, rounds, budget, time.perf_counter)
    shape, replica = lengths(work), None if evaluator.replica is None else ideal(evaluator.replica)
    points = []
    for trial, each in runs.items():
        plans = plans_of(trial, given.scheduler)
        rows = min(trial.value, slots) if trial.axis is Axis.CONCURRENCY else plans.max_num_seqs
        bound = None if replica is None else tokens_per_second(replica, shape, rows, evaluator.tokens(plans))
        points.append(point(trial, each, evaluator.sizes(plans), bound))
    return points


def _tell(name: str, dataset: Any, points: Sequence[Point], settings: Mapping[str, Any], path: Path) -> None:
    from headrace.lab.bench import report as bench_report
    from headrace.lab.tuning import sweep_report as report
    from headrace.lab.tuning.sweep_report import plot
    from headrace.plots import NoPlots

    title = f"{name}; {dataset.name}, {dataset.input_len} + {dataset.output_len} tokens"
    show(*report.tables(points, title), *report.sentences(points))
    write(path, bench_report.document([], plain(settings), {"sweep": report.document(points)}))
    written(path)
    with writing("--output", path.with_suffix(".csv")):
        report.write_csv(path.with_suffix(".csv"), points)
    written(path.with_suffix(".csv"))
    try:
        with progress("plotting"):
            plot(points, path.with_suffix(".png"), title)
        written(path.with_suffix(".png"))
    except NoPlots as missing:
        show(str(missing))
