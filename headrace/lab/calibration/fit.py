"""Fit of a calibration's coefficients to measured steps.

All coefficients are at least 0, so that more work never has a shorter predicted time. The fit minimizes relative
errors, so short steps count as much as long ones, and limits the weight of outliers (Huber, 1964, by reweighting). On a
busy machine it finds the typical step, not the undisturbed one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.lab.calibration.values import BENDS, BadCalibration, device_seconds, features
from headrace.lab.simulate.work import StepWork

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


class Fit(NamedTuple):
    """Coefficients of `Calibration`, and the percentiles of their relative error on the measured steps."""

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

    def prompt_seconds(self, tokens: int) -> float:
        """Seconds of a step that computes one prompt alone, including the host's part."""
        return self._seconds(StepWork(1, tokens, tokens * (tokens + 1) // 2, tokens, 1))

    def decode_seconds(self, rows: int, context: int) -> float:
        """Seconds of a decode step of ``rows`` sequences with ``context`` tokens each, including the host's part."""
        return self._seconds(StepWork(rows, rows, rows * context, rows * context, rows))

    def _seconds(self, work: StepWork) -> float:
        device = (self.step, self.row, *self.tokens, self.context, self.read, self.sample)
        return device_seconds(device, work) + self.host_step + self.host_row * work.rows


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
    step, row, *rest = device.tolist()
    tokens, others = tuple(rest[: len(BENDS)]), rest[len(BENDS) :]
    return Fit._make([step, row, tokens, *others, *host.tolist(), float(p50), float(p90)])


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
