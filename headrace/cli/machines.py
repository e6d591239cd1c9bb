"""Flags of simulated machines, which several commands share, and the machines that they describe."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.options import duration, one_of
from headrace.cli.output import progress
from headrace.config import ConfigError, Options, SchedulerOptions
from headrace.lab.forced_acceptance import BadRates, Speculation, rates_of

if TYPE_CHECKING:
    from headrace.lab.plan.roofline import DeviceSpec, ModelShape, Precision, Replica
    from headrace.lab.simulate.fleet import Wire
    from headrace.wiring.evaluator import Evaluator
    from headrace.wiring.simulation import Machine

MACHINE = "Machine"
DRAFTS = "Speculative decoding"

DEVICES = (
    "A100-80G, H100-SXM, H200, B200, L40S, L4, A10G, MI300X, cpu, or a .json file with a device of your own"
)

Shape = Annotated[
    str,
    typer.Argument(
        help="Model: the name of a known shape such as llama-3.1-8b, or a folder or Hugging Face name with a "
        "config.json (default: llama-3.1-8b).",
        show_default=False,
        metavar="MODEL",
    ),
]
Weights = Annotated[
    str,
    typer.Option(
        help="Data type of the weights: bfloat16, int8, int4, or mxfp4 (experts alone).",
        rich_help_panel=MACHINE,
    ),
]
Kv = Annotated[
    str, typer.Option(help="Data type of the KV cache: bfloat16 or int8.", rich_help_panel=MACHINE)
]
Routing = Annotated[
    str,
    typer.Option(
        help="Routing policy: least-loaded, round-robin or prefix-affinity.", rich_help_panel=MACHINE
    ),
]


@dataclass(frozen=True)
class MachineFlags:
    """One simulated replica."""

    shape: Shape = "llama-3.1-8b"
    device: Annotated[str, typer.Option(help=f"Device: {DEVICES}.", rich_help_panel=MACHINE)] = "H100-SXM"
    degree: Annotated[
        int, typer.Option(min=1, help="Devices per replica (tensor parallelism).", rich_help_panel=MACHINE)
    ] = 1
    weights: Weights = "bfloat16"
    kv: Kv = "bfloat16"
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="Calibration of a real machine, made by headrace bench calibrate; replaces MODEL and --device.",
            rich_help_panel=MACHINE,
        ),
    ] = None
    front: Annotated[
        bool,
        typer.Option(
            help="Simulate the HTTP server of a --calibration too, not only its engine.",
            rich_help_panel=MACHINE,
        ),
    ] = True
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Maximum context length in tokens, prompt plus output (default: what the memory holds).",
            rich_help_panel=MACHINE,
        ),
    ] = None


def make_machine(flags: MachineFlags, options: Options) -> tuple[Options, Machine]:
    """The machine, and the options with the device's own default of ``max_num_seqs`` where none was chosen.

    Raises:
        ConfigError: an unknown device, model or data type, or a calibration that cannot be read.
    """
    from headrace.wiring.simulation import (
        calibrated_machine,
        read_calibration,
        roofline_machine,
        shape_of,
    )

    if flags.calibration is not None:
        calibration = read_calibration(flags.calibration)
        return options, calibrated_machine(calibration, options.cache, flags.max_model_len, flags.front)
    spec = known_device("--device", flags.device)
    precision = read_precision(flags.weights, flags.kv)
    replica = parallel_replica(shape_of(flags.shape), spec, flags.degree, precision)
    if "max_num_seqs" not in options.chosen:
        most = options.scheduler.max_num_batched_tokens or spec.max_num_seqs
        plans = dataclasses.replace(options.scheduler, max_num_seqs=min(spec.max_num_seqs, most))
        options = dataclasses.replace(options, scheduler=plans)
    return options, roofline_machine(replica, options.cache, options.scheduler, flags.max_model_len)


@dataclass(frozen=True)
class PlaceFlags:
    """A simulated device in place of this machine; with the defaults, nothing is simulated."""

    simulated_device: Annotated[
        str,
        typer.Option(
            metavar="DEVICE",
            help=f"Simulate this device instead of using this machine: {DEVICES} (default: none).",
            rich_help_panel=MACHINE,
        ),
    ] = ""
    calibration: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Calibration of a real machine, made by headrace bench calibrate, to simulate (default: none).",
            rich_help_panel=MACHINE,
        ),
    ] = None
    degree: Annotated[
        int,
        typer.Option(
            min=1, help="Devices of the simulated replica (tensor parallelism).", rich_help_panel=MACHINE
        ),
    ] = 1

    @property
    def simulated(self) -> bool:
        """Whether a device is simulated."""
        return bool(self.simulated_device) or self.calibration is not None


def simulated_evaluator(place: PlaceFlags, given: Options) -> Evaluator:
    """The evaluator over the simulated device.

    Raises:
        ConfigError: an unknown device, model or data type, a calibration that cannot be read, or both flags.
    """
    from headrace.wiring import evaluator as made
    from headrace.wiring.simulation import read_calibration

    length = given.model.max_model_len
    if place.calibration is not None:
        _refuse_two(place)
        return made.calibrated_evaluator(given, read_calibration(place.calibration), length)
    return made.simulated_evaluator(given, _replica(place, given), length)


def placed_machine(place: PlaceFlags, given: Options) -> Machine:
    """The engine's hardware that the flags name, without an HTTP server.

    Raises:
        ConfigError: as `simulated_evaluator`.
    """
    from headrace.wiring.simulation import calibrated_machine, read_calibration, roofline_machine

    length = given.model.max_model_len
    if place.calibration is not None:
        _refuse_two(place)
        return calibrated_machine(read_calibration(place.calibration), given.cache, length, front=False)
    return roofline_machine(_replica(place, given), given.cache, given.scheduler, length)


def _refuse_two(place: PlaceFlags) -> None:
    if place.simulated_device:
        raise ConfigError("--calibration and --simulated-device each name a machine: give one of them")


def _replica(place: PlaceFlags, given: Options) -> Replica:
    """The replica of ``--simulated-device`` with the model and data types of the options."""
    from headrace.wiring.simulation import shape_of

    spec = known_device("--simulated-device", place.simulated_device)
    kv = kv_of(given.model.kv_cache_dtype)
    precision = read_precision(given.model.quantization or "bfloat16", kv, "--quantization")
    shape, whole_experts = shape_of(given.model.model), given.model.enable_expert_parallel
    return parallel_replica(shape, spec, place.degree, precision, whole_experts)


def open_evaluator(
    place: PlaceFlags, given: Options, max_num_seqs: int, max_num_batched_tokens: int | None
) -> Evaluator:
    """The evaluator of the simulated device or of this machine, with room for engines up to these sizes.

    Raises:
        ConfigError: as `simulated_evaluator`, or the model cannot be loaded.
    """
    if place.simulated:
        return simulated_evaluator(place, given)
    from headrace.wiring.evaluator import loaded_evaluator

    with progress(f"loading {given.model.model}"):
        return loaded_evaluator(given, max_num_seqs, max_num_batched_tokens)


def known_device(flag: str, name: str) -> DeviceSpec:
    """A built-in device that a flag names.

    Raises:
        ConfigError: there is none of this name.
    """
    from headrace.lab.plan.roofline import UnknownDevice, device

    try:
        return device(name)
    except UnknownDevice as error:
        raise ConfigError(f"{flag}: {error}") from None


def read_precision(weights: str, kv: str, flag: str = "--weights") -> Precision:
    """The precision that ``flag`` and ``--kv`` name.

    Raises:
        ConfigError: an unknown data type.
    """
    from headrace.lab.plan.roofline import KV_BYTES, WEIGHTS

    return WEIGHTS[one_of(flag, weights, WEIGHTS)]._replace(kv_bytes=KV_BYTES[one_of("--kv", kv, KV_BYTES)])


def kv_of(kv_cache_dtype: str) -> str:
    """The name in ``--kv`` of a ``--kv-cache-dtype``, where a device computes in bfloat16; fp8 is as small as int8."""
    return "bfloat16" if kv_cache_dtype in ("auto", "bfloat16") else "int8"


def parallel_replica(
    shape: ModelShape, spec: DeviceSpec, degree: int, precision: Precision, whole_experts: bool = False
) -> Replica:
    """A replica of ``degree`` devices, with ``whole_experts`` on each or a part of every expert.

    Raises:
        ConfigError: the heads of keys and values, or the experts, cannot be divided among them.
    """
    from headrace.lab.plan.roofline import Replica

    if shape.num_kv_heads % degree:
        raise ConfigError(f"--degree {degree}: {shape.name} has {shape.num_kv_heads} KV heads")
    if whole_experts and (shape.sparse is None or degree == 1 or shape.sparse.experts % degree):
        experts = shape.sparse.experts if shape.sparse else "no"
        raise ConfigError(
            f"--enable-expert-parallel: {shape.name} has {experts} experts; --degree must be above 1 and divide them"
        )
    return Replica(shape, spec, degree, precision, whole_experts)


@dataclass(frozen=True)
class TransferFlags:
    """The connection between prefill and decode replicas; `headrace.wiring.simulation.WIRE` explains the defaults."""

    transfer_bandwidth: Annotated[
        float,
        typer.Option(
            min=0.001,
            metavar="GB/S",
            help="Bandwidth of a device for KV blocks of other replicas, in GB per second.",
            rich_help_panel=MACHINE,
        ),
    ] = 25.0
    transfer_latency: Annotated[
        float,
        typer.Option(
            parser=duration,
            metavar="DURATION",
            help="Time from the end of a prefill until the decode replica has the request and can pull.",
            rich_help_panel=MACHINE,
        ),
    ] = 0.006
    transfer_at_once: Annotated[
        bool,
        typer.Option(
            "--transfer-at-once",
            help="Both replicas get a request at the same time, and blocks are pulled while the prompt is computed; "
            "the latency begins at the arrival.",
            rich_help_panel=MACHINE,
        ),
    ] = False

    def wire(self, degree: int) -> Wire:
        """The connection of a replica of ``degree`` devices."""
        from headrace.lab.simulate.fleet import Wire

        return Wire(self.transfer_latency, 1e9 * self.transfer_bandwidth * degree, self.transfer_at_once)


@dataclass(frozen=True)
class FleetFlags:
    """Simulated replicas and their queues."""

    replicas: Annotated[
        int, typer.Option(min=1, help="Number of engines behind a router.", rich_help_panel=MACHINE)
    ] = 1
    prefill_replicas: Annotated[
        list[int] | None,
        typer.Option(
            min=0,
            help="How many of --replicas only compute prompts for the others, which pull the KV blocks (P/D). "
            "Repeatable: each number is simulated and compared (default: none, all do both).",
            rich_help_panel=MACHINE,
        ),
    ] = None
    transfer: TransferFlags = field(default_factory=TransferFlags)
    routing: Routing = "least-loaded"
    max_num_queued_reqs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum number of waiting requests per replica; further ones are rejected (default: no limit).",
            rich_help_panel=MACHINE,
        ),
    ] = None
    max_num_queued_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum number of waiting prompt tokens per replica (default: no limit).",
            rich_help_panel=MACHINE,
        ),
    ] = None

    def pools(self) -> tuple[int, ...]:
        """The numbers of prefill replicas to simulate.

        Raises:
            ConfigError: one of them leaves no replica to generate tokens.
        """
        for count in self.prefill_replicas or ():
            if count >= self.replicas:
                raise ConfigError(
                    f"--prefill-replicas {count}: at least one of --replicas {self.replicas} must generate tokens"
                )
        return tuple(dict.fromkeys(self.prefill_replicas or (0,)))


ADAPTIVE = '{"method": "ngram"}'
"""Default of ``--speculative-config`` with ``--acceptance``: adaptive draft lengths. The method is ignored."""


@dataclass(frozen=True)
class DraftFlags:
    """Simulated speculative decoding."""

    acceptance: Annotated[
        str | None,
        typer.Option(
            metavar="RATES",
            help="Simulate speculative decoding: probability that a drafted token is accepted, 0.7 or by position "
            "0.8,0.6,0.5, or a file recorded by headrace serve --record-trace (default: no drafts).",
            rich_help_panel=DRAFTS,
        ),
    ] = None
    draft_cost: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Time of drafting a token as a share of a decode step, for a draft model.",
            rich_help_panel=DRAFTS,
        ),
    ] = 0.0

    def speculation(self) -> Speculation | None:
        """Acceptance rates as numbers, or from a recorded trace; None without ``--acceptance``.

        Raises:
            ConfigError: invalid rates, a cost without ``--acceptance``, or a trace without verified drafts.
        """
        if self.acceptance is None:
            if self.draft_cost:
                raise ConfigError(
                    f"--draft-cost {self.draft_cost:g} requires --acceptance: without it nothing is drafted"
                )
            return None
        path = Path(self.acceptance)
        try:
            rates = _recorded(path) if path.is_file() else rates_of(self.acceptance)
        except BadRates as error:
            raise ConfigError(f"--acceptance: {error}, or the file of a recorded trace") from None
        return Speculation(rates, self.draft_cost)


def _recorded(path: Path) -> tuple[float, ...]:
    from headrace.lab.replay.rerun import recorded_rates
    from headrace.lab.replay.trace import BadTrace, read_trace

    try:
        rates = recorded_rates(read_trace(path))
    except OSError as error:
        raise ConfigError(
            f"--acceptance {path} cannot be read: {(error.strerror or str(error)).lower()}"
        ) from None
    except BadTrace as error:
        raise ConfigError(f"--acceptance: {error}") from None
    if not rates:
        raise ConfigError(f"--acceptance {path}: no drafts were verified in this trace")
    return rates


def with_speculation(plans: SchedulerOptions, speculation: Speculation | None) -> SchedulerOptions:
    """The options with speculative decoding as given by the flags.

    Raises:
        ConfigError: ``--speculative-config`` without ``--acceptance``.
    """
    if speculation is None:
        if plans.speculative_config is not None:
            raise ConfigError(
                "--speculative-config: a simulation has no text to draft from; set --acceptance, for example to 0.7"
            )
        return plans
    return dataclasses.replace(plans, speculative_config=plans.speculative_config or ADAPTIVE)
