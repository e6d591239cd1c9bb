"""``headrace bench``: builds what is to be measured and lets `headrace.lab.bench` measure it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.options import with_options
from headrace.config import CacheOptions, ConfigError, ModelOptions, Options, SchedulerOptions, options

if TYPE_CHECKING:
    from headrace.lab.bench.record import Target
    from headrace.lab.bench.report import Run
    from headrace.lab.bench.spec import Spec
    from headrace.lab.workload import Prompt, Work

bench_app = typer.Typer(help="Measure engines and servers.", no_args_is_help=True)

PANEL = "Workload options"
DATASETS = ("high-variance", "high-variance-chats", "fixed", "log-normal", "shared-prefix", "jsonl")

DatasetName = Annotated[str, typer.Option(help=f"One of: {', '.join(DATASETS)}.", rich_help_panel=PANEL)]
DatasetPath = Annotated[
    Path | None, typer.Option(help="File of prompts for the dataset jsonl.", rich_help_panel=PANEL)
]
NumPrompts = Annotated[int, typer.Option(min=1, help="Requests.", rich_help_panel=PANEL)]
InputLen = Annotated[int, typer.Option(min=1, help="Prompt tokens (median or fixed).", rich_help_panel=PANEL)]
OutputLen = Annotated[
    int, typer.Option(min=1, help="Answer tokens (median, fixed or bound).", rich_help_panel=PANEL)
]
PrefixLen = Annotated[int, typer.Option(min=1, help="Shared tokens of shared-prefix.", rich_help_panel=PANEL)]
WorkloadSeed = Annotated[int, typer.Option(help="Draws the workload.", rich_help_panel=PANEL)]
RequestRate = Annotated[float, typer.Option(help="Requests per second, Poisson; inf: all at once.")]
Burstiness = Annotated[float, typer.Option(help="Below 1 burstier than Poisson, above 1 more regular.")]
MaxConcurrency = Annotated[int | None, typer.Option(min=1, help="Requests open at once (closed loop).")]
Goodput = Annotated[
    list[str] | None,
    typer.Option(
        help="Bound that a good request meets, in seconds: ttft:1.0, tpot:0.1, itl:…, e2e:… Repeatable."
    ),
]
Output = Annotated[
    Path | None, typer.Option(help="JSON file; the plot lies beside it. Default: bench-results/<command>-<time>.json")
]  # fmt: skip
Warmup = Annotated[int, typer.Option(min=0, help="Requests of the workload run beforehand, unmeasured.")]


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

    work = _work(dataset_name, dataset_path, num_prompts, input_len, output_len, prefix_len, workload_seed)
    slo = _slo(goodput)
    spec = _spec(f"{backend},batch_size={batch_size}" if backend == "transformers-static" else backend)
    target = _target(spec, given)
    try:
        _warm([target], work[:warmup])
        run = measure(target, work, slo)
    finally:
        target.close()
    _tell(
        [run], "throughput", output, _settings(locals(), given), _bounds(work, given.scheduler.max_num_seqs)
    )


@bench_app.command()
@with_options(ModelOptions, CacheOptions, SchedulerOptions)
def latency(
    given: Options,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests that run as one batch.")] = 8,
    input_len: InputLen = 32,
    output_len: OutputLen = 128,
    workload_seed: WorkloadSeed = 0,
    rounds: Annotated[int, typer.Option(min=1, help="Batches measured, after one that is not.")] = 3,
    output: Output = None,
) -> None:
    """One batch of a fixed shape: where the time of a step goes, and what it costs outside the forward."""
    from headrace.build import load
    from headrace.core.request import Request, SamplingParams
    from headrace.lab.bench import report
    from headrace.lab.bench.latency import Stopwatch, latency_table, time_steps
    from headrace.lab.workload.tokens import fixed_lengths

    loaded = load(given)
    runner = loaded.runner
    engine = loaded.engine
    engine.runner = stopwatch = Stopwatch(runner)
    times = []
    for number in range(rounds + 1):
        work = fixed_lengths(batch_size, input_len, output_len, workload_seed + number)
        requests = [
            Request(
                f"{number}-{each.id}",
                each.prompt,
                SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True),
            )
            for each in work
        ]
        times = time_steps(engine, stopwatch, lambda: runner.seconds, requests)
    _console().print(
        latency_table(times, f"{given.model.model}, batch {batch_size}, {input_len}+{output_len} tokens")
    )
    told = report.document([], _settings(locals(), given), {"steps": [asdict(each) for each in times]})
    report.write(_path(output, "latency"), told)


@bench_app.command()
def serve(
    base_url: Annotated[str, typer.Option(help="Any OpenAI-compatible server.")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="Model name in requests; default: the server's first.")] = "",
    api_key: Annotated[str, typer.Option(help="Sent as bearer token.")] = "",
    extra_body: Annotated[str, typer.Option(help="JSON object added to every request's body.")] = "{}",
    dataset_name: DatasetName = "high-variance",
    dataset_path: DatasetPath = None,
    num_prompts: NumPrompts = 300,
    input_len: InputLen = 24,
    output_len: OutputLen = 128,
    prefix_len: PrefixLen = 1000,
    workload_seed: WorkloadSeed = 0,
    request_rate: RequestRate = math.inf,
    burstiness: Burstiness = 1.0,
    max_concurrency: MaxConcurrency = None,
    warmup: Warmup = 4,
    goodput: Goodput = None,
    output: Output = None,
) -> None:
    """Load a server over HTTP: an open loop at a rate, or a closed loop of a concurrency."""
    from headrace.lab.bench.measure import measure
    from headrace.lab.workload.arrivals import arriving, poisson

    work = _work(dataset_name, dataset_path, num_prompts, input_len, output_len, prefix_len, workload_seed)
    work = arriving(work, poisson(len(work), request_rate, workload_seed, burstiness))
    settings = _settings(locals())
    target = _server(
        "server", base_url, {"model": model, "api_key": api_key, "extra_body": extra_body}, max_concurrency
    )
    _warm([target], [_at_once(each) for each in work[:warmup]])
    run = measure(target, work, _slo(goodput))
    _tell([run], "serve", output, settings)
    if run.summary.failed:
        raise typer.Exit(1)


@bench_app.command()
@with_options(ModelOptions, CacheOptions, SchedulerOptions)
def compare(
    given: Options,
    target: Annotated[
        list[str],
        typer.Option(
            help="[NAME=]KIND[,OPTION=VALUE…], KIND: headrace, headrace-static, transformers-static, or a URL. "
            "At least two; ratios are to the first."
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
    """Two or more targets on one workload in alternating rounds: medians and ratios."""
    from headrace.lab.bench.measure import compare as run_rounds
    from headrace.lab.workload.arrivals import arriving, poisson

    work = _work(dataset_name, dataset_path, num_prompts, input_len, output_len, prefix_len, workload_seed)
    work = arriving(work, poisson(len(work), request_rate, workload_seed, burstiness))
    settings = _settings(locals(), given)
    slo = _slo(goodput)
    specs = [_spec(text) for text in target]
    console = _console()
    targets: list[Target] = []
    try:
        targets += [_target(spec, given) for spec in specs]
        _warm(targets, [_at_once(each) for each in work[:warmup]])
        result = run_rounds(
            targets,
            work,
            rounds,
            slo,
            lambda number, run: console.print(
                f"round {number + 1} {run.target}: {run.summary.output_tokens_per_second:.1f} output tok/s"
            ),
        )
    finally:
        for each in targets:
            each.close()
    more = {"ratios": result.ratios, **_bounds(work, given.scheduler.max_num_seqs)}
    _tell(result.middle(), "compare", output, settings, more, [run for runs in result.rounds for run in runs])
    for name, ratios in result.ratios.items():
        told = ", ".join(f"{figure} {ratio:.3f}" for figure, ratio in ratios.items() if not math.isnan(ratio))
        console.print(f"{name} to {targets[0].name}, median of {rounds} rounds: {told}")


def _spec(text: str) -> Spec:
    from headrace.lab.bench.spec import BadSpec, parse

    try:
        return parse(text)
    except BadSpec as error:
        raise ConfigError(str(error)) from None


def _target(spec: Spec, given: Options) -> Target:
    """The target of a spec; an engine starts from the command's own options, and the spec's override them."""
    if spec.kind == "http":
        own = dict(spec.options)
        concurrency = own.pop("concurrency", None)
        return _server(spec.name, spec.url, own, int(concurrency) if concurrency else None)
    if spec.kind == "transformers-static":
        return _transformers(spec, given)
    merged = {**_given(given), **spec.options}
    if spec.kind == "headrace-static":
        merged["scheduling_policy"] = "static"
    return engine_target(spec.name, options(merged))


def _given(given: Options) -> dict[str, Any]:
    """Option values by name, defaults left out."""
    default = Options()
    return {
        name: value
        for part in ("model", "cache", "scheduler")
        for name, value in asdict(getattr(given, part)).items()
        if value != getattr(getattr(default, part), name)
    }


def engine_target(name: str, given: Options) -> Target:
    """An engine in this process as a target; it forgets cached prefixes before each run."""
    from headrace.build import load
    from headrace.lab.bench.engine import EngineTarget
    from headrace.lab.workload.work import is_chat

    loaded = load(given)

    def encode(prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(loaded.tokenizer.encode(prompt))
        if is_chat(prompt):
            text = loaded.template.render([message._asdict() for message in prompt])
            return tuple(loaded.tokenizer.encode(text, add_special_tokens=False))
        return prompt  # type: ignore[return-value]

    return EngineTarget(
        name,
        loaded.engine,
        encode,
        eos_token_ids=loaded.tokenizer.eos_token_ids,
        before=loaded.engine.reset_prefix_cache,
    )
