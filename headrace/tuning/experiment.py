"""One experiment as a state machine: times and measurements in, a setting's value and a decision out.

It has no clock and no engine. Call `Experiment.advance` with the time; then `value` is the required value of the
setting, and `due` is the time of the next call. It can be stored as JSON at any time.

`Switchback` compares by time. Requests share one engine with its memory and queue, so with a split of the requests one
arm could slow the other. Instead, the whole engine runs one arm at a time, in pairs of windows in random order:

    | burn-in  A | burn-in  B |   | burn-in  B | burn-in  A |   ...
        pair 1: A first              pair 2: B first

Load drifts little within a pair, and the random order cancels the rest. The difference of a pair is a difference of
logarithms, that is a relative change.

`Split` compares by request or tenant: both values are in use concurrently, the treatment by a share of the units.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from enum import StrEnum
from typing import Any, NamedTuple

from headrace.core.ports import Watcher
from headrace.tuning.evidence import PAIRS, Difference, Evidence
from headrace.tuning.measures import (
    METRICS,
    UNIT_METRICS,
    Assignment,
    By,
    Metric,
    Unit,
    UnitMeter,
    WindowMeter,
    is_share,
)
from headrace.tuning.settings import AnyValue
from headrace.tuning.spec import Spec, smallest_change, spread, units_for

MOST_LINES = 1000
"""Maximum number of stored log lines; lines in the middle of a longer log are dropped."""

MOST_POINTS = 500
"""Maximum number of points in the curve of the effect over time."""

GUARD_PAIRS = 2  # see docs/decisions/tuning.md#guards-of-experiments
"""From this pair on, a guard ends the experiment when the mean change exceeds it. Guards do not wait for significance,
which would take many more pairs."""

GROSS = 3.0
"""If the first pair exceeds a guard by this factor, the experiment ends at once."""

LATENCY = "open_seconds_per_token"
"""The metric that shows whether clients wait for responses before they send more."""

MOST_PAIRS = 10_000
"""Maximum number of pairs; then the experiment ends."""

LEAST_FOR_LOAD = 8  # see docs/decisions/tuning.md#correction-for-load
"""Minimum number of pairs for the load correction."""

FLOOR = 1e-3
"""Added to shares before their logarithm is taken, because a share may be 0."""

CHECK_SECONDS = 1.0
"""Interval between two evaluations of a `Split`."""

MOST_TENANTS = 10_000
"""Maximum number of tenants whose earlier values are covariates; others use the overall mean."""

MEMORY = 0.1
"""Weight of the last value in a tenant's running mean."""


class Status(StrEnum):
    """``better`` and ``worse`` refer to the treatment; ``undecided``: the time ended without significance."""

    RUNNING = "running"
    BETTER = "better"
    WORSE = "worse"
    UNDECIDED = "undecided"
    ROLLED_BACK = "rolled_back"
    STOPPED = "stopped"


class Line(NamedTuple):
    """A line of an experiment's log: the seconds since it began, and what happened."""

    seconds: float
    what: str


class Experiment:
    """An experiment; ``began`` is the engine's time.

    The setting has its control value before the first `advance`. ``assignment`` assigns requests to arms (None: the
    whole engine has one value at a time). ``meter`` must receive all events while the experiment runs, and none
    afterwards. ``effect`` is the evidence of a change of the metric, ``guards`` that of the guarded metrics, ``check``
    an A/A comparison of control with control.
    """

    design: str
    counted: str  # what the evidence counts, in texts
    metrics: Mapping[str, Metric]
    meter: Watcher
    effect: Evidence
    guards: Mapping[str, Evidence]
    check: Evidence
    assignment: Assignment | None = None

    def __init__(self, experiment_id: str, spec: Spec, began: float, spent: float = 0.0) -> None:
        self.id = experiment_id
        self.spec = spec
        self.status = Status.RUNNING
        self.why = ""
        self.due = began
        self.log: list[Line] = []
        self._curve: list[dict[str, Any]] = []
        self._text = ""  # of an ended experiment, as it is stored
        self._spent = spent  # before the last restart
        self._began = began

    # -- what the designs do differently -----------------------------------------------------------

    def advance(self, now: float) -> None:
        """Do everything that is due by ``now``."""
        raise NotImplementedError

    @property
    def arm(self) -> str:
        """The current arm."""
        raise NotImplementedError

    def _is_relative(self, metric: str) -> bool:
        """Whether its evidence is about logarithms; otherwise it is about differences."""
        raise NotImplementedError

    def _broken(self) -> str:
        """The guard that the treatment breaks, as a reason; empty if none."""
        raise NotImplementedError

    def _exhausted(self, now: float) -> str:
        """Why there will be no more evidence; empty if there will be."""
        raise NotImplementedError

    def _detectable(self) -> dict[str, Any]:
        """Power with the noise so far."""
        raise NotImplementedError

    # -- state -------------------------------------------------------------------------------------

    @property
    def value(self) -> AnyValue:
        """The required value of the setting, for all requests without a value of their own."""
        return self.spec.treatment if self.adopted else self.spec.control

    @property
    def adopted(self) -> bool:
        """Whether the treatment was adopted."""
        return self.status is Status.BETTER and self.spec.adopt

    def seconds(self, now: float) -> float:
        """Seconds that it has run."""
        return self._spent + (now - self._began if self.status is Status.RUNNING else 0.0)

    def note(self, what: str, now: float) -> None:
        """Write a line into the log."""
        self._text = ""
        self.log.append(Line(round(self.seconds(now), 3), what))
        if len(self.log) > MOST_LINES:
            del self.log[MOST_LINES // 2]

    def stop(self, status: Status, why: str, now: float) -> None:
        """End the experiment; the setting returns to its control value."""
        if self.status is Status.RUNNING:
            self.note(f"{status.value}: {why}", now)
            self._spent = self.seconds(now)
            self.status, self.why = status, why
            self.due = math.inf

    def roll_back(self, why: str, now: float) -> None:
        """Undo an adopted treatment; the setting returns to its control value."""
        self.status, self.why = Status.ROLLED_BACK, f"rolled back {why}"
        self.note(f"{self.status.value}: {why}", now)

    def _judge(self, now: float) -> None:
        """End the experiment if a guard is broken, the evidence suffices, or there will be no more."""
        spec = self.spec
        if why := self._broken():
            self.stop(Status.ROLLED_BACK, why, now)
        elif self.effect.e_value >= 1 / spec.alpha:
            better = self.metrics[spec.metric].better * self.effect.mean > 0
            why = f"{self._changed(spec.metric, self.effect)} after {self.effect.count} {self.counted}"
            self.stop(Status.BETTER if better else Status.WORSE, why, now)
        elif why := self._exhausted(now):
            self.stop(Status.UNDECIDED, f"no evidence of a difference {why}", now)

    def _changed(self, metric: str, evidence: Evidence) -> str:
        return f"{metric} changed by {self._change(metric, evidence.mean):+.1%}"

    def _change(self, metric: str, mean: float) -> float:
        return math.expm1(mean) if self._is_relative(metric) else mean

    # -- reports -----------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """The report as JSON: effect with its interval, guards, decision, log."""
        metric = self.spec.metric
        return {
            "id": self.id,
            "object": "experiment",
            "design": self.design,
            **asdict(self.spec),
            "status": self.status.value,
            "why": self.why,
            "arm": self.arm,
            "log": [line._asdict() for line in self.log],
            "pairs": 0,
            "effect": self._effect(metric, self.effect),
            "guard_effects": {name: self._effect(name, each) for name, each in self.guards.items()},
            "check": self._effect(metric, self.check) | {"comparisons": self.check.count},
            "detectable": self._detectable(),
        }

    def _effect(self, metric: str, evidence: Evidence) -> dict[str, Any]:
        """A relative change, or a difference of shares, with its anytime-valid interval; None without evidence."""
        interval = evidence.interval(self.spec.alpha)
        known = not math.isinf(interval.high)
        return {
            "change": self._change(metric, evidence.mean) if evidence.count else None,
            "interval": [self._change(metric, each) for each in interval] if known else None,
            "e_value": min(evidence.e_value, 1e12),
            "scale": "relative" if self._is_relative(metric) else "difference",
        }

    def windows(self) -> list[dict[str, Any]]:
        """The measured windows, for a plot; empty if the arms are not windows."""
        return []

    def curve(self) -> list[dict[str, Any]]:
        """The effect and its interval over time, for a plot; ``check`` is control against control (A/A)."""
        return list(self._curve)

    def draw(self, at: Mapping[str, float]) -> None:
        """Add the present effect to the curve; when the curve is full, every second point is dropped."""
        if len(self._curve) >= MOST_POINTS:
            del self._curve[1::2]
        metric = self.spec.metric
        check = self._effect(metric, self.check)
        self._curve.append({**at, **self._effect(metric, self.effect), "check": check})

    def stored(self, now: float) -> str:
        """`to_json` as text, made once when the experiment has ended: it is stored whenever one that runs measures."""
        if self.status is Status.RUNNING:
            return json.dumps(self.to_json(now))
        self._text = self._text or json.dumps(self.to_json(now))
        return self._text

    def to_json(self, now: float) -> dict[str, Any]:
        """The experiment, as `restored` reads it."""
        return {
            "id": self.id,
            "spec": asdict(self.spec),
            "status": self.status.value,
            "why": self.why,
            "spent_seconds": self.seconds(now),
            "log": [list(line) for line in self.log],
        }

    def restore(self, stored: Mapping[str, Any], now: float) -> None:
        """Continue from what `to_json` wrote; a new experiment with the same spec calls it."""
        self.status, self.why = Status(stored["status"]), stored["why"]
        self.log = [Line(*line) for line in stored.get("log", [])]
        if self.status is not Status.RUNNING:
            self.due = math.inf


# -- by time ---------------------------------------------------------------------------------------


class Measured(NamedTuple):
    """The metrics of one window, and its offered load."""

    treatment: bool
    values: dict[str, float]
    load: float


class Pair(NamedTuple):
    """Two measured windows."""

    control: Measured
    treatment: Measured


class Switchback(Experiment):
    """An experiment by time. After a restart, the interrupted pair is measured again.

    ``check`` compares the control windows of neighbouring pairs.
    """

    design = "switchback"
    counted = "pairs"
    metrics = METRICS

    def __init__(self, experiment_id: str, spec: Spec, began: float, spent: float = 0.0) -> None:
        super().__init__(experiment_id, spec, began, spent)
        self.pairs: list[Pair] = []
        self.effect = Evidence(PAIRS)
        self.guards = {name: Evidence(PAIRS) for name in spec.guards}
        self.check = Evidence(PAIRS)
        self.meter = self._windows = WindowMeter()
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
            self._begin_pair(now)
        elif not self._measuring:
            self._measuring = True
            self._windows.open(now)
            self.due = now + self.spec.window_seconds
        else:
            values, load = self._windows.close(now)
            self._end_window(Measured(self._treatment, values, load), now)

    def _begin_pair(self, now: float) -> None:
        self._started = True
        self._begin(treatment_first(self.spec.seed, len(self.pairs)), now)

    def _begin(self, treatment: bool, now: float) -> None:
        self._treatment, self._measuring = treatment, False
        self.due = now + self.spec.burn_in_seconds

    def _end_window(self, measured: Measured, now: float) -> None:
        if self._half is None:
            self._half = measured
            self._begin(not self._treatment, now)
            return
        first, self._half = self._half, None
        self._add(Pair(measured, first) if first.treatment else Pair(first, measured))
        self._judge(now)
        if self.status is Status.RUNNING:
            self._begin_pair(now)

    def _add(self, pair: Pair) -> None:
        self.pairs.append(pair)
        change = log_change(self.spec.metric, *pair)
        if change is not None:
            latency = log_change(LATENCY, *pair)
            self.effect.add(self._load.correct(change, log_load(*pair), latency))
        for name, evidence in self.guards.items():
            if (change := log_change(name, *pair)) is not None:
                evidence.add(change)
        if len(self.pairs) % 2 == 0:
            self._compare_controls(self.pairs[-2].control, pair.control)
        self.draw({"pairs": len(self.pairs)})

    def _compare_controls(self, before: Measured, after: Measured) -> None:
        """Add two control windows to the check, in alternating order, so that a trend of the load cancels out."""
        both = (before, after) if len(self.pairs) % 4 else (after, before)
        change = log_change(self.spec.metric, *both)
        if change is not None:
            self.check.add(change)

    def _is_relative(self, metric: str) -> bool:
        return True

    def _broken(self) -> str:
        # One such window is no evidence: its only request may have arrived at its end.
        if self.guards and len(self.pairs) > 1 and all(stalled(*pair) for pair in self.pairs[-2:]):
            return "no token was generated in two windows of the treatment, although requests arrived"
        for name, evidence in self.guards.items():
            worse = -METRICS[name].better * evidence.mean
            bound = math.log1p(self.spec.guards[name]) * (1.0 if evidence.count >= GUARD_PAIRS else GROSS)
            if worse > bound:
                return f"{self._changed(name, evidence)} in {evidence.count} pairs"
        return ""

    def _exhausted(self, now: float) -> str:
        if self.seconds(now) + self.spec.pair_seconds > self.spec.max_seconds:
            return "within max_seconds"
        return f"after {MOST_PAIRS} pairs" if len(self.pairs) >= MOST_PAIRS else ""

    def report(self) -> dict[str, Any]:
        """As `Experiment.report`, with the number of pairs."""
        return super().report() | {"pairs": len(self.pairs)}

    def _detectable(self) -> dict[str, Any]:
        """The smallest detectable change by max_seconds, and the pairs needed for 5 %."""
        most, deviation = int(self.spec.max_seconds / self.spec.pair_seconds), self.effect.deviation
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
        """The experiment with all its pairs."""
        pairs = [[tuple(pair.control), tuple(pair.treatment)] for pair in self.pairs]
        return {**super().to_json(now), "pairs": pairs}

    def restore(self, stored: Mapping[str, Any], now: float) -> None:
        """As `Experiment.restore`; it continues with its next pair."""
        for control, treatment in stored["pairs"]:
            self._add(Pair(Measured(*control), Measured(*treatment)))
        super().restore(stored, now)
        if self.status is Status.RUNNING and self.pairs:
            self._begin_pair(now)


def treatment_first(seed: int, pair: int) -> bool:
    """Whether the treatment comes first in a pair; random, determined by the seed."""
    return hashlib.sha256(f"{seed}:{pair}".encode()).digest()[0] < 128


def log_change(metric: str, control: Measured, treatment: Measured) -> float | None:
    """The relative change of a metric as a difference of logarithms; None if a window has no value."""
    before, after = control.values.get(metric), treatment.values.get(metric)
    if before is None or after is None:
        return None
    floor = FLOOR if metric.endswith(("_share", "_per_request")) else 0.0
    if before + floor <= 0.0 or after + floor <= 0.0:
        return None
    return math.log((after + floor) / (before + floor))


def log_load(control: Measured, treatment: Measured) -> float:
    """Relative load difference of the treatment's window, as a difference of logarithms."""
    return math.log((treatment.load + 1.0) / (control.load + 1.0))


def stalled(control: Measured, treatment: Measured) -> bool:
    """Whether requests arrived and no token was generated under the treatment alone; latencies have no value then."""
    name = "output_tokens_per_second"
    return treatment.load > 0.0 and treatment.values.get(name) == 0.0 and control.values.get(name, 0.0) > 0.0


class LoadCorrection:
    """A running regression of differences of the metric on differences of load (CUPED: Deng et al., WSDM '13).

    Clients that wait for responses before they send more (a closed loop) make the load follow the setting, and a
    correction for it would remove the effect. They keep the number of open requests constant, so load and latency move
    against each other (Little's law). Differences are therefore corrected only while both rise together.
    """

    def __init__(self) -> None:
        self.count = 0
        self._load_mean = self._squares = self._mean = self._products = 0.0
        self._latency_mean = self._latency_products = 0.0

    def correct(self, difference: float, load: float, latency: float | None) -> float:
        """``difference`` corrected for the load by a regression on earlier pairs, which then learns from this one.

        ``latency`` is the relative change of the time per token; a pair without it is not corrected. If the load does
        not depend on the setting, the random order makes the expected load difference 0, so the correction does not
        bias the mean.
        """
        if latency is None:
            return difference
        corrected = difference
        if self.count >= LEAST_FOR_LOAD and self._squares > 0.0 and self._latency_products > 0.0:
            corrected -= self._products / self._squares * load
        self.count += 1
        off = load - self._load_mean
        self._load_mean += off / self.count
        self._squares += off * (load - self._load_mean)
        self._mean += (difference - self._mean) / self.count
        self._products += off * (difference - self._mean)
        self._latency_mean += (latency - self._latency_mean) / self.count
        self._latency_products += off * (latency - self._latency_mean)
        return corrected


# -- by request or tenant --------------------------------------------------------------------------


class Split(Experiment):
    """An experiment by units; ``counts`` are the numbers of units of control and treatment.

    Requests of treated units carry the treatment value. A guard ends the experiment when the estimate exceeds it and
    the interval excludes zero. ``check`` compares every second control unit with the others.
    """

    design = "split"
    counted = "units"
    metrics = UNIT_METRICS

    def __init__(self, experiment_id: str, spec: Spec, began: float, spent: float = 0.0) -> None:
        super().__init__(experiment_id, spec, began, spent)
        self.assignment: Assignment = Assignment(
            By(spec.unit), spec.seed, began - spent, spec.window_seconds, spec.share
        )
        self.meter = self._units = UnitMeter(self.assignment)
        self.counts = [0, 0]
        measured = {name: Difference(3, spec.share) for name in (spec.metric, *spec.guards)}
        self._restart(measured, Difference(3))
        self._earlier: dict[str, dict[str, float]] = {name: {} for name in self._differences}
        self._next_point = 0.0

    def _restart(self, differences: dict[str, Difference], controls: Difference) -> None:
        self._differences, self._controls = differences, controls
        self.effect, self.check = differences[self.spec.metric].mean, controls.mean
        self.guards = {name: differences[name].mean for name in self.spec.guards}

    @property
    def arm(self) -> str:
        """``both`` while it runs, since the arms are concurrent."""
        return "both" if self.status is Status.RUNNING else "control"

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
        for name, difference in self._differences.items():
            value = unit.values.get(name)
            if value is None:
                continue
            earlier = self._earlier[name]
            before = earlier.get(unit.tenant, 0.0)
            difference.add(unit.treated, value, (*unit.covariates, before))
            if name == self.spec.metric and not unit.treated:
                self._controls.add(self.counts[0] % 2 == 1, value, (*unit.covariates, before))
            if unit.tenant in earlier:
                earlier[unit.tenant] = before + MEMORY * (value - before)
            elif len(earlier) < MOST_TENANTS:
                earlier[unit.tenant] = value

    def _draw(self, now: float) -> None:
        """Add a point to the curve from time to time."""
        seconds = self.seconds(now)
        if seconds < self._next_point or math.isinf(self.effect.interval(self.spec.alpha).high):
            return
        self.draw({"seconds": seconds, "units": self.effect.count})
        self._next_point = seconds * (1 + 2 / MOST_POINTS) + CHECK_SECONDS

    def _is_relative(self, metric: str) -> bool:
        return not is_share(metric)

    def _broken(self) -> str:
        for name, allowed in self.spec.guards.items():
            evidence, better = self.guards[name], UNIT_METRICS[name].better
            low, high = evidence.interval(self.spec.alpha)
            sure = high < 0.0 if better > 0 else low > 0.0
            bound = math.log1p(allowed) if self._is_relative(name) else allowed
            if sure and -better * evidence.mean > bound:
                return f"{self._changed(name, evidence)} after {evidence.count} units"
        return ""

    def _exhausted(self, now: float) -> str:
        return "within max_seconds" if self.seconds(now) >= self.spec.max_seconds else ""

    def report(self) -> dict[str, Any]:
        """As `Experiment.report`, with the units of each arm."""
        return super().report() | {"units": {"control": self.counts[0], "treatment": self.counts[1]}}

    def _detectable(self) -> dict[str, Any]:
        """The same as of pairs, with the noise and the rate of units so far."""
        found: dict[str, Any] = {"most_pairs": 0, "pairs_for_5_percent": None, "smallest_change": None}
        deviation = self.effect.deviation / spread(self.spec.share)
        last = self._curve[-1] if self._curve else None
        if last is None or not deviation > 0.0 or math.isinf(deviation):
            return found | {"deviation": None, "units_per_second": None, "units_for_5_percent": None}
        rate = last["units"] / max(last["seconds"], 1e-9)
        most = int(rate * self.spec.max_seconds)
        return found | {
            "deviation": deviation,
            "units_per_second": rate,
            "smallest_change": smallest_change(most, deviation, self.spec),
            "units_for_5_percent": units_for(0.05, deviation, self.spec),
        }

    def to_json(self, now: float) -> dict[str, Any]:
        """The experiment with its state; requests that are open then are not measured."""
        return {
            **super().to_json(now),
            "counts": self.counts,
            "differences": {name: each.to_json() for name, each in self._differences.items()},
            "check": self._controls.to_json(),
            "earlier": self._earlier,
            "curve": self._curve,
        }

    def restore(self, stored: Mapping[str, Any], now: float) -> None:
        """As `Experiment.restore`; it continues with the same arms."""
        self.counts = list(stored["counts"])
        share = self.spec.share
        differences = {
            name: Difference.from_json(each, share) for name, each in stored["differences"].items()
        }
        check = stored.get("check")  # not in files of earlier versions
        self._restart(differences, self._controls if check is None else Difference.from_json(check))
        self._earlier = {name: dict(each) for name, each in stored["earlier"].items()}
        self._curve = list(stored["curve"])
        super().restore(stored, now)


def begin(experiment_id: str, spec: Spec, now: float, spent: float = 0.0) -> Experiment:
    """The experiment of a definition, in the design of its unit."""
    design = Switchback if spec.unit == By.TIME else Split
    return design(experiment_id, spec, now, spent)


def restored(stored: Mapping[str, Any], now: float) -> Experiment:
    """Read what `Experiment.to_json` wrote."""
    made = begin(stored["id"], Spec(**stored["spec"]), now, stored["spent_seconds"])
    made.restore(stored, now)
    return made
