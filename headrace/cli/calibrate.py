"""``headrace bench calibrate``: measures this machine once, so that a simulation of it is right."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.bench_targets import make_server_target
from headrace.cli.options import with_options
from headrace.config import CacheOptions, ConfigError, ModelOptions, Options, SchedulerOptions

if TYPE_CHECKING:
    from headrace.lab.simulate.calibration import Calibration
    from headrace.lab.workload import Work


EACH_TOKEN = '{"return_token_ids": true}'
"""Added to bodies, so that a token is seen when it comes, though it may show no text."""


@with_options(ModelOptions, CacheOptions, SchedulerOptions)
def calibrate(
    given: Options,
    base_url: Annotated[
        str, typer.Option(help="A server with the same model and options: what HTTP adds is measured too.")
    ] = "",
    api_key: Annotated[str, typer.Option(help="Sent as bearer token.")] = "",
    workload_seed: Annotated[int, typer.Option(help="What the batches are drawn from.")] = 0,
    output: Annotated[Path, typer.Option(help="JSON file.")] = Path("calibration.json"),
) -> None:
    """Time the steps of this machine, for `headrace simulate --calibration`."""
    calibration = measure(given, workload_seed)
    if base_url:
        calibration = with_front(calibration, given, base_url, api_key)
    calibration.write(output)
    typer.echo(describe(calibration))
    typer.echo(f"written: {output}")


def measure(given: Options, seed: int = 0) -> Calibration:
    """The calibration of an engine in this process, without its HTTP side.

    Raises:
        ConfigError: the engine cannot be built, or too few steps were measured.
    """
    from headrace.build.model import decoder_cost, load, warm_up
    from headrace.lab.bench.machine import machine_facts
    from headrace.lab.simulate.calibration import BadCalibration, Calibration
    from headrace.lab.simulate.fit import fit
    from headrace.lab.simulate.measure import batches, measure_steps
    from headrace.lab.simulate.recorder import StepRecorder

    loaded = load(given)
    warm_up(loaded)
    engine = loaded.engine
    engine.runner = recorder = StepRecorder(loaded.runner)
    length = loaded.ledger.max_model_len
    try:
        steps = measure_steps(engine, recorder, batches(given.scheduler.max_num_seqs, length, seed))
        found = fit(steps)
    except BadCalibration as error:
        raise ConfigError(str(error)) from None
    finally:
        loaded.runner.close()
    kind = loaded.facts.kind
    cost = decoder_cost(loaded.spec, kind)
    return Calibration(
        model=loaded.name,
        machine=str(machine_facts()["processor"] if kind == "cpu" else loaded.facts.name),
        kind=kind,
        dtype=", ".join(filter(None, (loaded.dtype, loaded.quantization))),
        kernels=loaded.kernels,
        kv_tokens=loaded.ledger.kv_tokens,
        max_model_len=length,
        fixed_tokens=cost.fixed_tokens,
        context_tokens=cost.context_tokens,
        steps=len(steps),
        **found._asdict(),
    )


def with_front(calibration: Calibration, given: Options, base_url: str, api_key: str = "") -> Calibration:
    """The calibration with what a running server's HTTP side adds.

    Raises:
        ConfigError: no server answers there, or it fails a request.
    """
    from headrace.build.simulation import calibrated_machine, make_fleet
    from headrace.lab.simulate.asked import from_work
    from headrace.lab.simulate.measure import front_seconds
    from headrace.lab.simulate.outcome import outcome

    cache = dataclasses.replace(given.cache, kv_cache_memory_bytes=None)  # the calibration has its size
    machine = calibrated_machine(calibration, cache, front=False)

    def simulate(work: Sequence[Work]) -> tuple[float, float]:
        fleet = make_fleet(given.scheduler, cache, machine)
        fleet.run(from_work(work))
        summary = outcome(fleet.tally, {}).summary
        return summary.ttft.p50, summary.tpot.p50

    server, one_by_one = (
        make_server_target("server", base_url, "", api_key, EACH_TOKEN, open_at_once)
        for open_at_once in (given.scheduler.max_num_seqs, 1)
    )
    try:
        request, event = front_seconds(server, one_by_one, given.scheduler.max_num_seqs, simulate)
    except RuntimeError as error:
        raise ConfigError(f"{base_url}: {error}") from None
    return dataclasses.replace(calibration, front_request=request, front_event=event)


def describe(calibration: Calibration) -> str:
    """A calibration in a few lines; microseconds."""
    c = calibration
    device = " ".join(
        f"{name} {1e6 * getattr(c, name):.4g}"
        for name in ("step", "row", "few", "token", "many", "context", "read", "sample")
    )
    return (
        f"{c.model} on {c.machine}, {c.dtype}, kernels {c.kernels}: {c.steps} steps\n"
        f"device, µs  {device}\n"
        f"host, µs    step {1e6 * c.host_step:.4g} row {1e6 * c.host_row:.4g}\n"
        f"front, µs   request {1e6 * c.front_request:.4g} event {1e6 * c.front_event:.4g}\n"
        f"error       p50 {100 * c.error_p50:.1f} %, p90 {100 * c.error_p90:.1f} %"
    )
