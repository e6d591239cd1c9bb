"""Changes settings of one engine: its experiments and its tuner in a fixed order, over one stream of events.

The server and the simulator both use this class, so experiments and tuner behave in virtual time as on live traffic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from headrace.core.engine import Engine
from headrace.core.events import Event
from headrace.core.knobs import Knobs
from headrace.core.ports import Watcher
from headrace.core.request import NO_SETTINGS, Request
from headrace.tuning.evaluator import Evaluate, ReadCurve, not_evaluated, nothing_measured
from headrace.tuning.experiment import Experiment, Status, begin, restored
from headrace.tuning.measures import Assignment
from headrace.tuning.search import ranges
from headrace.tuning.settings import AnyValue, BadValue, Change, Setting, Value, changed, checked, values
from headrace.tuning.spec import BadExperiment, Spec, read_spec
from headrace.tuning.tuner import Mode, Tuner

# The experiments of one server: at most one is running; ended ones are stored.
#
# It has no clock and no engine: `tick` returns the change of a setting that is due, and the caller applies
# it. While an experiment runs, `meter` is not None and must receive all events. When it ends, the setting
# returns to its control value.

MOST_KEPT = 100
"""Maximum number of stored experiments; older ones are dropped, but not while their treatment is adopted."""


class Busy(RuntimeError):
    """Another experiment is running."""


class Superseded(RuntimeError):
    """A later experiment has changed the same setting."""


class Experiments:
    """Runs experiments on ``settings``; ``present`` returns their current values, ``make_id`` a new experiment id."""

    def __init__(
        self,
        settings: Mapping[str, Setting],
        present: Callable[[], Mapping[str, AnyValue]],
        make_id: Callable[[], str],
    ) -> None:
        self._settings = settings
        self._present = present
        self._make_id = make_id
        self._experiments: dict[str, Experiment] = {}
        self._running: Experiment | None = None
        self._set: dict[str, AnyValue] = {}  # the value that each experiment has set last

    @property
    def running(self) -> Experiment | None:
        """The running experiment."""
        running = self._running
        return running if running is not None and running.status is Status.RUNNING else None

    @property
    def meter(self) -> Watcher | None:
        """The watcher that must receive all events; None while no experiment runs."""
        running = self.running
        return None if running is None else running.meter

    @property
    def assignment(self) -> Assignment | None:
        """The assignment of requests to arms; None if no experiment by request or tenant runs."""
        running = self.running
        return None if running is None else running.assignment

    def start(self, body: Any, now: float) -> Experiment:
        """Start an experiment from parsed JSON.

        Raises:
            BadExperiment: a field is invalid.
            Busy: another experiment is running.
        """
        spec = self.read(body)
        running = self.running
        if running is not None:
            raise Busy(f"experiment {running.id} is running; stop it first")
        experiment = begin(self._make_id(), spec, now)
        experiment.note(f"started: {spec.setting} {spec.control} against {spec.treatment}", now)
        self._keep(experiment)
        return experiment

    def read(self, body: Any) -> Spec:
        """An experiment from parsed JSON, with the control value that its setting would have.

        Raises:
            BadExperiment: a field is invalid.
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

    def stop(self, experiment_id: str, now: float) -> Experiment:
        """End an experiment, or roll an adopted treatment back.

        Raises:
            KeyError: the id is unknown.
            Busy: another experiment is running, and compares with the adopted treatment.
            Superseded: a later experiment has changed the setting.
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
        experiment.roll_back("on request", now)
        return experiment

    def get(self, experiment_id: str) -> Experiment:
        """An experiment by its id.

        Raises:
            KeyError: the id is unknown.
        """
        return self._experiments[experiment_id]

    def all(self) -> list[Experiment]:
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

    def _unset(self) -> Experiment | None:
        """The oldest experiment whose setting does not have its required value yet."""
        every = self._experiments.values()
        return next((each for each in every if self._set.get(each.id, each.spec.control) != each.value), None)

    @property
    def pending(self) -> bool:
        """Whether a required change of a setting is not applied yet."""
        return self._unset() is not None

    def due(self) -> float:
        """Time of the next call of `tick`; infinite while no experiment runs."""
        running = self.running
        return math.inf if running is None else running.due

    def stored(self, now: float) -> str:
        """All experiments as a list in JSON, as `restore` reads it."""
        return f"[{', '.join(each.stored(now) for each in self._experiments.values())}]"

    def restore(self, stored: list[dict[str, Any]], now: float) -> list[str]:
        """Restore experiments of an earlier process; returns messages about those that were stopped or rolled back.

        A running experiment continues with its next pair, and an adopted treatment is applied again, unless its setting
        is gone, its control value changed, or the treatment is out of bounds now.
        """
        messages, present = [], dict(self._present())
        for each in stored:
            experiment = restored(each, now)
            spec, running = experiment.spec, experiment.status is Status.RUNNING
            if experiment.adopted and present.get(spec.setting) == spec.treatment:
                self._set[experiment.id] = spec.treatment  # configured since then
            elif (running or experiment.adopted) and (why := self._obstacle(spec, present)):
                if running:
                    experiment.stop(Status.STOPPED, why, now)
                else:
                    experiment.roll_back(f"at a restart: {why}", now)
                messages.append(f"experiment {experiment.id} {experiment.status.value}: {why}")
            elif running:
                experiment.note("continued after a restart", now)
            elif experiment.adopted:
                present[spec.setting] = spec.treatment
            self._keep(experiment)
        return messages

    def _obstacle(self, spec: Spec, present: Mapping[str, AnyValue]) -> str:
        """Why an experiment cannot change its setting after a restart; empty if it can."""
        if present.get(spec.setting) != spec.control:
            return f"{spec.setting} is {present.get(spec.setting)} since the restart, not {spec.control}"
        try:
            checked(self._settings, spec.setting, spec.treatment)
        except BadValue as error:
            return str(error)
        return ""

    def _keep(self, experiment: Experiment) -> None:
        self._experiments[experiment.id] = experiment
        if experiment.status is Status.RUNNING:
            self._running = experiment
        if len(self._experiments) > MOST_KEPT:
            every = self._experiments.values()
            ended = (each.id for each in every if each.status is not Status.RUNNING and not each.adopted)
            if (oldest := next(ended, None)) is not None:
                del self._experiments[oldest]
                self._set.pop(oldest, None)


class Requests:
    """The per-request settings: values for all requests, and for those with the treatment of an experiment.

    ``settings`` may change; ``start`` are their configured values.
    """

    def __init__(self, settings: Mapping[str, Setting], start: Mapping[str, AnyValue]) -> None:
        self.settings = settings
        self.present = dict(start)
        self._all = NO_SETTINGS

    def change(self, name: str, value: AnyValue) -> None:
        """Set the value for all requests from now on."""
        self.present[name] = checked(self.settings, name, value)
        self._all = replace(self._all, **self._field(name, value))

    def assigned(self, request: Request, experiments: Experiments) -> Request:
        """``request`` with its settings."""
        settings, assignment, running = self._all, experiments.assignment, experiments.running
        if assignment is not None and running is not None:
            unit = assignment.unit(request.id, request.tenant, request.arrived)
            if assignment.treats(unit):
                settings = replace(settings, **self._field(running.spec.setting, running.spec.treatment))
        return request if settings is NO_SETTINGS else replace(request, settings=settings)

    def _field(self, name: str, value: AnyValue) -> dict[str, Any]:
        return {self.settings[name].field: checked(self.settings, name, value)}


class EngineTuning:
    """Experiments and tuner of one engine. ``knobs`` returns its current knobs; ``make_id`` a new experiment id.

    ``settings`` are those of the engine, ``requests`` those of its requests (None: none may change). For the tuner,
    ``window_seconds`` is the length of a window, ``read_curve`` reads measured step times, and ``evaluate`` runs
    evaluations.
    """

    def __init__(
        self,
        settings: Mapping[str, Setting],
        knobs: Callable[[], Knobs],
        make_id: Callable[[], str],
        mode: Mode = Mode.OFF,
        window_seconds: float = 20.0,
        requests: Requests | None = None,
        read_curve: ReadCurve = nothing_measured,
        evaluate: Evaluate = not_evaluated,
    ) -> None:
        self.settings = settings
        self.requests = requests = requests or Requests({}, {})
        self._knobs = knobs
        self.experiments = Experiments({**settings, **requests.settings}, self.all_present, make_id)
        start = self.present()
        self.tuner = Tuner(
            settings, ranges(settings, start), start, knobs, mode, window_seconds, read_curve, evaluate
        )

    def present(self) -> dict[str, Value]:
        """The present value of each setting of the engine."""
        return values(self.settings, self._knobs())

    def all_present(self) -> dict[str, AnyValue]:
        """The present value of each setting."""
        return {**self.present(), **self.requests.present}

    def describe(self) -> dict[str, dict[str, Any]]:
        """The settings that may change, as clients see them."""
        present = self.all_present()
        both = {**self.settings, **self.requests.settings}
        return {name: each.describe(present[name]) for name, each in both.items()}

    @property
    def watchers(self) -> tuple[Watcher, ...]:
        """Watchers that must receive all events; empty while no experiment measures and the tuner is off."""
        meter = self.experiments.meter
        measuring: tuple[Watcher, ...] = () if meter is None else (meter,)
        return measuring if self.tuner.mode is Mode.OFF else (*measuring, self.tuner.history)

    def assigned(self, request: Request) -> Request:
        """``request`` with the settings of its arm, before it is looked up in any cache."""
        return self.requests.assigned(request, self.experiments)

    def saw(self, events: Iterable[Event], now: float) -> None:
        """Measure the events of a step."""
        watchers = self.watchers
        for event in events:
            for each in watchers:
                each.fold(event, now)

    def tick(self, now: float) -> Change | None:
        """The next change of an engine setting that is due, if any; call it again until it returns None.

        Changes of per-request settings are applied here.
        """
        while (change := self._next(now)) is not None and change.setting in self.requests.settings:
            self.requests.change(change.setting, change.value)
        return change

    def _next(self, now: float) -> Change | None:
        change = self.experiments.tick(now)
        if change is None:
            change = self.tuner.tick(now, frozen=self.experiments.running is not None)
        return change

    def due(self) -> float:
        """Time of the next call of `tick`."""
        return min(self.experiments.due(), math.inf if self.experiments.running else self.tuner.due())

    def steer(self, engine: Engine, now: float) -> None:
        """Apply all changes that are due; call it between two steps."""
        if now >= self.due() or self.experiments.pending:
            while (change := self.tick(now)) is not None:
                engine.knobs = changed(self.settings, engine.knobs, change.setting, change.value)
