"""``headrace bench roofline``: for each part of a step, the minimum time on this CPU and the measured time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from headrace.cli.bench.targets import check_lengths, side_by_side, time_batch
from headrace.cli.machines import known_device, kv_of
from headrace.cli.options import with_options
from headrace.cli.output import Meter, progress, report_path, show, write, written
from headrace.config import CacheOptions, ConfigError, ModelOptions, Options, SchedulerOptions

if TYPE_CHECKING:
    from headrace.compute.kernels.measure import TimedKernels
    from headrace.compute.model.shape import ModelShape
    from headrace.lab.bench.latency import Machine, Step, StepTimes
    from headrace.wiring.model import Loaded


@with_options(ModelOptions, CacheOptions, SchedulerOptions)
def roofline(
    given: Options,
    batch_size: Annotated[
        list[int],
        typer.Option(min=1, help="Rows of a step. Repeatable."),
    ] = [1, 16, 32],  # noqa: B006
    input_len: Annotated[
        list[int],
        typer.Option(min=1, help="Tokens per prompt. Repeatable."),
    ] = [128],  # noqa: B006
    output_len: Annotated[
        int, typer.Option(min=2, help="Output tokens, which is the number of measured decode steps.")
    ] = 16,
    rounds: Annotated[
        int,
        typer.Option(
            min=1,
            help="Measurements of each batch size and prompt length. The one of the median share is shown.",
        ),
    ] = 3,
    workload_seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            writable=True,
            metavar="FILE",
            help="JSON file of the report (default: in bench-results/).",
        ),
    ] = None,
    dry_run: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE",
            help="Measure nothing: print the expected decode steps on a GPU (h200, for instance) from a static model.",
        ),
    ] = None,
) -> None:
    """Compare the time of each part of a step with the bounds of this CPU's memory and arithmetic."""
    if dry_run is not None:
        _expect(given, dry_run, batch_size, input_len)
        return
    from headrace.lab.bench import latency as lab
    from headrace.wiring.model import close, warm_up

    loaded = _load(given, max(batch_size))
    check_lengths(max(input_len), output_len, loaded.ledger.max_model_len)
    machine = _machine(loaded)
    show(lab.machine_table(machine))
    with progress("measuring steps", len(input_len) * len(batch_size)) as meter:
        warm_up(loaded)
        sizes = [(context, batch) for context in input_len for batch in batch_size]
        steps = list(_measure(loaded, machine, meter, sizes, output_len, rounds, workload_seed))
    for step in sorted(steps, key=lambda step: step.kind == "prefill"):
        show(lab.step_table(step))
    _write(loaded, given.model.model, report_path(output, "roofline"), lab.document(machine, steps))
    close(loaded)


def _write(loaded: Loaded, model: str, path: Path, found: dict[str, object]) -> None:
    """Write the report, and print which kernels computed."""
    from headrace.lab.bench import report

    settings = {
        "model": model,
        "dtype": loaded.dtype,
        "quantization": loaded.quantization,
        "kernels": loaded.computed_by,
    }
    show(f"kernels {loaded.computed_by}")
    write(path, report.document([], settings, {"roofline": found}))
    written(path)


def _expect(given: Options, device: str, batch_size: Sequence[int], input_len: Sequence[int]) -> None:
    """Print the expected decode steps on a device.

    Raises:
        ConfigError: the device or the model is not known.
    """
    from headrace.lab.plan import launches
    from headrace.lab.plan.roofline import KV_BYTES, WEIGHTS, Replica
    from headrace.wiring.simulation import shape_of

    quantization, spec = given.model.quantization, known_device("--dry-run", device)
    shape = shape_of(given.model.model)
    weights = WEIGHTS[
        shape.stored if quantization is None else "int8" if quantization in ("int8", "fp8") else "int4"
    ]
    kv_bytes = KV_BYTES[kv_of(given.model.kv_cache_dtype)]
    backends = launches.BACKENDS if quantization is None else (launches.TRITON, launches.GRAPHS)
    replica = Replica(shape, spec, precision=weights._replace(kv_bytes=kv_bytes))
    steps = [
        launches.expected(replica, kernels, rows, context, quantization)
        for context in input_len
        for rows in batch_size
        for kernels in backends
    ]
    show(launches.table(replica, steps))


def _load(given: Options, rows: int) -> Loaded:
    """The model with capacity for ``rows`` rows, and without a prefix cache.

    Without cached blocks, a run reuses the memory of the previous one.

    Raises:
        ConfigError: the kernels are not the cpp kernels, or the options set parallelism.
    """
    from headrace.compute.kernels.cpp import CppKernels
    from headrace.compute.model.decoder import Decoder
    from headrace.wiring.model import load

    if (given.model.tensor_parallel_size, given.model.pipeline_parallel_size) != (1, 1):
        raise ConfigError("bench roofline measures one process: omit the options of parallelism")
    plans = replace(side_by_side(given.scheduler, rows), scheduling_policy="fcfs")
    cache = replace(given.cache, enable_prefix_caching=False)
    with progress(f"loading {given.model.model}"):
        loaded = load(replace(given, scheduler=plans, cache=cache))
    if not isinstance(loaded.decoder.kernels, CppKernels):
        raise ConfigError(
            f"bench roofline measures the cpp kernels only; this machine uses '{loaded.kernels}'"
        )
    if not isinstance(loaded.decoder, Decoder):
        raise ConfigError(
            f"bench roofline measures native families only; {loaded.shape.architecture} is computed by transformers"
        )
    return loaded


def _machine(loaded: Loaded) -> Machine:
    """The rates of this machine, measured before the first step, since then the system starts to zero new pages."""
    import torch

    from headrace.compute.kernels.cpp import CppKernels
    from headrace.compute.kernels.measure import product_rates, read_rates
    from headrace.lab.bench.latency import Machine

    kernels = cast("CppKernels", loaded.decoder.kernels)
    with progress("measuring memory and arithmetic"):
        return Machine(read_rates(kernels), product_rates(kernels, getattr(torch, loaded.dtype)))


def _measure(
    loaded: Loaded,
    machine: Machine,
    meter: Meter,
    sizes: Sequence[tuple[int, int]],
    output_len: int,
    rounds: int,
    workload_seed: int,
) -> Iterator[Step]:
    """The steps of every prompt length and batch size: of several rounds, the one of the median share.

    A shared machine's bandwidth changes within seconds, so it is measured before and after each round.
    """
    from headrace.compute.kernels import Kernels
    from headrace.compute.kernels.cpp import CppKernels
    from headrace.compute.kernels.measure import TimedKernels, read_rates
    from headrace.core.request import Request, SamplingParams
    from headrace.lab.bench.latency import Stopwatch, mean_rates, middle
    from headrace.lab.workload.dataset import Dataset

    engine, runner = loaded.engine, loaded.runner
    engine.runner = stopwatch = Stopwatch(runner)
    kernels = cast("CppKernels", loaded.decoder.kernels)
    timed = TimedKernels(cast("Any", kernels))
    loaded.decoder.use(cast("Kernels", timed))
    token_bytes = loaded.ledger.position_bytes
    seeds = count(workload_seed)

    def run(batch: int, context: int) -> list[StepTimes]:
        seed = next(seeds)
        answer = output_len + 1 + batch * context // engine.knobs.batched_tokens
        work = Dataset("fixed", None, batch, context, answer, seed=seed).draw()
        params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
        requests = [Request(f"{seed}-{each.id}", cast("Any", each.prompt), params) for each in work]
        return time_batch(engine, stopwatch, lambda: {**runner.seconds, **timed.totals}, requests)

    for context, batch in meter.count(sizes):
        run(batch, context)  # the first run uses new memory, which the system clears meanwhile
        found: dict[str, list[Step]] = {}
        for _ in range(rounds):
            before = read_rates(kernels)
            kinds = run(batch, context)
            now = replace(machine, read=mean_rates(before, read_rates(kernels)))
            for times in kinds:
                if times.wall.count:
                    size = (batch, context, output_len)
                    step = _step(times, *size, loaded.shape, loaded.dtype, timed, token_bytes, now)
                    found.setdefault(times.kind, []).append(step)
        yield from map(middle, found.values())


def _step(
    times: StepTimes,
    batch: int,
    context: int,
    output_len: int,
    shape: ModelShape,
    dtype: str,
    timed: TimedKernels,
    token_bytes: float,
    machine: Machine,
) -> Step:
    """The parts of one kind of step, for the mean context length over the steps.

    Keys and values of a token take ``token_bytes``.
    """
    from headrace.lab.bench.latency import Part, Step, bound, prompt_keys

    spent: Mapping[str, float] = times.phases
    decode = times.kind == "decode"
    # Per step: products with keys and values that queries attend to, and bytes of these that are read from memory.
    length = context + output_len / 2
    products = fetched = 0.0
    for layer in shape.layers:
        heads, kv_heads, head_dim = layer.heads
        if decode:
            reach = batch * min(length, layer.window or length)
            fetched += reach * 2 * kv_heads * head_dim * token_bytes / shape.kv_elements
        else:
            reach = batch * prompt_keys(context, layer.window) / times.wall.count
        products += 2 * reach * heads * head_dim

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
    return Step(times.kind, batch, context, times.wall.count, times.wall.mean, bounds, machine.bandwidth)
