"""Random assignment of units to control and treatment by a hash.

A unit is a request, or a tenant for a window of time. The hash of seed and unit name decides, so a unit is in the same
arm everywhere, also after a restart.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import NamedTuple


class By(StrEnum):
    """The unit of an experiment: the engine for a time, one request, or one tenant for a time."""

    TIME = "time"
    REQUEST = "request"
    TENANT = "tenant"


class Assignment(NamedTuple):
    """The assignment of an experiment that began at ``began``; a tenant keeps its arm for ``period_seconds``."""

    by: By
    seed: int
    began: float
    period_seconds: float

    def unit(self, request_id: str, tenant: str, arrived: float) -> str:
        """The name of a request's unit."""
        return request_id if self.by is By.REQUEST else f"{self.period(arrived)}:{tenant}"

    def period(self, at: float) -> int:
        """The number of the period."""
        return int((at - self.began) // self.period_seconds)

    def treats(self, unit: str) -> bool:
        """Whether a unit has the treatment."""
        return hashlib.sha256(f"{self.seed}:{unit}".encode()).digest()[0] < 128
