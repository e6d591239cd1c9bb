"""Which change is best for what is to come, by rehearsals; generators that yield while these run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import NamedTuple

from headrace.core.knobs import Knobs
from headrace.core.prediction.step_times import StepTimes
from headrace.observe.steering.settings import Setting, Value, changed
from headrace.observe.tuner.forecast import Forecast
from headrace.observe.tuner.rehearsal import Outcome, Scene
from headrace.observe.tuner.steps import Range
from headrace.observe.tuner.verdict import gain_of, is_within

LEAST_GAIN = 0.03
"""Rehearsed gain from which on a change is made; smaller ones are not worth a change."""

SATURATION = 2.0
"""The engine is near saturation if its latency grows by this factor when the load rises as it may."""

LEAST_GAIN_NEAR_SATURATION = 0.3
"""Rehearsed gain from which on a change is made or kept near saturation: there rehearsals are least exact, and a queue
that a wrong value leaves behind lasts until the load falls."""

MOST_STEPS = 3
"""Steps of a setting that one change may take: where a step alone brings nothing, more may."""

NO_EFFECT = 1e-3
"""Rehearsed gain up to which a setting does not bind; more of the same is not rehearsed."""

Rehearse = Callable[[Scene, Knobs, StepTimes, int, bool], Generator[None, None, Outcome]]
"""Runs a `Rehearsal`: its scene, knobs, step times, slots, and whether batches are static."""

Way = tuple[str, bool]
"""A setting, and whether it is raised."""


class Choice(NamedTuple):
    """A value of a setting; ``gain`` is a difference of logarithms, rehearsed for the present load."""

    setting: str
    value: Value
    gain: float


class Decision(NamedTuple):
    """The change to make, and why the present values must not stay (empty: they may).

    Without a ``choice`` they return to the start if they must not stay.
    """

    choice: Choice | None
    why: str


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
        self, forecast: Forecast, times: StepTimes, resting: Callable[[Way], bool]
    ) -> Generator[None, None, Decision]:
        """The best change now that is also good at a load that may come later; ways that rest are left out."""
        own = start = yield from self.rehearse(forecast.now, times)
        start_later = yield from self.rehearse(forecast.later, times, self._start)
        why = ""
        if (present := self.present) != self._start:
            start = yield from self.rehearse(forecast.now, times, self._start)
        near = start_later.seconds_per_token > SATURATION * start.seconds_per_token
        least = LEAST_GAIN_NEAR_SATURATION if near else LEAST_GAIN
        if present != self._start:
            why = yield from self._why_leave(forecast, times, gain_of(start, own), near)
        ways = [each for each in self._ways(back=bool(why)) if not resting(each)]
        found = yield from self._values(forecast.now, times, start if why else own, start, ways)
        for choice in sorted(found, key=lambda each: -each.gain):
            if choice.gain <= least:
                break
            outcome = yield from self.rehearse(forecast.later, times, {choice.setting: choice.value})
            if gain_of(start_later, outcome) > least:
                return Decision(choice, why)
        return Decision(None, why)

    def _why_leave(
        self, forecast: Forecast, times: StepTimes, gain: float, near: bool
    ) -> Generator[None, None, str]:
        """Why the present values must not stay; ``gain`` is theirs over the start at the present load."""
        if gain < -LEAST_GAIN:
            return f"rehearsed {math.expm1(-gain):+.1%} faster at the start's values"
        if near and gain < LEAST_GAIN_NEAR_SATURATION:
            return "near saturation"
        own = yield from self.rehearse(forecast.soon, times)
        start = yield from self.rehearse(forecast.soon, times, self._start)
        gain = gain_of(start, own)
        if gain < -LEAST_GAIN:
            return f"rehearsed {math.expm1(-gain):+.1%} faster at the start's values if the load rises"
        return ""

    def _ways(self, *, back: bool) -> list[Way]:
        """All ways, or only those that bring settings ``back`` to their values at the start."""
        if not back:
            return list(itertools.product(self._ranges, (True, False)))
        return [
            (name, (self._start[name] or math.inf) > (value or math.inf))
            for name, value in self.present.items()
            if value != self._start[name]
        ]

    def _values(
        self, scene: Scene, times: StepTimes, reference: Outcome, start: Outcome, ways: Sequence[Way]
    ) -> Generator[None, None, list[Choice]]:
        """The values on these ways that keep the guards, with their gain over ``reference``."""
        found, present = [], self.present
        for name, up in ways:
            value = present[name]
            for _ in range(MOST_STEPS):
                following = self._ranges[name].step(value, up)
                if following is None:
                    break
                value = following
                outcome = yield from self.rehearse(scene, times, {name: value})
                gain = gain_of(reference, outcome)
                if is_within(outcome, reference, start):
                    found.append(Choice(name, value, gain))
                if gain < -LEAST_GAIN or abs(gain) < NO_EFFECT:
                    break
        return found
