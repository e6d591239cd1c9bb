"""Which change is best for what is to come, by rehearsals; generators that yield while these run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from headrace.core.knobs import Knobs
from headrace.core.prediction.step_curve import StepCurve
from headrace.tuning.steering.settings import Setting, Value, changed
from headrace.tuning.tuner.forecast import Forecast
from headrace.tuning.tuner.rehearsal import Outcome, Scene
from headrace.tuning.tuner.steps import Range
from headrace.tuning.tuner.verdict import LEAST_GAIN, gain_of, is_within

MOST_STEPS = 3
"""Steps of a setting that one change may take: where a step alone brings nothing, more may."""

NO_EFFECT = 1e-3
"""Rehearsed gain up to which a value changes nothing, because other bounds decide; a further step may."""

Rehearse = Callable[[Scene, Knobs, StepCurve, int, bool], Generator[None, None, Outcome]]
"""Runs a `Rehearsal`: its scene, knobs, measured step times, slots, and whether batches are static."""

Way = tuple[str, bool]
"""A setting, and whether it is raised."""


class Choice(NamedTuple):
    """A value of a setting; ``gain`` is a difference of logarithms, the mean over the loads of a forecast.

    ``back``: it brings the setting back towards its value at the start.
    """

    setting: str
    value: Value
    gain: float
    back: bool


class Decision(NamedTuple):
    """The change to make, if any; or the ``gain`` of a return of all settings to their values at the start."""

    choice: Choice | None = None
    back: float = 0.0


class Chooser:
    """Chooses among the values of ``ranges``; ``start`` are the values that all are compared with.

    ``knobs`` returns the engine's present ones, ``slots`` bounds its running requests, and ``run`` runs rehearsals.
    """

    def __init__(
        self,
        settings: Mapping[str, Setting],
        ranges: Mapping[str, Range],
        start: Mapping[str, Value],
        knobs: Callable[[], Knobs],
        slots: int,
        run: Rehearse,
    ) -> None:
        self._settings, self._ranges, self._start = settings, ranges, start
        self._knobs, self._slots, self._run = knobs, slots, run

    @property
    def present(self) -> dict[str, Value]:
        """The present values."""
        knobs = self._knobs()
        return {name: getattr(knobs, self._settings[name].field) for name in self._ranges}

    def rehearse(
        self, scene: Scene, curve: StepCurve, values: Mapping[str, Value] | None = None
    ) -> Generator[None, None, Outcome]:
        """The outcome of a scene with the present settings, of which some have other ``values``."""
        knobs = self._knobs()
        for name, value in (values or {}).items():
            knobs = changed(self._settings, knobs, name, value)
        static = "static_batch_timeout" in self._settings
        return self._run(scene, knobs, curve, self._slots, static)

    def decide(
        self, forecast: Forecast, curve: StepCurve, resting: Callable[[Way], bool]
    ) -> Generator[None, None, Decision]:
        """The change with the largest gain, as a mean over the loads that may come; ways that rest are left out."""
        own = start = yield from self._outcomes(forecast, curve, {})
        if self.present != self._start:
            start = yield from self._outcomes(forecast, curve, self._start)
        back = _mean_gain(own, start)
        ways = [each for each in itertools.product(self._ranges, (True, False)) if not resting(each)]
        found = yield from self._values(forecast, curve, own, start, ways)
        best = max(found, key=lambda each: each.gain, default=None)
        if best is not None and best.gain > max(LEAST_GAIN, back):
            return Decision(best)
        return Decision(back=back if back > LEAST_GAIN else 0.0)

    def _outcomes(
        self, forecast: Forecast, curve: StepCurve, values: Mapping[str, Value]
    ) -> Generator[None, None, list[Outcome]]:
        """The outcome at each load of the forecast."""
        outcomes = []
        for scene in forecast:
            outcome = yield from self.rehearse(scene, curve, values)
            outcomes.append(outcome)
        return outcomes

    def _values(
        self,
        forecast: Forecast,
        curve: StepCurve,
        own: Sequence[Outcome],
        start: Sequence[Outcome],
        ways: Sequence[Way],
    ) -> Generator[None, None, list[Choice]]:
        """The values on these ways that keep the guards at the present load, and gain there or go back."""
        found, present = [], self.present
        for name, up in ways:
            value = present[name]
            for _ in range(MOST_STEPS):
                following = self._ranges[name].step(value, up)
                if following is None:
                    break
                value = following
                now = yield from self.rehearse(forecast.now, curve, {name: value})
                if abs(gain_of(own[0], now)) < NO_EFFECT:
                    continue
                later = yield from self.rehearse(forecast.later, curve, {name: value})
                gain = _mean_gain(own, (now, later))
                first = self._start[name]
                back = min(present[name], first) <= value <= max(present[name], first)
                # What is slower now would be measured so and undone, and a queue that is left later lasts.
                away = gain_of(own[0], now) > LEAST_GAIN and gain_of(start[1], later) > 0
                if is_within(now, own[0], start[0]) and (back or away):
                    found.append(Choice(name, value, gain, back))
                if gain < -LEAST_GAIN:
                    break
        return found


def _mean_gain(own: Sequence[Outcome], other: Sequence[Outcome]) -> float:
    return fmean(map(gain_of, own, other))
