"""One switchback experiment as a state machine: times and measured windows in, a setting's value and a decision out.

It has no clock and no engine. Call `advance` with the time; then `value` is the required value of the setting, and
`due` is the time of the next call. It can be stored as JSON at any time; after a restart, the interrupted pair is
measured again.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from headrace.core.ports import Watcher
from headrace.tuning.experiments.evidence import Evidence
from headrace.tuning.experiments.measures import METRICS, WindowMeter
from headrace.tuning.experiments.power import smallest_change, units_for
from headrace.tuning.experiments.run import Run, Status, bounds_of
from headrace.tuning.experiments.spec import Spec
from headrace.tuning.experiments.switchback import (
    LoadCorrection,
    Measured,
    log_change,
    log_load,
    stalled,
    treatment_first,
)
from headrace.tuning.steering.settings import AnyValue

GUARD_PAIRS = 2  # see docs/decisions/tuning.md#guards-of-experiments
"""From this pair on, a guard ends the experiment when the mean change exceeds it. Guards do not wait for significance,
which would take many more pairs."""

GROSS = 3.0
"""If the first pair exceeds a guard by this factor, the experiment ends at once."""

LATENCY = "open_seconds_per_token"
"""The metric that shows whether clients wait for responses before they send more."""

MOST_PAIRS = 10_000
"""Maximum number of pairs; then the experiment ends."""


class Pair(NamedTuple):
    """Two measured windows."""

    control: Measured
    treatment: Measured


class Experiment(Run):
    """A `Run` with the differences of all pairs and of the guards' metrics.

    ``check`` is an A/A comparison of the control windows of neighbouring pairs.
    """

    design = "switchback"

    def __init__(self, experiment_id: str, spec: Spec, began: float, spent: float = 0.0) -> None:
        super().__init__(experiment_id, spec, began, spent)
        self.pairs: list[Pair] = []
        self.evidence = Evidence()
        self.guards = {name: Evidence() for name in spec.guards}
        self.check = Evidence()
        self._windows = WindowMeter()
        self.meter: Watcher = self._windows
        self._load = LoadCorrection()
        self._half: Measured | None = None  # the first window of the present pair
        self._measuring = False
        self._treatment = False
        self._started = False

    @property
    def value(self) -> AnyValue:
        """The required value of the setting."""
        on = self.status is Status.RUNNING and self._treatment
        return self.spec.treatment if on else super().value

    @property
    def arm(self) -> str:
        """The current arm."""
        return "treatment" if self._treatment and self.status is Status.RUNNING else "control"

    def advance(self, now: float) -> None:
        """Begin, measure or end the windows that are due by ``now``."""
        if self.status is not Status.RUNNING or now < self.due:
            return
        if not self._started:
            self._started = True
            self._begin(treatment_first(self.spec.seed, 0), now)
        elif not self._measuring:
            self._measuring = True
            self._windows.open(now)
            self.due = now + self.spec.window_seconds
        else:
            values, load = self._windows.close(now)
            self._end_window(Measured(self._treatment, values, load), now)

    def _begin(self, treatment: bool, now: float) -> None:
        self._treatment, self._measuring = treatment, False
        self.due = now + self.spec.burn_in_seconds

    def _end_window(self, measured: Measured, now: float) -> None:
        if self._half is None:
            self._half = measured
            self._begin(not self._treatment, now)
            return
        first, self._half = self._half, None
        pair = Pair(measured, first) if first.treatment else Pair(first, measured)
        self.pairs.append(pair)
        self._weigh(pair)
        self._judge(now)
        if self.status is Status.RUNNING:
            self._begin(treatment_first(self.spec.seed, len(self.pairs)), now)

    def _weigh(self, pair: Pair) -> None:
        change = log_change(self.spec.metric, *pair)
        if change is not None:
            latency = log_change(LATENCY, *pair)
            self.evidence.add(self._load.correct(change, log_load(*pair), latency))
        for name, evidence in self.guards.items():
            if (change := log_change(name, *pair)) is not None:
                evidence.add(change)
        if len(self.pairs) % 2 == 0:
            self._compare_controls(self.pairs[-2].control, pair.control)
        point = {"pairs": len(self.pairs), **_effect(self.evidence, self.spec.alpha)}
        self.draw(point | {"check": _effect(self.check, self.spec.alpha)})

    def _compare_controls(self, before: Measured, after: Measured) -> None:
        """Add two control windows to the check, in alternating order, so that a trend of the load cancels out."""
        both = (before, after) if len(self.pairs) % 4 else (after, before)
        change = log_change(self.spec.metric, *both)
        if change is not None:
            self.check.add(change)

    def _judge(self, now: float) -> None:
        spec = self.spec
        # One such window is no evidence: its only request may have arrived at its end.
        if spec.guards and len(self.pairs) > 1 and all(stalled(*pair) for pair in self.pairs[-2:]):
            reason = "no token was generated in two windows of the treatment, although requests arrived"
            self.stop(Status.ROLLED_BACK, reason, now)
            return
        for name, evidence in self.guards.items():
            worse = -METRICS[name].better * evidence.mean
            bound = math.log1p(spec.guards[name]) * (1.0 if evidence.count >= GUARD_PAIRS else GROSS)
            if worse > bound:
                reason = f"{name} changed by {math.expm1(evidence.mean):+.1%} in {evidence.count} pairs"
                self.stop(Status.ROLLED_BACK, reason, now)
                return
        if self.evidence.e_value >= 1 / spec.alpha:
            better = METRICS[spec.metric].better * self.evidence.mean > 0
            self.stop(Status.BETTER if better else Status.WORSE, f"{spec.metric} {self._change_text()}", now)
        elif self.seconds(now) + spec.pair_seconds > spec.max_seconds:
            self.stop(Status.UNDECIDED, "no evidence of a difference within max_seconds", now)
        elif len(self.pairs) >= MOST_PAIRS:
            self.stop(Status.UNDECIDED, f"no evidence of a difference after {MOST_PAIRS} pairs", now)

    def _change_text(self) -> str:
        return f"changed by {math.expm1(self.evidence.mean):+.1%} after {len(self.pairs)} pairs"

    # -- reports -----------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """As `Run.report`, with the pairs of windows."""
        return {
            **super().report(),
            "pairs": len(self.pairs),
            "effect": _effect(self.evidence, self.spec.alpha),
            "guard_effects": {name: _effect(each, self.spec.alpha) for name, each in self.guards.items()},
            "check": _effect(self.check, self.spec.alpha) | {"comparisons": self.check.count},
            "detectable": self._detectable(),
        }

    def _detectable(self) -> dict[str, Any]:
        """Power with the noise so far: the smallest detectable change by max_seconds, and the pairs needed for 5 %."""
        most, deviation = int(self.spec.max_seconds / self.spec.pair_seconds), self.evidence.deviation
        found = {"most_pairs": most, "smallest_change": None, "pairs_for_5_percent": None, "deviation": None}
        if math.isinf(deviation):
            return found
        return found | {
            "smallest_change": smallest_change(most, deviation, self.spec),
            "pairs_for_5_percent": units_for(0.05, deviation, self.spec),
            "deviation": deviation,
        }

    def windows(self) -> list[dict[str, Any]]:
        """The measured windows, in pairs, for a plot."""
        return [
            {"pair": number, "arm": arm, "load": each.load, **each.values}
            for number, pair in enumerate(self.pairs)
            for arm, each in (("control", pair.control), ("treatment", pair.treatment))
        ]

    def to_json(self, now: float) -> dict[str, Any]:
        """The experiment with all its pairs, as `from_json` reads it."""
        pairs = [[tuple(pair.control), tuple(pair.treatment)] for pair in self.pairs]
        return {**super().to_json(now), "pairs": pairs}

    @classmethod
    def from_json(cls, stored: dict[str, Any], now: float) -> Experiment:
        """Read what `to_json` wrote; a running experiment continues with its next pair."""
        made = cls(stored["id"], Spec(**stored["spec"]), now, stored["spent_seconds"])
        for control, treatment in stored["pairs"]:
            pair = Pair(Measured(*control), Measured(*treatment))
            made.pairs.append(pair)
            made._weigh(pair)
        made._restored(stored)
        if made.status is Status.RUNNING and made.pairs:
            made._started = True
            made._begin(treatment_first(made.spec.seed, len(made.pairs)), now)
        return made


def _effect(evidence: Evidence, alpha: float) -> dict[str, Any]:
    """A relative change with its anytime-valid interval; None without evidence."""
    return {
        "change": math.expm1(evidence.mean) if evidence.count else None,
        "interval": bounds_of(evidence.interval(alpha)),
        "e_value": min(evidence.e_value, 1e12),
        "scale": "relative",
    }
