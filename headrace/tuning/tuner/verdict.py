"""How a change is judged: rehearsals before it is made, and what is measured after, against what was rehearsed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import NamedTuple

from headrace.core.scheduler.step_builder import SMOOTH_SECONDS
from headrace.tuning.steering.settings import Value
from headrace.tuning.tuner.rehearsal import Outcome

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
"""Share of a guard that a rehearsal may take. It is less exact about tails than about means, and a change that breaks
its guard when it is measured has done harm for a scene."""


LEAST_GAIN = 0.03
"""Gain from which on a change is made, and loss from which on it is undone, as differences of logarithms. A scene does
not show smaller ones."""


class Probation(NamedTuple):
    """A change that has been made and is not confirmed: the value before it, and how the last scene before it went."""

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


class Rehearsed(NamedTuple):
    """One scene with the present values, those before the change on probation, and those at the start."""

    own: Outcome
    before: Outcome
    start: Outcome


class Verdict(NamedTuple):
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
    probation: Probation, measured: Mapping[str, float], errors: Mapping[str, float], rehearsed: Rehearsed
) -> Verdict:
    """What a change has brought: what its rehearsal says, less what the error of the rehearsals has risen since."""
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
            return Verdict(gain, name, change)
    return Verdict(gain)


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
        "itl_p99_seconds": own.scene_itl_p99,
        "ttft_p99_seconds": own.scene_ttft_p99,
    }
    return {
        name: math.log(measured[name] / value)
        for name, value in rehearsed.items()
        if value > 0.0 and measured.get(name, 0.0) > 0.0
    }


def gain_of(own: Outcome, other: Outcome) -> float:
    """How much faster the same jobs end, as a difference of logarithms."""
    return math.log(own.open_seconds / other.open_seconds)
