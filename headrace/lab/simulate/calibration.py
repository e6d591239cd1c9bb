"""How long steps take on a machine that was measured: a few coefficients, fitted once and kept as a small file.

```
 device  step + row·rows + few·min(tokens, 8) + token·tokens + many·max(0, tokens - 128)
              + context·contexts + read·read_tokens + sample·samples
 host    step + row·rows                                       (planning, packing, telling)
```
Two bends let the cost of a token change: the first few may cost more than those that follow (matrices of a few rows
are slow on a CPU), and many may cost more than few (on a GPU they come free until its arithmetic is busy). Next on the
road: `fit` finds the coefficients.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from operator import mul
from pathlib import Path
from typing import Any

from headrace.lab.simulate.front import Front
from headrace.lab.simulate.work import StepWork

FEW = 8
MANY = 128
"""Tokens of a step at which the cost of one more changes."""


class BadCalibration(ValueError):
    """A file that is no calibration, or measurements that make none; the message says what is wrong."""


def features(work: StepWork) -> tuple[float, ...]:
    """What the device's coefficients are multiplied with, in the order of the fields of `Calibration`."""
    tokens = work.tokens
    return (
        1,
        work.rows,
        min(tokens, FEW),
        tokens,
        max(0, tokens - MANY),
        work.contexts,
        work.read_tokens,
        work.samples,
    )


@dataclass(frozen=True, slots=True)
class Calibration:
    """A machine that runs a model, in numbers.

    ``kind`` (``cpu`` or ``cuda``) chooses the defaults that an engine has there, ``fixed_tokens`` and
    ``context_tokens`` are the `StepCost` that it plans with, ``kv_tokens`` is what its cache holds. The ``front``
    coefficients are those of `Front`; its work for an event also keeps the engine's host part waiting, for the two
    share an interpreter. ``error_p50`` and ``error_p90`` are relative errors on the measured steps.
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
    few: float
    token: float
    many: float
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
        self._device = (c.step, c.row, c.few, c.token, c.many, c.context, c.read, c.sample)
        self._host_step = c.host_step
        self._host_row = c.host_row + c.front_event

    def seconds(self, work: StepWork) -> float:
        seconds: float = sum(map(mul, self._device, features(work)))
        return seconds

    def host_seconds(self, work: StepWork) -> float:
        return self._host_step + self._host_row * work.rows
