"""``headrace bench sweep``: throughput, latency and memory over batch size, concurrency and chunk size."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.machines import PlaceFlags, open_evaluator
from headrace.cli.options import duration, one_of, with_options
from headrace.cli.output import (
    measured_options,
    plain,
    plotted,
    progress,
    report_path,
    show,
    write,
    writing,
    written,
)
from headrace.cli.workloads import SLO, DatasetName, InputLen, OutputLen, PromptFlags, draw, read_slo
from headrace.config import CacheOptions, ConfigError, ModelOptions, Options, SchedulerOptions

if TYPE_CHECKING:
    from headrace.lab.bench.report import Run
    from headrace.lab.sweep import Axis, Point, Trial
    from headrace.lab.workload.dataset import Dataset
    from headrace.lab.workload.work import Work
    from headrace.wiring.evaluator import Evaluator

AXES = ("batch-size", "concurrency", "chunk-size")
POLICIES = ("continuous", "static")

_FIVE_MINUTES: Any = "5m"  # typer parses it


@dataclass(frozen=True)
class SweepPrompts(PromptFlags):
    """The workload of a sweep: prompts of token ids with different lengths."""

    dataset_name: DatasetName = "log-normal"
    input_len: InputLen = 64
    output_len: OutputLen = 32


@dataclass(frozen=True)
class Scenario:
    """The values that are measured, on which machine and with which workload."""

    axis: Annotated[
        list[str],
        typer.Option(help="What to vary: batch-size, concurrency or chunk-size. Repeatable."),
    ] = AXES  # type: ignore[assignment]  # typer gives a list
    policy: Annotated[
        list[str],
        typer.Option(help="Batching to measure: continuous or static. Repeatable."),
    ] = POLICIES  # type: ignore[assignment]
    batch_size: Annotated[
        list[int], typer.Option(min=1, max=4096, help="Slots of the engine (max-num-seqs). Repeatable.")
    ] = (1, 2, 4, 8, 16, 32, 64)  # type: ignore[assignment]
    concurrency: Annotated[
        list[int], typer.Option(min=1, help="Open requests of a closed loop. Repeatable.")
    ] = (1, 4, 16, 64, 128)  # type: ignore[assignment]
    chunk_size: Annotated[
        list[int], typer.Option(min=1, help="Tokens of a step (max-num-batched-tokens). Repeatable.")
    ] = (64, 128, 256, 512, 1024)  # type: ignore[assignment]
    slo: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:DURATION",
            help="Latency target, for example ttft:500ms, tpot:50ms, itl:200ms or e2e:10s. Repeatable. With targets, "
            "every trial is a closed loop, and the largest value within all of them is reported (default: none).",
            rich_help_panel=SLO,
        ),
    ] = None
    attainment: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Share of requests that must meet every --slo, 0 to 1.", rich_help_panel=SLO
        ),
    ] = 0.95
    place: PlaceFlags = field(default_factory=PlaceFlags)
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Rounds over all values (default: 3, and 1 of a simulated device)."),
    ] = None
    budget: Annotated[
        float,
        typer.Option(parser=duration, metavar="DURATION", help="Time after which no further trial begins."),
    ] = _FIVE_MINUTES
    prompts: SweepPrompts = field(default_factory=SweepPrompts)

    @property
    def times(self) -> int:
        """The number of rounds."""
        return self.rounds or (1 if self.place.simulated else 3)

    def values(self) -> Mapping[Axis, Sequence[int]]:
        """The values of each axis.

        Raises:
            ConfigError: an axis that does not exist.
        """
        from headrace.lab.sweep import Axis

        wanted = dict(zip(AXES, (self.batch_size, self.concurrency, self.chunk_size), strict=True))
        return {Axis(one_of("--axis", each, AXES)): wanted[each] for each in self.axis}

    def policies(self) -> Sequence[str]:
        """The kinds of batching.

        Raises:
            ConfigError: one that does not exist.
        """
        return [one_of("--policy", each, POLICIES) for each in dict.fromkeys(self.policy)]


@with_options(ModelOptions, CacheOptions, SchedulerOptions)
def sweep(
    given: Options,
    scenario: Scenario,
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
    from headrace.lab.sweep import Axis, plan, requests_of

    values, slo = scenario.values(), read_slo(scenario.slo, "--slo")
    trials, slots = plan(values, scenario.policies()), given.scheduler.max_num_seqs
    dataset = scenario.prompts.dataset(max(requests_of(each, slots) for each in trials))
    work = [replace(each, arrival=0.0) for each in draw(dataset)]
    check_prompts(work)
    most = max([slots, *values.get(Axis.BATCH, ())])
    evaluator = open_evaluator(scenario.place, given, most, most_tokens(given, values.get(Axis.CHUNK)))
    try:
        check_trials(evaluator, given, trials)
        points = _measure(evaluator, given, trials, work, scenario, slo)
    finally:
        evaluator.close()
    settings = {
        "engine": evaluator.name,
        "dataset": dataset,
        "rounds": scenario.times,
        "budget": scenario.budget,
        "slo": slo,
        "attainment": scenario.attainment,
        "options": measured_options(given),
    }
    _report(evaluator.name, dataset, points, settings, report_path(output, "sweep"))
    _warn(points, len(trials), scenario.budget)
    _refuse_impossible(points, slo, scenario.attainment)


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


def _refuse_impossible(points: Sequence[Point], slo: Mapping[str, float], share: float) -> None:
    """Raises `ConfigError` if no point keeps the targets: it names the one that the fewest requests meet."""
    from headrace.lab.bench.stats import slo_text

    if not slo or any((each.slo_share or 0.0) >= share for each in points):
        return
    best = {name: max(each.met[name] for each in points) for name in slo}
    name = min(best, key=lambda each: best[each])
    raise ConfigError(
        f"--slo: no value that was tried is within {slo_text(slo)} for {100 * share:g} % of the requests; "
        f"{name} is met by at most {100 * best[name]:.1f} %"
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
    from headrace.lab.sweep import Axis

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
    scenario: Scenario,
    slo: Mapping[str, float],
) -> list[Point]:
    from headrace.lab.sweep import Axis, ideal, lengths, point, requests_of, tokens_per_second
    from headrace.lab.sweep import sweep as run_trials

    slots = given.scheduler.max_num_seqs
    with progress("sweep", scenario.times * len(trials)) as meter:

        def run(trial: Trial) -> Run:
            meter.text = f"{trial.axis.words} {trial.value}, {trial.policy}"
            open_ = None
            if slo or trial.axis is Axis.CONCURRENCY:  # targets mean nothing while all requests wait
                open_ = slots if trial.axis is Axis.CHUNK else trial.value
            plans = plans_of(trial, given.scheduler)
            done = evaluator.run(plans, work[: requests_of(trial, slots)], concurrency=open_)
            meter.done += 1
            return done

        runs = run_trials(trials, run, scenario.times, scenario.budget, time.perf_counter)
    shape, replica = lengths(work), None if evaluator.replica is None else ideal(evaluator.replica)
    points = []
    for trial, each in runs.items():
        plans = plans_of(trial, given.scheduler)
        rows = min(trial.value, slots) if trial.axis is Axis.CONCURRENCY else plans.max_num_seqs
        bound = None if replica is None else tokens_per_second(replica, shape, rows, evaluator.tokens(plans))
        points.append(point(trial, each, evaluator.sizes(plans), bound, slo))
    return points


def _report(
    name: str, dataset: Dataset, points: Sequence[Point], settings: Mapping[str, Any], path: Path
) -> None:
    from headrace.lab import sweep as report
    from headrace.lab.bench import report as bench_report

    title = f"{name}; {dataset.name}, {dataset.input_len} + {dataset.output_len} tokens"
    slo, share = settings["slo"], settings["attainment"]
    show(*report.tables(points, title), *report.sentences(points))
    show(*(report.slo_sentences(points, slo, share) if slo else [f"goodput {bench_report.UNSET} (--slo)"]))
    write(path, bench_report.document([], plain(settings), {"sweep": report.document(points, share)}))
    written(path)
    rows, picture = path.with_suffix(".csv"), path.with_suffix(".png")
    with writing("--output", rows):
        report.write_csv(rows, points)
    written(rows)
    if plotted("--output", picture, lambda: report.plot(points, picture, title)) is None:
        written(picture)
