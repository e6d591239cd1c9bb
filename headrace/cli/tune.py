"""``headrace tune``: searches the best settings for a workload, and writes them as a configuration file."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from headrace.cli.machines import PlaceFlags, open_evaluator, simulated_evaluator
from headrace.cli.options import duration, with_options
from headrace.cli.output import Meter, progress, show, writing, written
from headrace.cli.workloads import read_calls, read_slo
from headrace.config import CacheOptions, ConfigError, ModelOptions, Options, SchedulerOptions
from headrace.files import replace_text

if TYPE_CHECKING:
    from headrace.lab.bench.stats import Record
    from headrace.lab.tune import Candidate, Comparison, Goal, Parts, Runner, Settings
    from headrace.lab.workload.work import Call
    from headrace.wiring.evaluator import Evaluator

SEARCH_REQUESTS = 400
"""Requests of one simulated trial."""

MOST_PAIRS = 40
FEWEST_PAIRS = 8
"""Minimum number of pairs of windows in the final evaluation."""

BEST = 3
"""Number of candidates from the search that run on the engine."""

SEARCH_SHARE, SELECT_SHARE = 0.4, 0.65
"""Shares of the time budget at which search and selection end."""

_HALF_AN_HOUR: Any = "30m"  # typer parses these
_TWENTY_SECONDS: Any = "20s"


class Plan(NamedTuple):
    """The inputs of a tuning run."""

    plans: SchedulerOptions
    present: Settings
    goal: Goal
    parts: Parts
    trials: int
    seed: int
    budget: float
    began: float

    def spent(self) -> float:
        """The share of the budget that is spent."""
        return (time.perf_counter() - self.began) / self.budget


class Result(NamedTuple):
    """The best settings and their evaluation (None if the search found nothing better than the present ones).

    ``met`` is the share of requests that met each latency target with the present settings in the search.
    """

    settings: Settings
    comparison: Comparison | None
    simulated: bool
    met: Mapping[str, float] = {}


@dataclass(frozen=True)
class Scenario:
    """The workload, its latency targets, and what the search may cost."""

    workload: Annotated[
        list[str],
        typer.Option(
            metavar="FILE|TENANT",
            help="Trace (CSV or JSON lines, as in headrace simulate --trace), or a synthetic tenant: "
            "tenant=NAME,rate=R,… (as in headrace simulate --workload). Tenants are repeatable.",
        ),
    ]
    slo: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:DURATION",
            help="Latency target, for example ttft:500ms, tpot:50ms, itl:200ms or e2e:10s. Repeatable. Without one, "
            "the time per output token is minimized.",
        ),
    ] = None
    budget: Annotated[
        float,
        typer.Option(parser=duration, metavar="DURATION", help="Time for search and at least eight pairs."),
    ] = _HALF_AN_HOUR
    window: Annotated[
        float,
        typer.Option(
            parser=duration, metavar="DURATION", help="Length of a measured window of the workload."
        ),
    ] = _TWENTY_SECONDS
    trials: Annotated[int, typer.Option(min=2, help="Settings that are tried in the simulator.")] = 40
    requests: Annotated[
        int | None,
        typer.Option(min=1, help="Number of requests (default: all of a trace, 1000 of synthetic tenants)."),
    ] = None
    speedup: Annotated[float, typer.Option(help="Factor by which requests arrive faster.")] = 1.0

    def calls(self, seed: int) -> list[Call]:
        """The requests of ``--workload``.

        Raises:
            ConfigError: a trace together with other values, or a value that cannot be read.
        """
        synthetic = [each for each in self.workload if "=" in each and not Path(each).exists()]
        if len(self.workload) > 1 and len(synthetic) < len(self.workload):
            raise ConfigError("--workload: give one trace, or one or more tenants")
        trace = None if synthetic else Path(self.workload[0])
        return list(read_calls(trace, synthetic, self.requests, self.speedup, seed, trace_flag="--workload"))

    def parts(self, seed: int) -> Parts:
        """The windows of the workload.

        Raises:
            ConfigError: as `calls`, an empty budget or window, or too few requests.
        """
        from headrace.lab.tune import TooFew, parts

        calls = self.calls(seed)
        if not self.budget > 0 or not self.window > 0:
            raise ConfigError("--budget and --window: expected a duration above 0")
        try:
            return parts(calls, self.window)
        except TooFew as error:
            raise ConfigError(f"--workload: {error} (--requests, --window)") from None


@with_options(ModelOptions, CacheOptions, SchedulerOptions)
def tune(
    given: Options,
    scenario: Scenario,
    place: PlaceFlags,
    output: Annotated[
        Path,
        typer.Option(
            dir_okay=False,
            writable=True,
            metavar="FILE",
            help="YAML file of the settings, for headrace serve --config.",
        ),
    ] = Path("tuned.yaml"),
) -> None:
    """Search max-num-seqs, max-num-batched-tokens, mixed-prefill-ratio and max-step-seconds for a workload.

    The simulator tries many settings on the first half of the workload. The engine then runs the best of them in
    alternating rounds with the present ones, and the last part of the workload judges. Settings whose gain is within
    the noise are not recommended. With --simulated-device or --calibration the simulator does all of it, and equal
    values of --seed give equal files unless the budget is spent.
    """
    from headrace.lab.tune import Goal

    began, seed = time.perf_counter(), given.model.seed
    goal, parts = Goal(read_slo(scenario.slo, "--slo")), scenario.parts(seed)
    simulated = _simulated(given, place)
    plans, present = given.scheduler, _present(given, simulated)
    plan = Plan(plans, present, goal, parts, scenario.trials, seed, scenario.budget, began)
    found = _tune(plan, simulated, None if place.simulated else given)
    _write(plan, found, simulated.name, scenario.workload, output, _model(given))


def _simulated(given: Options, place: PlaceFlags) -> Evaluator:
    """The simulator for the search: of the flags' device, or of this machine, which is measured first."""
    from headrace.cli.bench.calibrate import measure
    from headrace.wiring.evaluator import calibrated_evaluator, refuse_speculation

    refuse_speculation(given.scheduler)  # before anything is measured
    if place.simulated:
        return simulated_evaluator(place, given)
    return calibrated_evaluator(given, measure(given))


def _present(given: Options, evaluator: Evaluator) -> Settings:
    plans = given.scheduler
    return {
        "max_num_seqs": plans.max_num_seqs,
        "max_num_batched_tokens": evaluator.tokens(plans),
        "mixed_prefill_ratio": plans.mixed_prefill_ratio,
        "max_step_seconds": plans.max_step_seconds,
    }


def _model(given: Options) -> dict[str, str]:
    return {"model": given.model.model} if "model" in given.chosen else {}


def _tune(plan: Plan, simulated: Evaluator, real: Options | None) -> Result:
    """Searches in the simulator; evaluates on the engine with the options ``real``, or in the simulator if None."""
    candidates, met = _search(plan, simulated)
    if not candidates:
        return Result(plan.present, None, real is None, met)
    settings = [plan.present, *(each.settings for each in candidates)]
    if real is None:
        return _compared(plan, simulated, settings, on_engine=False)._replace(met=met)
    slots = max(int(each["max_num_seqs"]) for each in settings)
    tokens = max(int(each["max_num_batched_tokens"]) for each in settings)
    evaluator = open_evaluator(PlaceFlags(), real, slots, tokens)
    try:
        return _compared(plan, evaluator, settings, on_engine=True)._replace(met=met)
    finally:
        evaluator.close()


def _search(plan: Plan, evaluator: Evaluator) -> tuple[list[Candidate], Mapping[str, float]]:
    """The best settings that are better than the present ones in simulation, and how many requests met each target
    with the present ones.

    Raises:
        ConfigError: no request met the latency targets with any settings, or optuna is missing.
    """
    from headrace.lab.tune import Impossible, NoOptuna, check_possible, search, space, spread_out

    windows = spread_out(plan.parts.search, SEARCH_REQUESTS)
    run = _runner(plan, evaluator)
    every: list[Record] = []
    present: list[Record] = []
    with progress(f"searching on {evaluator.name}", plan.trials) as meter:

        def score(settings: Settings) -> float:
            meter.done += 1
            records = [record for each in windows for record in run(settings, each)]
            every.extend(records)
            if settings == plan.present:
                present.extend(records)
            return plan.goal.score(records)

        try:
            found = search(
                score,
                space(plan.present),
                plan.present,
                plan.trials,
                plan.seed,
                lambda: plan.spent() < SEARCH_SHARE,
            )
            check_possible(plan.goal.slo, every)
        except NoOptuna as missing:
            raise ConfigError(str(missing)) from None
        except Impossible as error:
            raise ConfigError(f"--slo: {error}") from None
    own = next(each.score for each in found if each.settings == plan.present)
    show(
        f"searched {len(found)} settings on {evaluator.name}: {sum(e.score > own for e in found)} score better"
    )
    return [each for each in found if each.score > own][:BEST], plan.goal.met(present)


def _compared(plan: Plan, evaluator: Evaluator, settings: Sequence[Settings], *, on_engine: bool) -> Result:
    from headrace.lab.tune import compare, select

    run, parts = _runner(plan, evaluator), plan.parts
    with progress(f"selecting on {evaluator.name}") as meter:
        best = select(
            _counted(run, meter), plan.goal, settings, parts.select, lambda: plan.spent() < SELECT_SHARE
        )
    if best == plan.present:
        return Result(plan.present, None, not on_engine)
    most = MOST_PAIRS if on_engine else len(parts.judge)

    def proceed(pairs: int) -> bool:
        return pairs < most and (pairs < FEWEST_PAIRS or plan.spent() < 1.0)

    with progress(f"comparing on {evaluator.name}") as meter:
        comparison = compare(_counted(run, meter), plan.goal, plan.present, best, parts.judge, proceed)
    return Result(best if comparison.better else plan.present, comparison, not on_engine)


def _counted(run: Runner, meter: Meter) -> Runner:
    """Wraps a runner to show the number of runs on the terminal."""
    text = meter.text

    def counted(settings: Settings, window: Sequence[Call]) -> Sequence[Record]:
        meter.done += 1
        meter.text = f"{text}: run {meter.done:.0f}"
        return run(settings, window)

    return counted


def _runner(plan: Plan, evaluator: Evaluator) -> Runner:
    """Runs a window with given settings; engines are reused, since they learn lengths and times."""
    from headrace.lab.workload.dataset import VOCABULARY
    from headrace.lab.workload.work import Synthesis, replayed

    def run(settings: Settings, window: Sequence[Call]) -> Sequence[Record]:
        values: dict[str, Any] = dict(settings)
        work = list(replayed(window, Synthesis(VOCABULARY, plan.seed)))
        plans = replace(plan.plans, **values)
        return evaluator.run(plans, work, slo=plan.goal.slo, again=True).records

    return run


def _write(
    plan: Plan,
    found: Result,
    machine: str,
    workload: Sequence[str],
    output: Path,
    model: Mapping[str, str],
) -> None:
    from headrace.lab.bench.stats import slo_text
    from headrace.lab.tune import reasons, settings_text

    why = reasons(plan.goal, found.comparison, found.met)
    targets = slo_text(plan.goal.slo)
    counts = [sum(map(len, part)) for part in plan.parts]
    comments = [
        f"Written by headrace tune --seed {plan.seed}. Use it with: headrace serve --config {output.name}",
        f"Workload: {', '.join(workload)}. Requests: {counts[0]} for search, {counts[1]} for selection, "
        f"{counts[2]} for evaluation.",
        f"Latency targets: {targets or 'none; the time per output token was minimized'}.",
        f"Machine: {machine}. Evaluated {'in the simulator' if found.simulated else 'on the engine'}.",
        *why,
    ]
    show(*why)
    with writing("--output", output):
        replace_text(output, settings_text(found.settings, plan.present, comments, model))
    written(output)
