"""How long steps take on a machine that was measured: a few coefficients, fitted once and kept as a small file.

```
 device  step + row·rows + token·tokens + context·contexts + read·read_tokens + sample·samples
 host    step + row·rows                                                        (planning, packing, telling)
```
All coefficients are at least 0, so that no step is predicted to take less for doing more. The fit minimizes relative
errors, since a step of a millisecond matters as much as one of a second, and bounds the weight of steps that were
disturbed (Huber, 1964, by reweighting). On a busy machine it finds the typical step, not the undisturbed one.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.lab.simulate.front import Front
from headrace.lab.simulate.work import StepWork

LEAST_STEPS = 30
"""Fewer measured steps than this say too little."""

_TOLERATED = 1.345
"""Errors beyond so many standard deviations lose weight: 95 % as efficient as least squares on clean data."""

_REWEIGHTINGS = 30


class BadCalibration(ValueError):
    """A file that is no calibration, or measurements that make none; the message says what is wrong."""


class Measured(NamedTuple):
    """One step of a real runner: its work, the device's seconds and the host's before it (NaN: it had paused)."""

    work: StepWork
    seconds: float
    host_seconds: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """A machine that runs a model, in numbers.

    ``kind`` (``cpu`` or ``cuda``) chooses the defaults that an engine has there, ``fixed_tokens`` and
    ``context_tokens`` are the `StepCost` that it plans with, ``kv_tokens`` is what its cache holds. The ``front``
    coefficients are those of `Front`; where ``shared_cores`` is set, the front works on the cores that compute, and
    each step takes so much longer. ``error_p50`` and ``error_p90`` are relative errors on the measured steps.
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
    step: float
    row: float
    token: float
    context: float
    read: float
    sample: float
    host_step: float
    host_row: float
    error_p50: float
    error_p90: float
    front_request: float = 0.0
    front_event: float = 0.0

    def front(self) -> Front:
        """A server's HTTP side as it was measured."""
        return Front(self.front_request, self.front_event)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read_file(cls, path: Path) -> Calibration:
        """Read what `write` wrote.

        Raises:
            BadCalibration: the file lacks a field, has an unknown one or a value of the wrong kind.
            OSError: no such file.
        """
        try:
            values: Any = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise BadCalibration(f"{path}: no JSON: {error}") from None
        known = {each.name: str(each.type) for each in dataclasses.fields(cls)}
        if not isinstance(values, dict) or not values.keys() <= known.keys():
            raise BadCalibration(f"{path}: no calibration; make one with: headrace bench calibrate")
        for name, value in values.items():
            if not _fits(value, known[name]):
                raise BadCalibration(f"{path}: {name} must be {known[name]}, got {value!r}")
        try:
            return cls(**values)
        except TypeError as error:
            raise BadCalibration(f"{path}: {error}") from None


def _fits(value: Any, kind: str) -> bool:
    if kind == "float":
        return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
    return type(value).__name__ == kind and (kind != "int" or value >= 0)


class Calibrated:
    """A `Device` that behaves as the measured one did; blocks that are moved cost nothing beside."""

    def __init__(self, calibration: Calibration) -> None:
        c = calibration
        self._device = (c.step, c.row, c.token, c.context, c.read, c.sample)
        self._host_step = c.host_step
        self._host_row = c.host_row + c.front_event

    def seconds(self, work: StepWork) -> float:
        step, row, token, context, read, sample = self._device
        return (
            step
            + row * work.rows
            + token * work.tokens
            + context * work.contexts
            + read * work.read_tokens
            + sample * work.samples
        )

    def host_seconds(self, work: StepWork) -> float:
        return self._host_step + self._host_row * work.rows


class Fit(NamedTuple):
    """Coefficients of `Calibration` from measured steps, and how well they explain them."""

    step: float
    row: float
    token: float
    context: float
    read: float
    sample: float
    host_step: float
    host_row: float
    error_p50: float
    error_p90: float


def fit(measured: Sequence[Measured]) -> Fit:
    """Coefficients for the steps that were measured.

    Raises:
        BadCalibration: fewer than `LEAST_STEPS` steps.
    """
    if len(measured) < LEAST_STEPS:
        raise BadCalibration(f"{len(measured)} steps were measured; at least {LEAST_STEPS} are needed")
    features = np.array([(1, *each.work[:5]) for each in measured], dtype=np.float64)
    device, errors = _robust(features, np.array([each.seconds for each in measured]))
    hosts = [each for each in measured if math.isfinite(each.host_seconds)]
    host_features = np.array([(1, each.work.rows) for each in hosts], dtype=np.float64)
    host, _ = _robust(host_features, np.array([each.host_seconds for each in hosts]))
    p50, p90 = np.percentile(np.abs(errors), [50.0, 90.0])
    return Fit._make([*device.tolist(), *host.tolist(), float(p50), float(p90)])


_Floats = npt.NDArray[np.float64]


def _robust(features: _Floats, seconds: _Floats) -> tuple[_Floats, _Floats]:
    """Coefficients at least 0, and the relative errors of what they predict.

    An error is divided by the geometric mean of prediction and measurement, which is nearly the difference of their
    logarithms: twice as much and half as much weigh the same.
    """
    columns = features.max(axis=0)
    columns[columns == 0.0] = 1.0
    features = features / columns
    predicted, weights = seconds, np.ones(len(seconds))
    for _ in range(_REWEIGHTINGS):
        scale = np.sqrt(seconds * np.maximum(predicted, 0.01 * seconds))
        found = _non_negative(features * (weights / scale)[:, None], weights * seconds / scale)
        predicted = features @ found
        errors = np.abs(predicted - seconds) / scale
        tolerated = _TOLERATED * 1.4826 * np.median(errors) + 1e-9
        weights = np.sqrt(np.minimum(1.0, tolerated / np.maximum(errors, 1e-12)))
    return found / columns, predicted / seconds - 1.0


def _non_negative(matrix: _Floats, target: _Floats) -> _Floats:
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
