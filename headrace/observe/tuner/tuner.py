"""The tuner: tries one small change at a time as an experiment, and adopts it if the evidence says that it is better.

A trial is a switchback experiment on the live traffic with guards, so a change for the worse is rolled back within two
pairs of windows, and noise is not taken for a gain. The tuner only chooses what to try next:

    mixed_prefill_ratio up -> down -> max_num_batched_tokens up -> down -> ...      better: again in this direction
                                                                                   else: this direction rests

Where requests mostly wait for their first token, changes that let more work in are tried first; where they mostly wait
for the steps of their output, the others. A direction that brought nothing rests for a time that doubles with each
failure, so that a tuned server is hardly disturbed. When the load has become another one, nothing rests any more, and
settings that were changed are first tried at the value from the start. An experiment of a person stops the trial, and
the tuner waits until it has ended.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from headrace.observe.experiments.conductor import Conductor
from headrace.observe.experiments.experiment import Experiment
from headrace.observe.experiments.measures import METRICS
from headrace.observe.experiments.run import Status
from headrace.observe.steering.settings import Value
from headrace.observe.tuner.signals import Shift, Side, Signals
from headrace.observe.tuner.steps import Range

NAME = "tuner"
"""What experiments of the tuner are marked with."""

METRIC = "open_seconds_per_token"
"""Time per token as its client sees it, waiting included: less is better at low load (latency) and at overload, where
it falls with the queue as throughput rises. By Little's law it is the latency per token of steady traffic; unlike the
latency of the requests that end in a window, it does not count steps before the window."""

GUARDS: Mapping[str, float] = {"itl_p99_seconds": 0.5, "ttft_p99_seconds": 1.0, "failed_share": 0.5}
"""How much worse each metric may become in a trial. Throughput is none of them: below saturation it is the offered
load, which differs more between two windows than a guard may allow, and at saturation the metric itself follows it."""

OVERLOAD = 0.7
"""Share of their latency that requests wait, above which what was adopted under a lower load is undone at once. Trials
cannot tell then: a queue that grows for minutes hardly shows in a window of seconds."""

HOPE_PAIRS = 8
"""Pairs after which a trial ends that shows no gain so far. Others may take many pairs, so a small gain is found."""

REST_SECONDS = 600.0
"""How long a direction that brought nothing rests the first time."""

LONGEST_REST_SECONDS = 24 * 3600.0

MOST_NOTES = 200
"""Lines of the audit log that are kept."""

COOL_DOWN_WINDOWS = 2.0
"""Windows between two trials: what the last change left behind settles."""


SMOOTHING_WINDOWS = 2.0
"""Time constant of the smoothed inputs, in windows."""

UP_FIRST: Mapping[Side, bool] = {Side.WAITING: True, Side.STEPS: False}
"""Larger values of all settings let more work into a step; they help requests that wait."""


class Mode(StrEnum):
    """``advise`` tries changes and tells the better ones, but adopts none."""

    OFF = "off"
    ADVISE = "advise"
    ON = "on"


class Note(NamedTuple):
    """One line of the audit log."""

    at: float
    what: str


class Tuner:
    """Chooses trials for ``conductor``. ``ranges`` bound each setting; a window is ``window_seconds`` long.

    ``start`` are the values to which settings return when the load has changed. `signals` must see all events unless
    the mode is off.
    """

    def __init__(
        self,
        conductor: Conductor,
        ranges: Mapping[str, Range],
        start: Mapping[str, Value],
        mode: Mode,
        window_seconds: float = 30.0,
        burn_in_seconds: float = 5.0,
        most_pairs: int = 60,
    ) -> None:
        self.mode = mode
        self.notes: list[Note] = []
        self._conductor = conductor
        self.signals = self._fresh_signals(window_seconds)
        self._ranges = dict(ranges)
        self._start = dict(start)
        self._present: Mapping[str, Value] = self._start
        self._shift = Shift(2 * SMOOTHING_WINDOWS * window_seconds)
        self._calm: set[str] = set()  # settings whose value was adopted under a lower load
        self._home: set[str] = set()  # settings to try at their first value again
        self._window_seconds = window_seconds
        self._burn_in_seconds = burn_in_seconds
        self._most_pairs = most_pairs
        self._trial: tuple[Experiment, str, bool] | None = None
        self._rest: dict[tuple[str, bool], float] = {}  # seconds of the next rest
        self._resting: dict[tuple[str, bool], float] = {}  # until when
        self._favourite: tuple[str, bool] | None = None  # the direction that was better last
        self._next = 0
        self._cool = -math.inf
        self._look_at = -math.inf  # when the load is looked at next
        self._tried = 0

    def tick(self, now: float, present: Mapping[str, Value]) -> None:
        """Learn from the trial that has ended, and begin the next one that is due."""
        self._present = present
        if self._trial is not None:
            run = self._trial[0]
            if self._overloaded:
                run.stop(Status.STOPPED, "requests mostly wait", now)
            if run.status is Status.RUNNING and _is_hopeless(run):
                run.stop(Status.UNDECIDED, f"no gain so far after {run.evidence.count} pairs", now)
            if run.status is Status.RUNNING:
                return
            self._learn(*self._trial, now)
            self._trial = None
        if self.mode is Mode.OFF or self._conductor.running is not None:
            return
        if self._overloaded:
            self._return(now)
            return
        if now < self._cool:
            return
        self._look(now)
        wanted = self._choose(now)
        if wanted is not None:
            self._begin(*wanted, now)

    @property
    def _overloaded(self) -> bool:
        """Whether requests mostly wait while settings have values that suited a lower load."""
        return self.mode is Mode.ON and bool(self._calm) and self.signals.waiting > OVERLOAD

    def _return(self, now: float) -> None:
        """Set one setting back to the value at the start, without a trial."""
        setting = self._calm.pop()
        if self._present[setting] != self._start[setting]:
            trial = self._start_trial(setting, self._start[setting], now)
            trial.stop(Status.BETTER, "requests mostly wait: back to the value at the start", now)
            self._log(now, f"{setting} {trial.spec.control:g} -> {trial.spec.treatment:g}: {trial.why}")

    def set_mode(self, mode: Mode, now: float) -> None:
        """Change the mode; the present trial ends, and its setting returns to the value before."""
        if self.mode is Mode.OFF:
            self.signals = self._fresh_signals(self._window_seconds)  # the old ones have not seen all events
        self.mode = mode
        if self._trial is not None and self._trial[0].status is Status.RUNNING:
            self._conductor.stop(self._trial[0].id, now)

    @staticmethod
    def _fresh_signals(window_seconds: float) -> Signals:
        return Signals(SMOOTHING_WINDOWS * window_seconds)

    def due(self) -> float:
        """When `tick` may begin a trial; infinite while one runs or the tuner is off."""
        if self.mode is Mode.OFF or self._conductor.running is not None:
            return math.inf
        free = [
            self._resting.get(each, -math.inf) for each in self._directions() if self._step(*each) is not None
        ]
        return max(self._cool, min([self._look_at, *free]))

    def _look(self, now: float) -> None:
        """Forget what was learned of another load."""
        self._look_at = now + COOL_DOWN_WINDOWS * self._window_seconds
        if self._shift.happened(self.signals.load(now), now):
            self._rest.clear()
            self._resting.clear()
            self._favourite = None
            self._home = {name for name in self._ranges if self._present[name] != self._start[name]}
            self._log(now, f"the load has changed to {self.signals.load(now):.0f} tokens/s: nothing rests")

    def report(self, present: Mapping[str, Value]) -> dict[str, Any]:
        """Mode, present values with their bounds, the trial, and what has been tried."""
        return {
            "object": "tuner",
            "mode": self.mode.value,
            "metric": METRIC,
            "guards": dict(GUARDS),
            "settings": {
                name: {"value": present[name], "low": each.low, "high": each.high, "factor": each.factor}
                for name, each in self._ranges.items()
            },
            "waiting_share": None if math.isnan(self.signals.waiting) else self.signals.waiting,
            "trial": self._trial[0].id if self._trial else None,
            "log": [{"at": note.at, "what": note.what} for note in self.notes],
        }

    def _directions(self) -> list[tuple[str, bool]]:
        first = UP_FIRST[self.signals.side]
        return [(name, up) for name in self._ranges for up in (first, not first)]

    def _step(self, name: str, up: bool) -> Value | None:
        """The next value in a direction, as seen at the last tick; None at a bound."""
        return self._ranges[name].step(self._present[name], up)

    def _choose(self, now: float) -> tuple[str, bool, Value] | None:
        """The way back to the start, the direction that was better last, or the next one that does not rest."""
        for name in sorted(self._home):
            self._home.discard(name)
            if self._present[name] != self._start[name]:
                return name, self._start[name] > self._present[name], self._start[name]
        order = self._directions()
        order = order[self._next :] + order[: self._next]
        for each in [*([self._favourite] if self._favourite else []), *order]:
            value = self._step(*each)
            if value is not None and self._resting.get(each, -math.inf) <= now:
                return (*each, value)
        return None

    def _begin(self, setting: str, up: bool, value: Value, now: float) -> None:
        self._trial = (self._start_trial(setting, value, now), setting, up)

    def _start_trial(self, setting: str, value: Value, now: float) -> Experiment:
        pair = 2 * (self._window_seconds + self._burn_in_seconds)
        body = {
            "setting": setting,
            "treatment": value,
            "metric": METRIC,
            "guards": dict(GUARDS),
            "window_seconds": self._window_seconds,
            "burn_in_seconds": self._burn_in_seconds,
            "max_seconds": self._most_pairs * pair,
            "seed": self._tried,
            "adopt": self.mode is Mode.ON,
        }
        self._tried += 1
        trial = self._conductor.start(body, now, NAME)
        assert isinstance(trial, Experiment)  # by time, as all settings of the engine
        return trial

    def _learn(self, trial: Experiment, setting: str, up: bool, now: float) -> None:
        direction = (setting, up)
        told = f"{setting} {trial.spec.control:g} -> {trial.spec.treatment:g}: {trial.status}, {trial.why}"
        self._log(now, told)
        self._cool = now + COOL_DOWN_WINDOWS * self._window_seconds
        if trial.status is Status.STOPPED:
            return
        self._next = (self._directions().index(direction) + 1) % len(self._directions())
        if trial.status is Status.BETTER and trial.spec.adopt:
            self._favourite = direction
            if not self.signals.waiting > OVERLOAD:  # unknown counts as no
                self._calm.add(setting)
            self._rest.pop(direction, None)
            back = (setting, not up)  # evidence against this one
            self._resting[back] = now + self._longer(back)
            return
        self._favourite = None
        self._resting[direction] = now + self._longer(direction)

    def _log(self, now: float, what: str) -> None:
        self.notes = [*self.notes[-(MOST_NOTES - 1) :], Note(now, what)]

    def _longer(self, direction: tuple[str, bool]) -> float:
        """The rest of a direction that brought nothing; the next one is twice as long."""
        rest = self._rest.get(direction, REST_SECONDS)
        self._rest[direction] = min(LONGEST_REST_SECONDS, 2 * rest)
        return rest


def _is_hopeless(trial: Experiment) -> bool:
    """Whether a trial has enough pairs, and they show no gain."""
    gain = METRICS[trial.spec.metric].better * trial.evidence.mean
    return trial.evidence.count >= HOPE_PAIRS and gain <= 0.0
