"""``headrace bench roofline``: what this machine allows a model's steps, and what holds the engine back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from headrace.cli.bench_targets import check_lengths, side_by_side, time_batch
from headrace.cli.options import with_options
from headrace.cli.output import writing
from headrace.config import CacheOptions, ConfigError, ModelOptions, Options, SchedulerOptions

if TYPE_CHECKING:
    from headrace.compute.kernels.timed import TimedKernels
    from headrace.compute.model.spec import DecoderSpec
    from headrace.lab.bench.latency import StepTimes
    from headrace.lab.bench.roofline import Machine, Step


@with_options(ModelOptions, CacheOptions, SchedulerOptions)
def roofline(
    given: Options,
    batch_size: Annotated[list[int], typer.Option(min=1, help="Rows of a step; repeatable.")] = [1, 16, 32],  # noqa: B006
    input_len: Annotated[list[int], typer.Option(min=1, help="Prompt tokens; repeatable.")] = [128],  # noqa: B006
    output_len: Annotated[int, typer.Option(min=2, help="Answer tokens: steps that are measured.")] = 16,
    workload_seed: Annotated[int, typer.Option(help="What prompts are drawn from.")] = 0,
    output: Annotated[
        Path | None, typer.Option(help="JSON file [default: bench-results/roofline-….json]")
    ] = None,
) -> None:
    """What this CPU's memory and arithmetic allow each part of a step, beside what the engine takes."""
    import torch
    from rich.console import Console

    from headrace.build.model import load, warm_up
    from headrace.compute.kernels import Kernels
    from headrace.compute.kernels.cpp import CppKernels
    from headrace.compute.kernels.probe import product_rates, read_rates
    from headrace.compute.kernels.timed import TimedKernels
    from headrace.core.request import Request, SamplingParams
    from headrace.lab.bench import report
    from headrace.lab.bench import roofline as lab
    from headrace.lab.bench.latency import Stopwatch
    from headrace.lab.workload.dataset import Dataset

    plans = replace(side_by_side(given.scheduler, max(batch_size)), scheduling_policy="fcfs")
    # What is kept would not be given back: a run takes the memory of the one before.
    cache = replace(given.cache, enable_prefix_caching=False)
    loaded = load(replace(given, scheduler=plans, cache=cache))
    check_lengths(max(input_len), output_len, loaded.ledger.max_model_len)
    engine, runner = loaded.engine, loaded.runner
    kernels = loaded.decoder.kernels
    if not isinstance(kernels, CppKernels):
        raise ConfigError(f"bench roofline measures the kernels 'cpp', and here are '{loaded.kernels}'")
    show = Console().print
    # Before the first step: with it the system begins to clear the pool's memory.
    machine = lab.Machine(read_rates(kernels), product_rates(kernels, getattr(torch, loaded.dtype)))
    show(lab.machine_table(machine))
    warm_up(loaded)

    engine.runner = stopwatch = Stopwatch(runner)
    timed = TimedKernels(kernels, loaded.spec.vocab_size)
    loaded.decoder.kernels = cast(Kernels, timed)
    token_bytes = loaded.ledger.block_bytes / loaded.ledger.block_size
    steps: list[lab.Step] = []
    seeds = count(workload_seed)

    def run(batch: int, context: int) -> list[StepTimes]:
        seed = next(seeds)
        answer = output_len + 1 + batch * context // engine.knobs.batched_tokens
        work = Dataset("fixed", None, batch, context, answer, seed=seed).draw()
        params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
        requests = [Request(f"{seed}-{each.id}", cast(Any, each.prompt), params) for each in work]
        return time_batch(engine, stopwatch, lambda: {**runner.seconds, **timed.totals}, requests)

    for context in input_len:
        for batch in batch_size:
            run(batch, context)  # beside it the system clears memory that nobody has used
            for times in run(batch, context):
                if times.wall.count:
                    size = (batch, context, output_len)
                    steps.append(_step(times, *size, loaded.spec, loaded.dtype, timed, token_bytes, machine))
    for step in sorted(steps, key=lambda step: step.kind == "prefill"):
        show(lab.step_table(step))
    path = output or Path("bench-results") / f"roofline-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    settings = {"model": given.model.model, "dtype": loaded.dtype, "quantization": loaded.quantization}
    with writing("--output", path):
        report.write(path, report.document([], settings, {"roofline": lab.document(machine, steps)}))
    show(f"written: {path}")
    runner.close()


def _step(
    times: StepTimes,
    batch: int,
    context: int,
    output_len: int,
    spec: DecoderSpec,
    dtype: str,
    timed: TimedKernels,
    token_bytes: float,
    machine: Machine,
) -> Step:
    """One kind of steps as parts. What a context costs is that of its mean length over the steps.

    A token's keys and values take ``token_bytes``.
    """
    from headrace.lab.bench.roofline import Part, Step, bound, prompt_keys

    spent: Mapping[str, float] = times.phases
    decode = times.kind == "decode"
    # Keys of all layers that queries look at, and bytes of them and their values that must come from memory, per step.
    if decode:
        length = context + output_len / 2
        reach = batch * sum(min(length, layer.window or length) for layer in spec.layers)
    else:
        reach = batch * sum(prompt_keys(context, layer.window) for layer in spec.layers) / times.wall.count
    fetched = reach * token_bytes / spec.num_layers if decode else 0.0
    products = 2 * reach * spec.num_heads * spec.head_dim

    def linear(name: str, part: str) -> Part:
        products = spent[f"{part} products"]
        operations = {numbers: 2 * each * products for numbers, each in timed.numbers[part].items()}
        return Part(name, spent[part], spent[f"{part} bytes"], operations)

    kernels = sum(spent[part] for part in ("linear", "head", "attention", "elementwise"))
    parts = (
        linear("linear layers", "linear"),
        Part("attention", spent["attention"], fetched, {dtype: 2 * products}),
        linear("LM head", "head"),
        Part("norms, activations", spent["elementwise"]),
        Part("the decoder's own", spent["forward"] - kernels),
        Part("sampling", spent["sample"]),
        Part("planning and the loop", times.outside_forward - spent["sample"]),
    )
    bounds = tuple(bound(part, machine) for part in parts)
    return Step(times.kind, batch, context, times.wall.count, times.wall.mean, bounds)
