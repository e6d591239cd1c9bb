"""Steers one engine: its experiments and its tuner together, in one order, over one stream of events.

The server and the simulator both drive this class, so an experiment or a tuner that is tried in virtual time does there
what it does on live traffic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from headrace.core.engine import Engine
from headrace.core.events import Event
from headrace.core.knobs import Knobs
from headrace.observe.experiments.conductor import Change, Conductor
from headrace.observe.experiments.measures import WindowMeter
from headrace.observe.steering.settings import Setting, changed, values
from headrace.observe.tuner.signals import Signals
from headrace.observe.tuner.steps import ranges
from headrace.observe.tuner.tuner import Mode, Tuner


class Steering:
    """``knobs`` returns the engine's present ones; ``make_id`` a new id for an experiment."""

    def __init__(
        self,
        settings: Mapping[str, Setting],
        knobs: Callable[[], Knobs],
        make_id: Callable[[], str],
        mode: Mode = Mode.OFF,
        window_seconds: float = 30.0,
        burn_in_seconds: float = 5.0,
    ) -> None:
        self.settings = settings
        self._knobs = knobs
        self.conductor = Conductor(settings, self.present, make_id)
        start = self.present()
        self.tuner = Tuner(
            self.conductor, ranges(settings, start), start, mode, window_seconds, burn_in_seconds
        )

    def present(self) -> dict[str, float | int]:
        """The present value of each setting."""
        return values(self.settings, self._knobs())

    @property
    def folds(self) -> tuple[WindowMeter, Signals]:
        """What must see every event."""
        return self.conductor.meter, self.tuner.signals

    def saw(self, events: Iterable[Event], now: float) -> None:
        """Measure the events of a step."""
        for event in events:
            for fold in self.folds:
                fold.fold(event, now)

    def tick(self, now: float) -> Change | None:
        """The change of a setting that is due now, if any; asked again until there is none."""
        change = self.conductor.tick(now)
        if change is None:
            self.tuner.tick(now, self.present())
            change = self.conductor.tick(now)
        return change

    def due(self) -> float:
        """When `tick` has something to do next."""
        return min(self.conductor.due(), self.tuner.due())

    def steer(self, engine: Engine, now: float) -> None:
        """Make all changes that are due; between two steps."""
        if now >= self.due() or self.conductor.pending:
            while (change := self.tick(now)) is not None:
                engine.knobs = changed(self.settings, engine.knobs, change.setting, change.value)
