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
from headrace.core.prediction.step_times import StepTimes
from headrace.core.request import NO_SETTINGS, Request
from headrace.tuning.evaluator import Evaluate, not_evaluated
from headrace.tuning.experiments import Experiments
from headrace.tuning.search import ranges
from headrace.tuning.settings import AnyValue, Change, Setting, Value, changed, checked, values
from headrace.tuning.tuner import Mode, Tuner


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
    ``times`` are learned step times, ``window_seconds`` is the length of a window, and ``evaluate`` runs evaluations.
    """

    def __init__(
        self,
        settings: Mapping[str, Setting],
        knobs: Callable[[], Knobs],
        make_id: Callable[[], str],
        mode: Mode = Mode.OFF,
        window_seconds: float = 20.0,
        requests: Requests | None = None,
        times: StepTimes | None = None,
        evaluate: Evaluate = not_evaluated,
    ) -> None:
        self.settings = settings
        self.requests = requests = requests or Requests({}, {})
        self._knobs = knobs
        self.experiments = Experiments({**settings, **requests.settings}, self.all_present, make_id)
        start = self.present()
        self.tuner = Tuner(
            settings, ranges(settings, start), start, knobs, times, mode, window_seconds, evaluate
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
