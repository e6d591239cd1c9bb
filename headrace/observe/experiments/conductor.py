"""The experiments of one server: at most one runs, and those that ended are kept.

It knows neither clock nor engine. `tick` says what a setting must become, and the caller changes it. `meter` must see
the events as long as it is not None, which is while an experiment runs: measuring costs time. A value that an
experiment has set returns to its control value when the experiment ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from headrace.core.ports import Watcher
from headrace.observe.experiments.arms import Assignment, By
from headrace.observe.experiments.experiment import Experiment
from headrace.observe.experiments.run import Run, Status
from headrace.observe.experiments.spec import BadExperiment, Spec, read_spec
from headrace.observe.experiments.unit_experiment import UnitExperiment
from headrace.observe.steering.settings import AnyValue, BadValue, Setting, checked

MOST_KEPT = 100
"""Experiments that have ended and are kept; older ones are forgotten."""


class Busy(RuntimeError):
    """An experiment runs already."""


class Superseded(RuntimeError):
    """A later experiment has changed the same setting."""


class Change(NamedTuple):
    """A setting must become ``value``; ``why`` names the experiment and its arm."""

    setting: str
    value: AnyValue
    why: str


class Conductor:
    """``settings`` may change; ``present`` returns their values; ``make_id`` a new id for an experiment."""

    def __init__(
        self,
        settings: Mapping[str, Setting],
        present: Callable[[], Mapping[str, AnyValue]],
        make_id: Callable[[], str],
    ) -> None:
        self._settings = settings
        self._present = present
        self._make_id = make_id
        self._experiments: dict[str, Run] = {}
        self._running: Run | None = None
        self._undone: Run | None = None  # the adopted one that was rolled back last
        self._set: dict[str, AnyValue] = {}  # the value that each experiment has set last

    @property
    def running(self) -> Run | None:
        """The experiment that runs."""
        running = self._running
        return running if running is not None and running.status is Status.RUNNING else None

    @property
    def meter(self) -> Watcher | None:
        """What must see all events now."""
        running = self.running
        return None if running is None else running.meter

    @property
    def assignment(self) -> Assignment | None:
        """Which requests have the treatment of the running experiment; None if they have no values of their own."""
        running = self.running
        return None if running is None else running.assignment

    def start(self, body: Any, now: float) -> Run:
        """Begin an experiment from parsed JSON.

        Raises:
            BadExperiment: a field is wrong.
            Busy: another one runs.
        """
        spec = self.read(body)
        running = self.running
        if running is not None:
            raise Busy(f"experiment {running.id} is running; stop it first")
        made: type[Run] = Experiment if spec.unit == By.TIME else UnitExperiment
        experiment = made(self._make_id(), spec, now)
        experiment.note(f"started: {spec.setting} {spec.control} against {spec.treatment}", now)
        self._keep(experiment)
        return experiment

    def read(self, body: Any) -> Spec:
        """An experiment from parsed JSON, with the control value that its setting would have.

        Raises:
            BadExperiment: a field is wrong.
        """
        present = dict(self._present())
        for last in self.all()[:1]:  # it may not have been undone yet
            present[last.spec.setting] = last.spec.control if last.status is Status.RUNNING else last.value
        spec = read_spec(body, self._settings, present)
        try:
            checked(self._settings, spec.setting, spec.treatment)
        except BadValue as error:
            raise BadExperiment("treatment", str(error)) from error
        return spec

    def stop(self, experiment_id: str, now: float) -> Run:
        """End an experiment, or roll an adopted treatment back.

        Raises:
            KeyError: there is none of this id.
            Busy: another one runs, which compares with the adopted treatment.
            Superseded: a later one has changed the setting.
        """
        experiment = self._experiments[experiment_id]
        if not experiment.adopted:
            experiment.stop(Status.STOPPED, "stopped on request", now)
            return experiment
        if self.running is not None:
            raise Busy(f"experiment {self.running.id} is running; stop it first")
        same = (each for each in self.all() if each.spec.setting == experiment.spec.setting)
        if (newest := next(same)) is not experiment:
            raise Superseded(f"experiment {newest.id} changed {experiment.spec.setting} later")
        experiment.roll_back(now)
        self._undone = experiment
        return experiment

    def get(self, experiment_id: str) -> Run:
        """An experiment by its id.

        Raises:
            KeyError: there is none.
        """
        return self._experiments[experiment_id]

    def all(self) -> list[Run]:
        """All experiments, newest first."""
        return list(reversed(self._experiments.values()))

    def tick(self, now: float) -> Change | None:
        """Advance the running experiment to ``now``; the change that is due, if any."""
        experiment = self.running
        if experiment is not None:
            experiment.advance(now)
        return self._change(now)

    def _change(self, now: float) -> Change | None:
        experiment = self._unset()
        if experiment is None:
            return None
        self._set[experiment.id] = wanted = experiment.value
        ended = "" if experiment.status is Status.RUNNING else f" ended: {experiment.status}"
        why = f"experiment {experiment.id}{ended or ': ' + experiment.arm}"
        experiment.note(f"{experiment.spec.setting} is {wanted}", now)
        return Change(experiment.spec.setting, wanted, why)

    def _unset(self) -> Run | None:
        """The experiment whose setting does not have the value that it wants: the older one of the newest two first."""
        last = [*self.all()[1::-1], *([self._undone] if self._undone is not None else [])]
        return next((e for e in last if self._set.get(e.id, e.spec.control) != e.value), None)

    @property
    def pending(self) -> bool:
        """Whether a setting does not have the value yet that an experiment wants."""
        return self._unset() is not None

    def due(self) -> float:
        """When `tick` has something to do next; infinite while nothing runs."""
        running = self.running
        return math.inf if running is None else running.due

    def to_json(self, now: float) -> list[dict[str, Any]]:
        """All experiments, as `restore` reads them."""
        return [each.to_json(now) for each in self._experiments.values()]

    def restore(self, stored: list[dict[str, Any]], now: float) -> list[str]:
        """Take experiments of an earlier process over; returns why some do not go on.

        One that ran goes on with its next pair, unless its setting is gone or has another control value now.
        """
        told, present = [], self._present()
        for each in stored:
            split = each["spec"].get("unit", By.TIME) != By.TIME
            experiment: Run = (UnitExperiment if split else Experiment).from_json(each, now)
            spec = experiment.spec
            if experiment.status is Status.RUNNING and present.get(spec.setting) != spec.control:
                why = f"{spec.setting} is {present.get(spec.setting)} since the restart, not {spec.control}"
                experiment.stop(Status.STOPPED, why, now)
                told.append(f"experiment {experiment.id} stopped: {why}")
            elif experiment.status is Status.RUNNING:
                experiment.note("goes on after a restart", now)
            self._keep(experiment)
        return told

    def _keep(self, experiment: Run) -> None:
        self._experiments[experiment.id] = experiment
        if experiment.status is Status.RUNNING:
            self._running = experiment
        while len(self._experiments) > MOST_KEPT:
            oldest = next(iter(self._experiments))
            if self._experiments[oldest].status is Status.RUNNING:
                break
            del self._experiments[oldest]
            self._set.pop(oldest, None)
