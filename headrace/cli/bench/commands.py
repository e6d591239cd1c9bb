"""``headrace bench``: builds targets and workloads, and measures them with `headrace.lab.bench`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.bench.calibrate import calibrate
from headrace.cli.bench.roofline import roofline
from headrace.cli.bench.sweep import sweep
from headrace.cli.bench.targets import (
    check_lengths,
    make_server_target,
    make_target,
    read_spec,
    side_by_side,
    target_rows,
    time_batch,
)
from headrace.cli.help import CONTEXT, Command, Group
from headrace.cli.options import with_options
from headrace.cli.output import (
    Meter,
    check_export,
    describe,
    measured_options,
    plain,
    progress,
    refuse_failures,
    report_path,
    report_runs,
    show,
    write,
    written,
)
from headrace.cli.workloads import (
    ArrivingFlags,
    CountedFlags,
    InputLen,
    MeasureFlags,
    OutputLen,
    WorkloadSeed,
    draw,
)
from headrace.config import CacheOptions, ConfigError, ModelOptions, Options, SchedulerOptions

if TYPE_CHECKING:
    from headrace.cli.bench.targets import Spec
    from headrace.lab.bench.report import Run
    from headrace.lab.bench.stats import Target
    from headrace.lab.workload.work import Work


bench_app = typer.Typer(
    cls=Group,
    help="Measure engines and servers.",
    no_args_is_help=True,
    context_settings=CONTEXT,
    rich_markup_mode=None,
)


@with_options(ModelOptions, CacheOptions, SchedulerOptions)
def throughput(
    given: Options,
    backend: Annotated[
        str, typer.Option(help="Engine to measure: headrace, headrace-static or transformers-static.")
    ] = "headrace",
    batch_size: Annotated[int, typer.Option(min=1, help="Rows per batch of transformers-static.")] = 16,
    *,
    load: CountedFlags,
    how: MeasureFlags,
) -> None:
    """Measure offline throughput: all requests at once, in this process."""
    check_export(how.export)
    dataset, slo = load.counted(), how.slo
    work = draw(dataset)
    text = f"{backend},batch_size={batch_size}" if backend == "transformers-static" else backend
    spec = read_spec(text)
    (target,) = _targets([spec], given)
    try:
        run = _measure(target, work, slo, how.warmup)
    finally:
        target.close()
    settings = {"dataset": dataset, "warmup": how.warmup, "options": measured_options(given)}
    more = _bound(run, target_rows(spec, given))
    report_runs("throughput", [run], how.output, settings, more, rows=how.export, load=describe(dataset))
    refuse_failures([run])


@with_options(ModelOptions, CacheOptions, SchedulerOptions)
def latency(
    given: Options,
    batch_size: Annotated[int, typer.Option(min=1, help="Number of requests that run as one batch.")] = 8,
    input_len: InputLen = 32,
    output_len: OutputLen = 128,
    workload_seed: WorkloadSeed = 0,
    output: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False, writable=True, help="JSON file of the report (default: in bench-results/)."
        ),
    ] = None,
) -> None:
    """Measure the time of each part of a step, with one batch of a fixed shape."""
    from headrace.core.request import Request, SamplingParams
    from headrace.lab.bench import report
    from headrace.lab.bench.latency import Stopwatch, latency_table
    from headrace.lab.workload.dataset import Dataset
    from headrace.wiring.model import load

    with progress(f"loading {given.model.model}"):
        loaded = load(dataclasses.replace(given, scheduler=side_by_side(given.scheduler, batch_size)))
    check_lengths(input_len, output_len, loaded.ledger.max_model_len)
    engine, runner = loaded.engine, loaded.runner
    engine.runner = stopwatch = Stopwatch(runner)
    with progress("measuring steps"):
        for seed in (workload_seed + 1, workload_seed):  # the first batch warms up
            dataset = Dataset("fixed", None, batch_size, input_len, output_len, seed=seed)
            params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
            requests = [Request(f"{seed}-{w.id}", _tokens(w), params) for w in draw(dataset)]
            times = time_batch(engine, stopwatch, lambda: runner.seconds, requests)
    shape = f"batch of {batch_size}, {input_len} + {output_len} tokens"
    title = f"{given.model.model}: {shape}, kernels {loaded.computed_by}"
    show(latency_table(times, title))
    settings = {"dataset": dataset, "options": measured_options(given), "kernels": loaded.computed_by}
    path = report_path(output, "latency")
    write(path, report.document([], plain(settings), {"steps": plain(times)}))
    written(path)


@with_options()
def serve(
    base_url: Annotated[
        str, typer.Option(help="Address of an OpenAI-compatible server.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="Model name (default: the server's first model).")] = "",
    api_key: Annotated[str, typer.Option(help="API key, sent as a bearer token (default: none).")] = "",
    extra_body: Annotated[
        str, typer.Option(metavar="JSON", help="JSON object whose fields are added to every request.")
    ] = "{}",
    *,
    load: ArrivingFlags,
    max_concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum number of open requests: a closed loop (default: no limit)."),
    ] = None,
    how: MeasureFlags,
) -> None:
    """Load a server over HTTP: at a request rate (open loop) or with a concurrency (closed loop)."""
    check_export(how.export)
    dataset, slo = load.counted(), how.slo
    work = draw(dataset)
    target = make_server_target("server", base_url, model, api_key, extra_body, max_concurrency)
    run = _measure(target, work, slo, how.warmup)
    settings = {
        "dataset": dataset,
        "warmup": how.warmup,
        "base_url": base_url,
        "concurrency": max_concurrency,
    }
    text = describe(dataset, max_concurrency)
    report_runs("serve", [run], how.output, settings, rows=how.export, load=text)
    refuse_failures([run])


@with_options(ModelOptions, CacheOptions, SchedulerOptions)
def compare(
    given: Options,
    target: Annotated[
        list[str],
        typer.Option(
            metavar="TARGET",
            help="Target as [NAME=]KIND[,OPTION=VALUE…], where KIND is headrace, headrace-static, "
            "transformers-static or a URL. Give two or more; ratios are to the first.",
        ),
    ],
    rounds: Annotated[
        int, typer.Option(min=1, help="Number of rounds; the order of the targets alternates.")
    ] = 3,
    *,
    load: ArrivingFlags,
    how: MeasureFlags,
) -> None:
    """Compare two or more targets on one workload, in alternating rounds: medians and ratios to the first."""
    check_export(how.export)
    dataset, slo = load.counted(), how.slo
    specs = [read_spec(text) for text in target]
    if len({spec.name for spec in specs}) < max(2, len(specs)):
        raise ConfigError("compare needs two or more targets of different names")

    def drawn(number: int) -> Sequence[Work]:
        """New prompts for each round, because a prefix cache holds those of earlier rounds."""
        return draw(dataclasses.replace(dataset, seed=load.workload_seed + number))

    # A static target waits for the slowest request of a batch.
    batch = next((target_rows(spec, given) for spec in specs if "static" in spec.kind), None)
    result = _compare(specs, given, drawn, rounds, slo, how.warmup)
    settings = {"dataset": dataset, "warmup": how.warmup, "targets": target, "rounds": rounds}
    settings["options"] = measured_options(given)
    more = {"ratios": result.ratios, **_bound(result.rounds[0][0], batch)}
    every = [run for runs in result.rounds for run in runs]
    report_runs(
        *("compare", result.middle(), how.output, settings, more, every),
        medians=result.medians(),
        rows=how.export,
        load=describe(dataset),
    )
    refuse_failures(every)


for _command in (throughput, latency, serve, compare, sweep, calibrate, roofline):
    bench_app.command(cls=Command, context_settings=CONTEXT)(_command)


def _targets(specs: Sequence[Spec], given: Options) -> list[Target]:
    """The targets of these specs. If one cannot be created, those created before are closed."""
    targets: list[Target] = []
    try:
        for spec in specs:
            with progress(f"loading {spec.name}"):
                targets.append(make_target(spec, given))
    except BaseException:
        for each in targets:
            each.close()
        raise
    return targets


def _measure(target: Target, work: Sequence[Work], slo: dict[str, float], warmup: int) -> Run:
    from headrace.lab.bench.report import measure

    _warm([target], work[:warmup])
    with progress(f"measuring {target.name}", len(work)) as meter:
        meter.read = _completed(target)
        return measure(target, work, slo)


def _compare(
    specs: Sequence[Spec],
    given: Options,
    drawn: Callable[[int], Sequence[Work]],
    rounds: int,
    slo: dict[str, float],
    warmup: int,
) -> Any:
    """`lab.bench.report.compare` with progress on the terminal."""
    from headrace.lab.bench import report

    warming = drawn(rounds)[:warmup]  # prompts of a further round, so that no measured round has them
    targets = _targets(specs, given)
    try:
        _warm(targets, warming)
        with progress("measuring", len(drawn(0))) as meter:
            return report.compare(targets, drawn, rounds, slo, _print_run, _starting(meter, rounds))
    finally:
        for each in targets:
            each.close()


def _starting(meter: Meter, rounds: int) -> Callable[[int, Target], None]:
    def starting(number: int, target: Target) -> None:
        meter.text = f"round {number + 1} of {rounds}: {target.name}"
        meter.read = _completed(target)

    return starting


def _completed(target: Target) -> Callable[[], float]:
    return lambda: float(target.completed)


def _print_run(number: int, run: Run) -> None:
    speed = f"{run.summary.output_tokens_per_second:.1f} output tokens/s"
    show(f"round {number + 1}, {run.target}: {speed}, {run.summary.failed} failed")


def _tokens(work: Work) -> tuple[int, ...]:
    return work.prompt  # type: ignore[return-value]


def _warm(targets: Sequence[Target], work: Sequence[Work]) -> None:
    """Runs some unmeasured work first, to exclude first calls, new connections and compilation."""
    at_once = [dataclasses.replace(each, arrival=0.0) for each in work]
    with progress("warming up"):
        for target in targets if at_once else ():
            target.run(at_once)


def _bound(run: Run, batch: int | None) -> dict[str, dict[str, float]]:
    """The bound of the gain of continuous batching on these output lengths (see `bound`); empty if the
    batch size is unknown."""
    from headrace.lab.bench.static_batching import bound

    lengths = [record.output_tokens for record in run.records if record.output_tokens]
    if not lengths or not batch:
        return {}
    limits = bound(lengths, batch)
    return {"bound": {"batch": batch, **dataclasses.asdict(limits), "gain": limits.gain, "most": limits.most}}
