"""Which change is best for what is to come, by rehearsals; generators that yield while these run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from headrace.core.knobs import Knobs
from headrace.core.prediction.step_times import StepTimes
from headrace.observe.steering.settings import Setting, Value, changed
from headrace.observe.tuner.rehearsal import Outcome, Scene
from headrace.observe.tuner.steps import Range
from headrace.observe.tuner.verdict import gain_of, is_within

LEAST_GAIN = 0.03
"""Rehearsed gain from which on a change is made; smaller ones are not worth a change."""

MOST_STEPS = 3
"""Steps of a setting that one change may take: where a step alone brings nothing, more may."""

NO_EFFECT = 1e-3
"""Rehearsed gain up to which a setting does not bind; more of the same is not rehearsed."""

Rehearse = Callable[[Scene, Knobs, StepTimes, int, bool], Generator[None, None, Outcome]]
"""Runs a `Rehearsal`: its scene, knobs, step times, slots, and whether batches are static."""

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
        self, scene: Scene, times: StepTimes, values: Mapping[str, Value] | None = None
    ) -> Generator[None, None, Outcome]:
        """The outcome of a scene with the present settings, of which some have other ``values``."""
        knobs = self._knobs()
        for name, value in (values or {}).items():
            knobs = changed(self._settings, knobs, name, value)
        static = "static_batch_timeout" in self._settings
        return self._run(scene, knobs, times, self._slots, static)

    def decide(
        self, forecast: Sequence[Scene], times: StepTimes, resting: Callable[[Way], bool]
    ) -> Generator[None, None, Decision]:
        """The change with the largest gain, as a mean over the loads that may come; ways that rest are left out."""
        own = start = yield from self._outcomes(forecast, times, {})
        if self.present != self._start:
            start = yield from self._outcomes(forecast, times, self._start)
        back = _mean_gain(own, start)
        ways = [each for each in itertools.product(self._ranges, (True, False)) if not resting(each)]
        found = yield from self._values(forecast, times, own, start, ways)
        best = max(found, key=lambda each: each.gain, default=None)
        if best is not None and best.gain > max(LEAST_GAIN, back):
            return Decision(best)
        return Decision(back=back if back > LEAST_GAIN else 0.0)

    def _outcomes(
        self, forecast: Sequence[Scene], times: StepTimes, values: Mapping[str, Value]
    ) -> Generator[None, None, list[Outcome]]:
        """The outcome at each load of the forecast."""
        outcomes = []
        for scene in forecast:
            outcome = yield from self.rehearse(scene, times, values)
            outcomes.append(outcome)
        return outcomes

    def _values(
        self,
        forecast: Sequence[Scene],
        times: StepTimes,
        own: Sequence[Outcome],
        start: Sequence[Outcome],
        ways: Sequence[Way],
    ) -> Generator[None, None, list[Choice]]:
        """The values on these ways that keep the guards at the present load, and go back or gain at every load.

        What is slower now would be measured so and undone, and a queue that is left at a higher load lasts. Near
        saturation the best of some ten rehearsals at one load may be the best by chance.
        """
        found, present = [], self.present
        for name, up in ways:
            value, first = present[name], self._start[name]
            for _ in range(MOST_STEPS):
                following = self._ranges[name].step(value, up)
                if following is None:
                    break
                value = following
                now = yield from self.rehearse(forecast[0], times, {name: value})
                gain = gain_of(own[0], now)
                back = min(present[name], first) <= value <= max(present[name], first)
                if abs(gain) < NO_EFFECT or not back and gain < -LEAST_GAIN:
                    break
                if not is_within(now, own[0], start[0]) or not back and gain < LEAST_GAIN:
                    continue
                outcomes = [now, *(yield from self._outcomes(forecast[1:], times, {name: value}))]
                if back or min(map(gain_of, start, outcomes)) > 0:
                    found.append(Choice(name, value, _mean_gain(own, outcomes), back))
        return found


def _mean_gain(own: Sequence[Outcome], other: Sequence[Outcome]) -> float:
    return fmean(map(gain_of, own, other))
