"""Which change is best for what is to come, by evaluations; generators that yield while these run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from operator import attrgetter
from statistics import fmean
from typing import NamedTuple

from headrace.core.knobs import Knobs
from headrace.core.prediction.step_curve import StepCurve
from headrace.core.scheduler.step_builder import SMOOTH_SECONDS
from headrace.tuning.evaluator import Evaluate
from headrace.tuning.settings import Setting, Value, changed
from headrace.tuning.traffic import Forecast, Outcome, Period

MOST_STEPS = 3
"""Steps of a setting that one change may take: where a step alone brings nothing, more may."""

NO_EFFECT = 1e-3
"""Evaluated gain up to which a value changes nothing, because other bounds decide; a further step may."""

Way = tuple[str, bool]
"""A setting, and whether it is raised."""


class Candidate(NamedTuple):
    """A value of a setting; ``gain`` is a difference of logarithms, the mean over the loads of a forecast.

    ``back``: it brings the setting back towards its value at the start.
    """

    setting: str
    value: Value
    gain: float
    back: bool


class Decision(NamedTuple):
    """The change to make, if any; or the ``gain`` of a return of all settings to their values at the start."""

    candidate: Candidate | None = None
    back: float = 0.0


class Search:
    """Chooses among the values of ``ranges``; ``start`` are the values that all are compared with.

    ``knobs`` returns the engine's present ones, ``slots`` bounds its running requests, and ``run`` runs evaluations.
    """

    def __init__(
        self,
        settings: Mapping[str, Setting],
        ranges: Mapping[str, Range],
        start: Mapping[str, Value],
        knobs: Callable[[], Knobs],
        slots: int,
        run: Evaluate,
    ) -> None:
        self._settings, self._ranges, self._start = settings, ranges, start
        self._knobs, self._slots, self._run = knobs, slots, run

    @property
    def present(self) -> dict[str, Value]:
        """The present values."""
        knobs = self._knobs()
        return {name: getattr(knobs, self._settings[name].field) for name in self._ranges}

    def evaluate(
        self, period: Period, curve: StepCurve, values: Mapping[str, Value] | None = None
    ) -> Generator[None, None, Outcome]:
        """The outcome of a period with the present settings, of which some have other ``values``."""
        knobs = self._knobs()
        for name, value in (values or {}).items():
            knobs = changed(self._settings, knobs, name, value)
        static = "static_batch_timeout" in self._settings
        return self._run(period, knobs, curve, self._slots, static)

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
        for period in forecast:
            outcome = yield from self.evaluate(period, curve, values)
            outcomes.append(outcome)
        return outcomes

    def _values(
        self,
        forecast: Forecast,
        curve: StepCurve,
        own: Sequence[Outcome],
        start: Sequence[Outcome],
        ways: Sequence[Way],
    ) -> Generator[None, None, list[Candidate]]:
        """The values on these ways that keep the guards at the present load, and gain there or go back."""
        found, present = [], self.present
        for name, up in ways:
            value = present[name]
            for _ in range(MOST_STEPS):
                following = self._ranges[name].step(value, up)
                if following is None:
                    break
                value = following
                now = yield from self.evaluate(forecast.now, curve, {name: value})
                if abs(gain_of(own[0], now)) < NO_EFFECT:
                    continue
                later = yield from self.evaluate(forecast.later, curve, {name: value})
                gain = _mean_gain(own, (now, later))
                first = self._start[name]
                back = min(present[name], first) <= value <= max(present[name], first)
                # What is slower now would be measured so and undone, and a queue that is left later lasts.
                away = gain_of(own[0], now) > LEAST_GAIN and gain_of(start[1], later) > 0
                if is_within(now, own[0], start[0]) and (back or away):
                    found.append(Candidate(name, value, gain, back))
                if gain < -LEAST_GAIN:
                    break
        return found


def _mean_gain(own: Sequence[Outcome], other: Sequence[Outcome]) -> float:
    return fmean(map(gain_of, own, other))


class Range(NamedTuple):
    """Bounds and step of one setting; a step multiplies or divides by ``factor``. ``whole`` values are rounded.

    A value of 0, which means no bound, counts as ``high``.
    """

    low: float
    high: float
    factor: float
    whole: bool

    def step(self, value: Value, up: bool) -> Value | None:
        """The next value up or down; None at a bound."""
        value = value or self.high
        wanted = value * self.factor if up else value / self.factor
        wanted = min(self.high, max(self.low, wanted))
        if self.whole:
            wanted = int(wanted) if wanted < value else int(-(-wanted // 1))
        return None if wanted == value else wanted


FACTORS: Mapping[str, float] = {
    "mixed_prefill_ratio": 1.6,
    "max_num_batched_tokens": 2.0,
    "max_running": 1.5,
    "static_batch_timeout": 2.0,
}
"""The settings that the tuner changes, with the factor of a step, in the order in which they are tried."""

REACH = 64.0  # see docs/decisions/tuning.md#range-of-a-setting
"""How many times larger or smaller than at the start a setting may become."""


def ranges(settings: Mapping[str, Setting], start: Mapping[str, Value]) -> dict[str, Range]:
    """The range of each setting that the tuner changes.

    ``max_running`` at 0 begins at all slots; another setting at 0, which means no bound, is left alone.
    """
    found = {}
    for name, factor in FACTORS.items():
        if name not in settings:
            continue
        setting, value = settings[name], start[name]
        if name == "max_running":
            value = value or setting.high
        if value > 0:
            low, high = max(setting.low, value / REACH, 1e-3), min(setting.high, value * REACH)
            found[name] = Range(
                float(max(1, round(low))) if setting.whole else low, high, factor, setting.whole
            )
    return found


METRIC = "open_seconds_per_token"
"""Time per token as its client sees it, waiting included: less is better at low load (latency) and at overload, where
it falls with the queue as throughput rises. By Little's law it is the latency per token of steady traffic."""

FAILED = "failed_share"

GUARDS: Mapping[str, float] = {"itl_p99_seconds": 0.5, "ttft_p99_seconds": 1.0, FAILED: 0.5}
"""How much worse each metric may become by a change, beside the values before it and at the start."""

TAILS: Mapping[str, Callable[[Outcome], float]] = {
    "itl_p99_seconds": attrgetter("itl_p99"),
    "ttft_p99_seconds": attrgetter("ttft_p99"),
}
"""The guards that are also rehearsed."""

UNNOTICED: Mapping[str, float] = {"itl_p99_seconds": SMOOTH_SECONDS}
"""Tails up to these seconds break no guard."""

REHEARSED_SHARE = 0.5  # see docs/decisions/tuning.md#guards-of-the-tuner
"""Share of a guard that an evaluation may take. It is less exact about tails than about means, and a change that breaks
its guard when it is measured has done harm for a period."""


LEAST_GAIN = 0.03
"""Gain from which on a change is made, and loss from which on it is undone, as differences of logarithms. A period does
not show smaller ones."""


class Probation(NamedTuple):
    """A change that has been made and is not confirmed: the value before it, and how the last period before it went."""

    setting: str
    before: Value
    value: Value
    errors: Mapping[str, float]
    measured: Mapping[str, float]

    def __str__(self) -> str:
        return f"{self.setting} {self.before:g} -> {self.value:g}"

    @property
    def direction(self) -> tuple[str, bool]:
        """The setting, and whether it was raised."""
        return self.setting, (self.value or math.inf) > (self.before or math.inf)


class Evaluated(NamedTuple):
    """One period with the present values, those before the change on probation, and those at the start."""

    own: Outcome
    before: Outcome
    start: Outcome


class Judgement(NamedTuple):
    """The measured gain of a change as a difference of logarithms, and the guard that it broke, with its change."""

    gain: float
    broken: str = ""
    change: float = 0.0

    @property
    def good(self) -> bool:
        """Whether the change is kept."""
        return self.gain > -LEAST_GAIN and not self.broken

    def __str__(self) -> str:
        name, change = (self.broken, self.change) if self.broken else (METRIC, -self.gain)
        return f"{name} {math.expm1(change):+.1%}"


def judge(
    probation: Probation, measured: Mapping[str, float], errors: Mapping[str, float], rehearsed: Evaluated
) -> Judgement:
    """What a change has brought: what its evaluation says, less what the error of the evaluations has risen since."""
    own, before, start = rehearsed
    rise = {name: errors[name] - known for name, known in probation.errors.items() if name in errors}
    gain = math.log(before.seconds_per_token / own.seconds_per_token) - rise[METRIC]
    worse = {
        name: math.log(tail(own) / _reference(name, before, start)) + rise[name]
        for name, tail in TAILS.items()
        if name in rise and tail(before)
    }
    if measured.get(FAILED) and probation.measured.get(FAILED):
        worse[FAILED] = math.log(measured[FAILED] / probation.measured[FAILED])
    for name, change in worse.items():
        if change > math.log1p(GUARDS[name]):
            return Judgement(gain, name, change)
    return Judgement(gain)


def is_within(outcome: Outcome, own: Outcome, start: Outcome) -> bool:
    """Whether a rehearsed change keeps well within the guards."""
    return all(
        tail(outcome) <= (1 + REHEARSED_SHARE * GUARDS[name]) * _reference(name, own, start)
        for name, tail in TAILS.items()
    )


def _reference(name: str, one: Outcome, other: Outcome) -> float:
    """The value that a guarded tail is compared with: the largest of both outcomes and its bound in `UNNOTICED`."""
    tail = TAILS[name]
    return max(tail(one), tail(other), UNNOTICED.get(name, 0.0))


def errors_of(measured: Mapping[str, float], own: Outcome) -> dict[str, float]:
    """The logarithms of measured over rehearsed metrics, where both are known."""
    rehearsed = {
        METRIC: own.seconds_per_token,
        "itl_p99_seconds": own.period_itl_p99,
        "ttft_p99_seconds": own.period_ttft_p99,
    }
    return {
        name: math.log(measured[name] / value)
        for name, value in rehearsed.items()
        if value > 0.0 and measured.get(name, 0.0) > 0.0
    }


def gain_of(own: Outcome, other: Outcome) -> float:
    """How much faster the same jobs end, as a difference of logarithms."""
    return math.log(own.open_seconds / other.open_seconds)
