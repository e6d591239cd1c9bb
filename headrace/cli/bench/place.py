"""Where ``sweep`` and ``tune`` run: the engine in this process, or a simulated device; and their flags for it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from headrace.cli.options import one_of
from headrace.cli.output import progress
from headrace.config import ConfigError, Options

if TYPE_CHECKING:
    from headrace.wiring.evaluator import Evaluator

PANEL = "Machine"

SimulatedDevice = Annotated[
    str,
    typer.Option(
        metavar="DEVICE",
        help="Simulate this device instead of using this machine: A100-80G, H100-SXM, H200, MI300X or cpu "
        "(default: none).",
        rich_help_panel=PANEL,
    ),
]
Calibration = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Calibration of a real machine, made by headrace bench calibrate, to simulate (default: none).",
        rich_help_panel=PANEL,
    ),
]
Degree = Annotated[
    int,
    typer.Option(min=1, help="Devices of the simulated replica (tensor parallelism).", rich_help_panel=PANEL),
]


class Place(NamedTuple):
    """The flags of a simulated device; with their defaults, nothing is simulated."""

    device: str = ""
    calibration: Path | None = None
    degree: int = 1

    @property
    def simulated(self) -> bool:
        """Whether a device is simulated."""
        return bool(self.device) or self.calibration is not None


def simulated_evaluator(given: Options, place: Place) -> Evaluator:
    """The evaluator over a simulated device.

    Raises:
        ConfigError: an unknown device, model or data type, a calibration that cannot be read, or both flags.
    """
    from headrace.lab.plan.roofline import KV_BYTES, WEIGHTS, Replica, UnknownDevice
    from headrace.lab.plan.roofline import device as device_spec
    from headrace.wiring import evaluator as made
    from headrace.wiring.simulation import read_calibration, shape_of

    length = given.model.max_model_len
    if place.calibration is not None:
        if place.device:
            raise ConfigError("--calibration and --simulated-device each name a machine: give one of them")
        return made.calibrated_evaluator(given, read_calibration(place.calibration), length)
    try:
        spec = device_spec(place.device)
    except UnknownDevice as error:
        raise ConfigError(f"--simulated-device: {error}") from None
    shape = shape_of(given.model.model)
    if shape.num_kv_heads % place.degree:
        raise ConfigError(f"--degree {place.degree}: {shape.name} has {shape.num_kv_heads} KV heads")
    weights = one_of("--quantization", given.model.quantization or "bfloat16", WEIGHTS)
    kv = "bfloat16" if given.model.kv_cache_dtype == "auto" else "int8"
    precision = WEIGHTS[weights]._replace(kv_bytes=KV_BYTES[kv])
    return made.simulated_evaluator(given, Replica(shape, spec, place.degree, precision), length)


def open_evaluator(
    given: Options, place: Place, max_num_seqs: int, max_num_batched_tokens: int | None
) -> Evaluator:
    """The evaluator of these flags, with room for engines up to these sizes.

    Raises:
        ConfigError: as `simulated_evaluator`, or the model cannot be loaded.
    """
    if place.simulated:
        return simulated_evaluator(given, place)
    from headrace.wiring.evaluator import loaded_evaluator

    with progress(f"loading {given.model.model}"):
        return loaded_evaluator(given, max_num_seqs, max_num_batched_tokens)
