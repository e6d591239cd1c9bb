"""``headrace bench calibrate``: measures this machine, so that simulations of it are accurate."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.bench.targets import make_server_target
from headrace.cli.connection import open_client
from headrace.cli.options import with_options
from headrace.cli.output import progress, writing, written
from headrace.config import CacheOptions, ConfigError, ModelOptions, Options, SchedulerOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headrace.lab.calibration import Calibration, FrontMeasure, Measured
    from headrace.lab.workload.work import Prompt
    from headrace.wiring.model import Loaded


EACH_TOKEN = '{"return_token_ids": true}'
"""Extra request fields, so that the time of a token is known even if it decodes to no text."""


@with_options(ModelOptions, CacheOptions, SchedulerOptions)
def calibrate(
    given: Options,
    base_url: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Running server with the same model and options; its HTTP overhead is measured too (default: none).",
        ),
    ] = "",
    api_key: Annotated[str, typer.Option(help="API key of that server (default: none).")] = "",
    workload_seed: Annotated[int, typer.Option(help="Seed of the measured requests.")] = 0,
    output: Annotated[
        Path,
        typer.Option(dir_okay=False, writable=True, metavar="FILE", help="JSON file of the calibration."),
    ] = Path("calibration.json"),
) -> None:
    """Measure the steps of this machine for headrace simulate --calibration."""
    calibration = measure(given, base_url, api_key, workload_seed)
    typer.echo(describe(calibration))
    with writing("--output", output):
        calibration.write(output)
    written(output)


def measure(given: Options, base_url: str = "", api_key: str = "", seed: int = 0) -> Calibration:
    """The calibration of an engine in this process, and of the HTTP overhead of the server at ``base_url`` if given.

    Raises:
        ConfigError: the engine cannot be built, too few steps were measured, or the server fails a request.
    """
    from headrace.lab.calibration import TURNS

    with measuring(given, base_url, api_key, seed) as machine:
        with progress("measuring steps and HTTP overhead" if base_url else "measuring steps", TURNS) as meter:
            for _ in meter.count(range(TURNS)):
                machine.turn()
        return machine.calibration()


@contextmanager
def measuring(given: Options, base_url: str = "", api_key: str = "", seed: int = 0) -> Iterator[Measuring]:
    """A measurement in several turns; other work may run between them. Raises the errors of `measure`."""
    from headrace.lab.calibration import BadCalibration
    from headrace.wiring.model import close, load, warm_up

    with progress(f"loading {given.model.model}"):
        loaded = load(given)
        warm_up(loaded)
    try:
        yield Measuring(loaded, given.scheduler.max_num_seqs, base_url, api_key, seed)
    except BadCalibration as error:
        raise ConfigError(str(error)) from None
    finally:
        close(loaded)


class Measuring:
    """Collects a machine's steps, and the HTTP overhead of the server at ``base_url``, turn by turn."""

    def __init__(self, loaded: Loaded, streams: int, base_url: str, api_key: str, seed: int) -> None:
        self._loaded, self._streams, self._seed = loaded, streams, seed
        self._steps: list[Measured] = []
        self._turns = 0
        self._base_url = base_url
        self._front = self._open_front(api_key) if base_url else None

    def turn(self) -> Sequence[Measured]:
        """Measure every batch size once, then the overhead; returns the steps of this turn.

        Raises:
            ConfigError: the server fails a request.
        """
        from headrace.lab.calibration import StepRecorder, fit, groups, measure_steps

        loaded, engine = self._loaded, self._loaded.engine
        engine.runner = recorder = StepRecorder(loaded.runner)
        work = groups(self._streams, loaded.ledger.max_model_len, self._seed, self._turns)
        steps = measure_steps(engine, recorder, work, engine.reset_prefix_cache)
        self._steps += steps
        engine.runner = loaded.runner
        self._turns += 1
        if self._front is not None:
            try:
                self._front.turn(fit(self._steps))
            except RuntimeError as error:
                raise ConfigError(f"{self._base_url}: {error}") from None
        return steps

    def calibration(self) -> Calibration:
        """The calibration from all turns so far."""
        from headrace.lab.bench.report import machine_facts
        from headrace.lab.calibration import Calibration, FrontSeconds, fit
        from headrace.wiring.model import decoder_cost

        loaded, found = self._loaded, fit(self._steps)
        front = FrontSeconds() if self._front is None else self._front.seconds(found)
        kind = loaded.facts.kind
        cost = decoder_cost(loaded.shape, kind)
        return Calibration(
            model=loaded.name,
            machine=str(machine_facts()["processor"] if kind == "cpu" else loaded.facts.name),
            kind=kind,
            dtype=", ".join(filter(None, (loaded.dtype, loaded.quantization))),
            kernels=loaded.kernels,
            kv_tokens=loaded.ledger.kv_tokens,
            max_model_len=loaded.ledger.max_model_len,
            fixed_tokens=cost.fixed_tokens,
            context_tokens=cost.context_tokens,
            steps=len(self._steps),
            state_bytes=loaded.ledger.state_bytes,
            state_cells=loaded.ledger.state_cells,
            **dataclasses.asdict(found),
            **{f"front_{name}": seconds for name, seconds in front._asdict().items()},
        )

    def _open_front(self, api_key: str) -> FrontMeasure:
        """The measurement of a running server's HTTP overhead, relative to this engine.

        Raises:
            ConfigError: no server responds at the address, or it fails a request.
        """
        import httpx

        from headrace.lab.bench.engine import EngineTarget
        from headrace.lab.calibration import FrontMeasure

        base_url, engine = self._base_url, self._loaded.engine
        alone = EngineTarget("engine", engine, _token_ids, before=engine.reset_prefix_cache)

        def forget() -> None:
            with open_client(base_url, api_key) as client:
                try:
                    client.post("/reset_prefix_cache").raise_for_status()
                except httpx.HTTPError as error:
                    raise RuntimeError(f"the prefix cache cannot be reset: {error}") from None

        server = make_server_target("server", base_url, "", api_key, EACH_TOKEN, 2 * self._streams, forget)
        try:
            return FrontMeasure(server, alone, self._streams, self._loaded.ledger.max_model_len)
        except RuntimeError as error:
            raise ConfigError(f"{base_url}: {error}") from None


def _token_ids(prompt: Prompt) -> tuple[int, ...]:
    """The token ids of a prompt; prompts of measurements have no text."""
    return prompt  # type: ignore[return-value]


def describe(calibration: Calibration) -> str:
    """A calibration in a few lines, in microseconds."""
    from headrace.lab.calibration import BENDS

    c = calibration
    micro = [f"{1e6 * seconds:.4g}" for seconds in c.tokens]
    tokens = " ".join(f"{each} from {bend}" for each, bend in zip(micro, BENDS, strict=True))
    return (
        f"{c.model} on {c.machine}, {c.dtype}, kernels {c.kernels}: {c.steps} steps\n"
        f"device, µs  step {1e6 * c.step:.4g} row {1e6 * c.row:.4g} token {tokens}\n"
        f"            context {1e6 * c.context:.4g} read {1e6 * c.read:.4g} sample {1e6 * c.sample:.4g}\n"
        f"host, µs    step {1e6 * c.host_step:.4g} row {1e6 * c.host_row:.4g}\n"
        f"front, µs   request {1e6 * c.front_request:.4g} token {1e6 * c.front_token:.4g} step {1e6 * c.front_step:.4g}"
        f" event {1e6 * c.front_event:.4g}"
        f" stall {1e6 * c.front_stall:.4g} wake {1e6 * c.front_wake:.4g} busy {1e6 * c.front_busy:.4g}\n"
        f"error       p50 {100 * c.error_p50:.1f} %, p90 {100 * c.error_p90:.1f} %"
    )
