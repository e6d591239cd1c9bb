"""Step times of a measured machine: a few coefficients, fitted once and stored in a small file.

```
 device  step + row·rows + sum over ranges of tokens_i·(tokens in range i)
              + context·contexts + read·read_tokens + sample·samples
 host    step + row·rows                                       (planning, packing, events)
 front   step + event·samples, of a step that samples          (writing the output of the step before)
```
The cost of one more token depends on their number: with few tokens a step is bound by reading the weights, with many by
arithmetic. So each range of tokens has its own cost per token. `fit` finds the coefficients.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.files import replace_text
from headrace.lab.simulate.runner import Front, StepWork

BENDS = (0, 8, 32, 128, 512)
"""Numbers of tokens of a step at which the cost of one more token changes."""

_SECONDS = (
    *("step", "row", "context", "read", "sample", "host_step", "host_row"),
    *(
        "front_request",
        "front_step",
        "front_event",
        "front_stall",
        "front_token",
        "front_wake",
        "front_busy",
    ),
)
_RANGES = tuple(pairwise((*BENDS, 1 << 62)))


class BadCalibration(ValueError):
    """A file that is not a calibration, or too few measurements."""


def features(work: StepWork) -> tuple[int, ...]:
    """The factors of the device's coefficients, in the order of `Calibration.device`."""
    tokens = work.tokens
    return (
        1,
        work.rows,
        *[min(tokens, end) - start if tokens > start else 0 for start, end in _RANGES],
        work.contexts,
        work.read_tokens,
        work.samples,
    )


def device_seconds(coefficients: tuple[float, ...], work: StepWork) -> float:
    """The device's time for a step; the coefficients are those of `Calibration.device`."""
    seconds: float = sum(map(mul, coefficients, features(work)))
    return seconds


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients of the time of a step in seconds, and the percentiles of their relative error on the measured steps.

    ``tokens`` are the costs of one more token from each of `BENDS` on.
    """

    step: float
    row: float
    tokens: tuple[float, ...]
    context: float
    read: float
    sample: float
    host_step: float
    host_row: float
    error_p50: float
    error_p90: float

    @property
    def device(self) -> tuple[float, ...]:
        """The device's coefficients, in the order of `features`."""
        return (self.step, self.row, *self.tokens, self.context, self.read, self.sample)

    def prompt_seconds(self, tokens: int) -> float:
        """Seconds of a step that computes one prompt alone, including the host's part."""
        return self._seconds(StepWork(1, tokens, tokens * (tokens + 1) // 2, tokens, 1))

    def decode_seconds(self, rows: int, context: int) -> float:
        """Seconds of a decode step of ``rows`` sequences with ``context`` tokens each, including the host's part."""
        return self._seconds(StepWork(rows, rows, rows * context, rows * context, rows))

    def _seconds(self, work: StepWork) -> float:
        return device_seconds(self.device, work) + self.host_step + self.host_row * work.rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration(Fit):
    """Step times of a machine that runs a model, in seconds.

    ``kind`` (``cpu`` or ``cuda``) chooses the engine's defaults, ``fixed_tokens`` and ``context_tokens`` are its
    `StepCost`, ``kv_tokens`` is the capacity of its KV cache. Of a model with recurrent states, ``state_bytes`` are
    those of a sequence, and ``state_cells`` counts the checkpoints.

    ``front_request``, ``front_token``, ``front_event``, ``front_stall``, ``front_wake`` and ``front_busy`` are those of
    `Front`. Writing the output of a step also delays the next step, because both share an interpreter and cores: by
    ``front_step`` seconds per step, and by ``front_event`` seconds per chunk.
    """

    model: str
    machine: str
    kind: str
    dtype: str
    kernels: str
    kv_tokens: int
    max_model_len: int
    fixed_tokens: float
    context_tokens: float
    steps: int
    front_request: float = 0.0
    front_step: float = 0.0
    front_event: float = 0.0
    front_stall: float = 0.0
    front_token: float = 0.0
    front_wake: float = 0.0
    front_busy: float = 0.0
    state_bytes: int = 0
    state_cells: int = 0

    def front(self) -> Front:
        """The measured HTTP overhead of a server."""
        return Front(
            self.front_request,
            self.front_event,
            self.front_stall,
            self.front_token,
            self.front_wake,
            self.front_busy,
        )

    def at(self, pace: float) -> Calibration:
        """The calibration of a machine that takes ``pace`` times as long for everything."""
        slower = {name: pace * getattr(self, name) for name in _SECONDS}
        return dataclasses.replace(self, tokens=tuple(pace * each for each in self.tokens), **slower)

    def write(self, path: Path) -> None:
        replace_text(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def read_file(cls, path: Path) -> Calibration:
        """Reads a file that `write` wrote.

        Raises:
            BadCalibration: the file lacks a field, has an unknown one or a value of the wrong kind.
            OSError: no such file.
        """
        try:
            values: Any = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise BadCalibration(f"{path} is not valid JSON: {error}") from None
        known = {each.name: str(each.type) for each in dataclasses.fields(cls)}
        if not isinstance(values, dict) or not values.keys() <= known.keys():
            raise BadCalibration(f"{path} is not a calibration; make one with: headrace bench calibrate")
        for name, value in values.items():
            if not _fits(value, known[name]):
                raise BadCalibration(f"{path}: {name} must be {known[name]}, got {value!r:.80}")
        if "tokens" in values:
            values["tokens"] = tuple(values["tokens"])
        try:
            return cls(**values)
        except TypeError as error:
            raise BadCalibration(f"{path}: {error}") from None


def _fits(value: Any, kind: str) -> bool:
    if kind == "float":
        return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
    if kind.startswith("tuple"):
        return (
            isinstance(value, list)
            and len(value) == len(BENDS)
            and all(_fits(each, "float") for each in value)
        )
    return type(value).__name__ == kind and (kind != "int" or value >= 0)


class Calibrated:
    """A `Device` with the measured step times; moving blocks or states takes no extra time."""

    def __init__(self, calibration: Calibration) -> None:
        c = calibration
        self._device = c.device
        self._host_step, self._host_row = c.host_step, c.host_row
        self._front_step, self._front_event = c.front_step, c.front_event

    def seconds(self, work: StepWork) -> float:
        return device_seconds(self._device, work)

    def host_seconds(self, work: StepWork) -> float:
        seconds = self._host_step + self._host_row * work.rows
        if not work.samples:
            return seconds
        return seconds + self._front_step + self._front_event * work.samples


LEAST_STEPS = 30
"""Minimum number of measured steps."""

_TOLERATED = 1.345
"""Huber's threshold in standard deviations: 95 % as efficient as least squares on normal errors."""

_REWEIGHTINGS = 30


class Measured(NamedTuple):
    """One step of a real runner: its work, device seconds, and host seconds before it (NaN after a pause)."""

    work: StepWork
    seconds: float
    host_seconds: float


def fit(measured: Sequence[Measured]) -> Fit:
    """Fits the coefficients to measured steps.

    Raises:
        BadCalibration: fewer than `LEAST_STEPS` steps.
    """
    if len(measured) < LEAST_STEPS:
        raise BadCalibration(f"{len(measured)} steps were measured; at least {LEAST_STEPS} are needed")
    sums = np.array([features(each.work) for each in measured], dtype=np.float64)
    device, errors = _robust(sums, np.array([each.seconds for each in measured]))
    hosts = [each for each in measured if math.isfinite(each.host_seconds)]
    host_features = np.array([(1, each.work.rows) for each in hosts], dtype=np.float64)
    host, _ = _robust(host_features, np.array([each.host_seconds for each in hosts]))
    p50, p90 = np.percentile(np.abs(errors), [50.0, 90.0])
    step, row, *tokens, context, read, sample = device.tolist()
    host_step, host_row = host.tolist()
    return Fit(
        *(step, row, tuple(tokens), context, read, sample, host_step, host_row),
        error_p50=float(p50),
        error_p90=float(p90),
    )


Floats = npt.NDArray[np.float64]


def _robust(sums: Floats, seconds: Floats) -> tuple[Floats, Floats]:
    """Coefficients of at least 0, and the relative errors of their predictions.

    An error is divided by the geometric mean of prediction and measurement, which approximates the difference of their
    logarithms: factors of 2 and 1/2 weigh the same.
    """
    columns = sums.max(axis=0)
    columns[columns == 0.0] = 1.0
    sums = sums / columns
    predicted, weights = seconds, np.ones(len(seconds))
    for _ in range(_REWEIGHTINGS):
        scale = np.sqrt(seconds * np.maximum(predicted, 0.01 * seconds))
        found = non_negative(sums * (weights / scale)[:, None], weights * seconds / scale)
        predicted = sums @ found
        errors = np.abs(predicted - seconds) / scale
        tolerated = _TOLERATED * 1.4826 * np.median(errors) + 1e-9
        weights = np.sqrt(np.minimum(1.0, tolerated / np.maximum(errors, 1e-12)))
    return found / columns, predicted / seconds - 1.0


def non_negative(matrix: Floats, target: Floats) -> Floats:
    """Least squares with all unknowns at least 0 (Lawson and Hanson, 1974, chapter 23)."""
    count = matrix.shape[1]
    found, free = np.zeros(count), np.zeros(count, dtype=bool)
    for _ in range(3 * count):
        pull = matrix.T @ (target - matrix @ found)
        pull[free] = 0.0
        if pull.max() <= 1e-10 * len(target):
            break
        free[int(pull.argmax())] = True
        while True:
            wanted = np.zeros(count)
            wanted[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
            below = free & (wanted <= 0.0)
            if not below.any():
                found = wanted
                break
            step = (found[below] / (found[below] - wanted[below])).min()
            found = found + step * (wanted - found)
            free &= found > 1e-15
            found[~free] = 0.0
    return found
