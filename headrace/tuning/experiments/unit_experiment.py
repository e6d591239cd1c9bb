"""One experiment by request or tenant: both values are in use concurrently, each by half of the units.

It has no clock and no engine. Requests of treated units carry the treatment value (see `arms`), `units` measures them,
and `asymptotic` gives the confidence sequence. A guard ends the experiment when the estimate exceeds it and the
interval excludes zero.
"""

from __future__ import annotations

import math
from typing import Any

from headrace.core.ports import Watcher
from headrace.tuning.experiments.arms import Assignment, By
from headrace.tuning.experiments.asymptotic import LEAST_UNITS, AsymptoticMean, Difference
from headrace.tuning.experiments.power import smallest_change, units_for
from headrace.tuning.experiments.run import MOST_POINTS, Run, Status, bounds_of
from headrace.tuning.experiments.spec import Spec
from headrace.tuning.experiments.units import UNIT_METRICS, Unit, UnitMeter, is_share

CHECK_SECONDS = 1.0
"""Interval between two evaluations."""

MOST_TENANTS = 10_000
"""Maximum number of tenants whose earlier values are covariates; others use the overall mean."""

MEMORY = 0.1
"""Weight of the last value in a tenant's running mean."""


class UnitExperiment(Run):
    """A `Run` by units; ``counts`` are the numbers of units of control and treatment.

    ``check`` is an A/A comparison of every second control unit with the others.
    """

    design = "split"

    def __init__(self, experiment_id: str, spec: Spec, began: float, spent: float = 0.0) -> None:
        super().__init__(experiment_id, spec, began, spent)
        self.assignment = Assignment(By(spec.unit), spec.seed, began - spent, spec.window_seconds)
        self._units = UnitMeter(self.assignment)
        self.meter: Watcher = self._units
        self.counts = [0, 0]
        self.differences = {name: Difference(3) for name in (spec.metric, *spec.guards)}
        self.check = Difference(3)
        self._earlier: dict[str, dict[str, float]] = {name: {} for name in self.differences}
        self._next_point = 0.0

    @property
    def arm(self) -> str:
        """``both`` while it runs, since the arms are concurrent."""
        return "both" if self.status is Status.RUNNING else "control"

    @property
    def effect(self) -> AsymptoticMean:
        """The estimated effect on the primary metric."""
        return self.differences[self.spec.metric].mean

    def advance(self, now: float) -> None:
        """Add newly measured units, and decide."""
        if self.status is not Status.RUNNING or now < self.due:
            return
        for unit in self._units.take(now):
            self.add(unit)
        self._draw(now)
        self._judge(now)
        if self.status is Status.RUNNING:
            self.due = now + CHECK_SECONDS

    def add(self, unit: Unit) -> None:
        """Add one unit."""
        self.counts[unit.treated] += 1
        for name, difference in self.differences.items():
            value = unit.values.get(name)
            if value is None:
                continue
            earlier = self._earlier[name]
            before = earlier.get(unit.tenant, 0.0)
            difference.add(unit.treated, value, (*unit.covariates, before))
            if name == self.spec.metric and not unit.treated:
                self.check.add(self.counts[0] % 2 == 1, value, (*unit.covariates, before))
            if unit.tenant in earlier:
                earlier[unit.tenant] = before + MEMORY * (value - before)
            elif len(earlier) < MOST_TENANTS:
                earlier[unit.tenant] = value

    def _judge(self, now: float) -> None:
        spec = self.spec
        for name, allowed in spec.guards.items():
            mean, better = self.differences[name].mean, UNIT_METRICS[name].better
            low, high = mean.interval(spec.alpha)
            sure = high < 0.0 if better > 0 else low > 0.0
            bound = allowed if is_share(name) else math.log1p(allowed)
            if sure and -better * mean.mean > bound:
                self.stop(Status.ROLLED_BACK, f"{name} {_change_text(name, mean)}", now)
                return
        if self.effect.e_value >= 1 / spec.alpha:
            better = UNIT_METRICS[spec.metric].better * self.effect.mean > 0
            reason = f"{spec.metric} {_change_text(spec.metric, self.effect)}"
            self.stop(Status.BETTER if better else Status.WORSE, reason, now)
        elif self.seconds(now) >= spec.max_seconds:
            self.stop(Status.UNDECIDED, "no evidence of a difference within max_seconds", now)

    def _draw(self, now: float) -> None:
        """Add a point to the curve from time to time."""
        seconds = self.seconds(now)
        if seconds < self._next_point or self.effect.count < LEAST_UNITS:
            return
        metric, alpha = self.spec.metric, self.spec.alpha
        point = {"seconds": seconds, "units": self.effect.count, **_effect(metric, self.effect, alpha)}
        self.draw(point | {"check": _effect(metric, self.check.mean, alpha)})
        self._next_point = seconds * (1 + 2 / MOST_POINTS) + CHECK_SECONDS

    # -- reports -----------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """As `Run.report`, with the units of each arm."""
        alpha = self.spec.alpha
        guards = {name: _effect(name, self.differences[name].mean, alpha) for name in self.spec.guards}
        return {
            **super().report(),
            "pairs": 0,
            "units": {"control": self.counts[0], "treatment": self.counts[1]},
            "effect": _effect(self.spec.metric, self.effect, alpha),
            "guard_effects": guards,
            "check": _effect(self.spec.metric, self.check.mean, alpha)
            | {"comparisons": self.check.mean.count},
            "detectable": self._detectable(),
        }

    def _detectable(self) -> dict[str, Any]:
        """Power with the noise and the rate of units so far."""
        found: dict[str, Any] = {"most_pairs": 0, "pairs_for_5_percent": None, "smallest_change": None}
        mean, last = self.effect, self._curve[-1] if self._curve else None
        if last is None or not mean.deviation > 0.0 or math.isinf(mean.deviation):
            return found | {"deviation": None, "units_per_second": None, "units_for_5_percent": None}
        rate = last["units"] / max(last["seconds"], 1e-9)
        most = int(rate * self.spec.max_seconds)
        return found | {
            "deviation": mean.deviation,
            "units_per_second": rate,
            "smallest_change": smallest_change(most, mean.deviation, self.spec),
            "units_for_5_percent": units_for(0.05, mean.deviation, self.spec),
        }

    def to_json(self, now: float) -> dict[str, Any]:
        """The experiment with its state; requests that are open then are not measured."""
        return {
            **super().to_json(now),
            "counts": self.counts,
            "differences": {name: each.to_json() for name, each in self.differences.items()},
            "check": self.check.to_json(),
            "earlier": self._earlier,
            "curve": self._curve,
        }

    @classmethod
    def from_json(cls, stored: dict[str, Any], now: float) -> UnitExperiment:
        """Read what `to_json` wrote; a running experiment continues with the same arms."""
        made = cls(stored["id"], Spec(**stored["spec"]), now, stored["spent_seconds"])
        made.counts = list(stored["counts"])
        made.differences = {name: Difference.from_json(each) for name, each in stored["differences"].items()}
        if "check" in stored:  # not in files of earlier versions
            made.check = Difference.from_json(stored["check"])
        made._earlier = {name: dict(each) for name, each in stored["earlier"].items()}
        made._curve = list(stored["curve"])
        made._restored(stored)
        return made


def _effect(metric: str, mean: AsymptoticMean, alpha: float) -> dict[str, Any]:
    """A relative change, or a difference of shares, with its anytime-valid interval."""
    relative = not is_share(metric)
    change = (math.expm1(mean.mean) if relative else mean.mean) if mean.count else None
    return {
        "change": change,
        "interval": bounds_of(mean.interval(alpha), relative=relative),
        "e_value": min(mean.e_value, 1e12),
        "scale": "relative" if relative else "difference",
    }


def _change_text(metric: str, mean: AsymptoticMean) -> str:
    change = mean.mean if is_share(metric) else math.expm1(mean.mean)
    return f"changed by {change:+.1%} after {mean.count} units"
