"""The common base of both designs of experiments: status, remaining time, and log."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from enum import StrEnum
from typing import Any, NamedTuple

from headrace.core.ports import Watcher
from headrace.tuning.experiments.arms import Assignment
from headrace.tuning.experiments.evidence import Interval
from headrace.tuning.experiments.spec import Spec
from headrace.tuning.steering.settings import AnyValue

MOST_LINES = 1000
"""Maximum number of stored log lines; lines in the middle of a longer log are dropped."""

MOST_POINTS = 500
"""Maximum number of points in the curve of the effect over time."""


class Status(StrEnum):
    """``better`` and ``worse`` refer to the treatment; ``undecided``: the time ended without significance."""

    RUNNING = "running"
    BETTER = "better"
    WORSE = "worse"
    UNDECIDED = "undecided"
    ROLLED_BACK = "rolled_back"
    STOPPED = "stopped"


class Line(NamedTuple):
    """A line of an experiment's log: the seconds since it began, and what happened."""

    seconds: float
    what: str


class Run:
    """An experiment; ``began`` is the engine's time.

    The setting has its control value before the first `advance`. ``assignment`` assigns requests to arms (None: the
    whole engine has one value at a time). ``meter`` must receive all events while the experiment runs, and none
    afterwards.
    """

    design = ""
    meter: Watcher
    assignment: Assignment | None = None

    def __init__(self, experiment_id: str, spec: Spec, began: float, spent: float = 0.0) -> None:
        self.id = experiment_id
        self.spec = spec
        self.status = Status.RUNNING
        self.why = ""
        self.due = began
        self.log: list[Line] = []
        self._curve: list[dict[str, Any]] = []
        self._text = ""  # of an ended experiment, as it is stored
        self._spent = spent  # before the last restart
        self._began = began

    @property
    def value(self) -> AnyValue:
        """The required value of the setting, for all requests without a value of their own."""
        return self.spec.treatment if self.adopted else self.spec.control

    @property
    def arm(self) -> str:
        """The current arm."""
        return "control"

    def advance(self, now: float) -> None:
        """Do everything that is due by ``now``."""
        raise NotImplementedError

    def seconds(self, now: float) -> float:
        """Seconds that it has run."""
        return self._spent + (now - self._began if self.status is Status.RUNNING else 0.0)

    def note(self, what: str, now: float) -> None:
        """Write a line into the log."""
        self._text = ""
        self.log.append(Line(round(self.seconds(now), 3), what))
        if len(self.log) > MOST_LINES:
            del self.log[MOST_LINES // 2]

    def stop(self, status: Status, why: str, now: float) -> None:
        """End the experiment; the setting returns to its control value."""
        if self.status is Status.RUNNING:
            self.note(f"{status.value}: {why}", now)
            self._spent = self.seconds(now)
            self.status, self.why = status, why
            self.due = math.inf

    @property
    def adopted(self) -> bool:
        """Whether the treatment was adopted."""
        return self.status is Status.BETTER and self.spec.adopt

    def roll_back(self, why: str, now: float) -> None:
        """Undo an adopted treatment; the setting returns to its control value."""
        self.status, self.why = Status.ROLLED_BACK, f"rolled back {why}"
        self.note(f"{self.status.value}: {why}", now)

    def report(self) -> dict[str, Any]:
        """The report as JSON: effect with its interval, guards, decision, log."""
        return {
            "id": self.id,
            "object": "experiment",
            "design": self.design,
            **asdict(self.spec),
            "status": self.status.value,
            "why": self.why,
            "arm": self.arm,
            "log": [line._asdict() for line in self.log],
        }

    def windows(self) -> list[dict[str, Any]]:
        """The measured windows, for a plot; empty if the arms are not windows."""
        return []

    def curve(self) -> list[dict[str, Any]]:
        """The effect and its interval over time, for a plot; ``check`` is control against control (A/A)."""
        return list(self._curve)

    def draw(self, point: dict[str, Any]) -> None:
        """Add a point to the curve; when the curve is full, every second point is dropped."""
        if len(self._curve) >= MOST_POINTS:
            del self._curve[1::2]
        self._curve.append(point)

    def stored(self, now: float) -> str:
        """`to_json` as text, made once when the experiment has ended: it is stored whenever one that runs measures."""
        if self.status is Status.RUNNING:
            return json.dumps(self.to_json(now))
        self._text = self._text or json.dumps(self.to_json(now))
        return self._text

    def to_json(self, now: float) -> dict[str, Any]:
        """The experiment, so that it can be read back."""
        return {
            "id": self.id,
            "spec": asdict(self.spec),
            "status": self.status.value,
            "why": self.why,
            "spent_seconds": self.seconds(now),
            "log": [list(line) for line in self.log],
        }

    def _restored(self, stored: Mapping[str, Any]) -> None:
        self.status, self.why = Status(stored["status"]), stored["why"]
        self.log = [Line(*line) for line in stored.get("log", [])]
        if self.status is not Status.RUNNING:
            self.due = math.inf


def bounds_of(interval: Interval, *, relative: bool = True) -> list[float] | None:
    """An interval as JSON: relative changes of an interval of logarithms, or differences; None if it is infinite."""
    if math.isinf(interval.high):
        return None
    return [math.expm1(interval.low), math.expm1(interval.high)] if relative else list(interval)
