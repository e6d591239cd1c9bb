"""The tuner: one small change of one setting at a time, evaluated before it is made and measured afterwards.

Traffic is cut into periods of a few windows. At the end of a period its requests are run through a model of the
scheduler with the present settings. The logarithm of measured over modelled time per token is the error of the model;
it has little of the load's noise, because both sides have the same requests. Then, in this order:

    a change on probation   gain = what the model says the change brings - what the error has risen since.
                            A loss of 3 %, or beyond a guard: it is undone, and its direction rests.
    what is to come         the requests of the last periods, at the present load and at one that may come later, with
                            each setting some steps up and down, and with all at their values at the start. The change
                            that gains most, as a mean over both loads, is made if it gains enough, and is on probation
                            next.

A direction that was undone rests for a time that doubles with each failure. An experiment of a person freezes the tuner
until it has ended. In texts for users, an evaluation before a change is a rehearsal.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from headrace.core.knobs import Knobs
from headrace.tuning.evaluator import Evaluate, NotEvaluated, ReadCurve
from headrace.tuning.search import (
    GUARDS,
    LEAST_GAIN,
    METRIC,
    Candidate,
    Evaluated,
    Probation,
    Range,
    Search,
    Way,
    errors_of,
    judge,
)
from headrace.tuning.settings import Change, Setting, Value
from headrace.tuning.traffic import PERIODS, Forecaster, History, Outcome, Watched

MOST_MODELLED = 10_000
"""Steps of an evaluation of what is to come, about: with fast steps it is shorter."""

PAUSE_SECONDS = 0.01
"""Time between two looks at an evaluation that runs."""

MOST_LOOKS = 10
"""Looks that are caught up with if the last one is long ago."""

PERIOD_WINDOWS = 3
"""Windows of a period."""

MOST_ERROR = math.log(2.0)
"""Error of an evaluation, as a logarithm, beyond which nothing is changed: it does not describe this engine."""

SMOOTHING = 0.3
"""Weight of the newest period in smoothed errors."""

REST_SECONDS = 600.0
"""How long a direction that was undone rests the first time."""

LONGEST_REST_SECONDS = 24 * 3600.0

MOST_NOTES = 200
"""Lines of the audit log that are kept."""


class Mode(StrEnum):
    """``advise`` evaluates changes and reports the better ones, but makes none."""

    OFF = "off"
    ADVISE = "advise"
    ON = "on"


class Note(NamedTuple):
    """One line of the audit log."""

    at: float
    what: str


class Tuner:
    """Decides on changes of ``settings`` within ``ranges``; ``knobs`` returns the engine's present ones.

    ``start`` are the values of the settings at the beginning. ``read_curve`` reads the step times that the engine has
    measured, and ``evaluate`` runs evaluations. `history` must see all events unless the mode is off.
    """

    def __init__(
        self,
        settings: Mapping[str, Setting],
        ranges: Mapping[str, Range],
        start: Mapping[str, Value],
        knobs: Callable[[], Knobs],
        mode: Mode,
        window_seconds: float,
        read_curve: ReadCurve,
        evaluate: Evaluate,
    ) -> None:
        self.mode = mode
        self.notes: list[Note] = []
        self.history = History()
        self._ranges = dict(ranges)
        self._start = {name: start[name] for name in ranges}
        slots = int(settings["max_running"].high)
        self._search = Search(settings, self._ranges, self._start, knobs, slots, evaluate)
        self._read_curve = read_curve
        self._window_seconds = window_seconds
        self._pending: deque[Change] = deque()
        self._probation: Probation | None = None
        self._errors: dict[str, float] = {}  # of the last period
        self._kept = 0.0  # smoothed gain over the start, as measured
        self._start_error: float | None = None  # smoothed error with the settings at the start
        self._thinking: Generator[None, None, None] | None = None
        self._advised: tuple[str, Value] | None = None  # what has been reported last
        self._in_period = False
        self._forecaster = Forecaster(PERIOD_WINDOWS * window_seconds)
        self._look_at = self._go_on_at = -math.inf
        self._rest: dict[Way, float] = {}  # seconds of the next rest
        self._resting: dict[Way, float] = {}  # until when

    # -- time --------------------------------------------------------------------------------------

    def tick(self, now: float, *, frozen: bool) -> Change | None:
        """Advance to ``now``; the change that is due, if any. ``frozen``: an experiment runs."""
        if not self._pending and self.mode is not Mode.OFF:
            if frozen:
                self._forget(now)
            else:
                self._advance(now)
        return self._pending.popleft() if self._pending else None

    def due(self) -> float:
        """When `tick` has something to do next; infinite while the tuner is off."""
        if self._pending:
            return -math.inf
        if self.mode is Mode.OFF:
            return math.inf
        return self._look_at if self._thinking is None else self._go_on_at

    def set_mode(self, mode: Mode, now: float) -> None:
        """Change the mode; a change that is not confirmed is undone."""
        if self._probation is not None:
            self._undo(self._probation, "the mode was changed", now)
        if self.mode is Mode.OFF:
            self.history = History()  # the old one has not seen all events
        self.mode = mode
        self._forget(now)

    def _forget(self, now: float) -> None:
        """Begin anew: what was measured or made last is not compared with anything."""
        self._probation = self._thinking = None
        self._in_period, self._look_at = False, now

    def _advance(self, now: float) -> None:
        if self._thinking is None and now >= self._look_at:
            watched = self.history.close(now) if self._in_period else None
            self.history.open(now)
            self._in_period, self._look_at = True, now + PERIOD_WINDOWS * self._window_seconds
            if watched:
                self._thinking, self._go_on_at = self._think(watched, now), now
        if self._thinking is not None and now >= self._go_on_at:
            looks = int((now - self._go_on_at) / PAUSE_SECONDS) + 1
            self._go_on_at = now + PAUSE_SECONDS
            self._go_on(min(looks, MOST_LOOKS), now)

    def _go_on(self, looks: int, now: float) -> None:
        """Look so many times whether the present evaluation has ended, and begin the next one."""
        for _ in range(looks):
            if self._thinking is None:
                return
            try:
                ended = next(self._thinking, False) is False
            except NotEvaluated as error:  # a change on probation stays so
                self._log(now, f"no change: {error}")
                ended = True
            if ended:
                self._thinking = None
                if now >= self._look_at:  # a longer period would take longer to evaluate, and so on
                    self._in_period, self._look_at = False, now

    # -- decisions ---------------------------------------------------------------------------------

    def _think(self, watched: Watched, now: float) -> Generator[None, None, None]:
        """Decide at the end of a period; yields while evaluations run."""
        curve = yield from self._read_curve()
        if curve is None:
            return
        period, present = watched.period, self._search.present
        self._forecaster.add(period)
        own = start = yield from self._search.evaluate(period, curve)
        errors = errors_of(watched.measured, own)
        if METRIC not in errors:
            return
        self._errors = errors
        if present != self._start:
            start = yield from self._search.evaluate(period, curve, self._start)
        probation = self._probation
        if probation is not None:
            before = yield from self._search.evaluate(period, curve, {probation.setting: probation.before})
            self._probation = None
            if not self._confirm(probation, watched.measured, errors, Evaluated(own, before, start), now):
                return
        if abs(errors[METRIC]) > MOST_ERROR:
            self._log(now, f"no change: {METRIC} is {math.exp(errors[METRIC]):.2f} times as rehearsed")
            if errors[METRIC] > 0.0:
                self._return(now, "rehearsals are far off")
        elif self._is_harmful(own, start, errors[METRIC], present):
            self._return(now, "measured worse than the values at the start")
        elif self._forecaster.ready:
            periods = max(1, min(PERIODS, MOST_MODELLED // max(1, own.period_steps)))
            forecast = self._forecaster.forecast(watched.left, periods)
            decision = yield from self._search.decide(
                forecast, curve, lambda way: self._resting.get(way, -math.inf) > now
            )
            if decision.candidate is not None:
                self._make(decision.candidate, watched.measured, now)
            elif decision.back:
                self._return(now, f"rehearsed {math.expm1(decision.back):+.1%} faster at the start's values")

    def _confirm(
        self,
        probation: Probation,
        measured: Mapping[str, float],
        errors: Mapping[str, float],
        rehearsed: Evaluated,
        now: float,
    ) -> bool:
        """Whether a change is kept after its first period; otherwise it is undone."""
        judgement = judge(probation, measured, errors, rehearsed)
        if judgement.good:
            self._log(now, f"{probation}: kept, {judgement}")
            self._rest.pop(probation.direction, None)
            return True
        self._undo(probation, str(judgement), now)
        rest = self._rest.get(probation.direction, REST_SECONDS)
        self._resting[probation.direction] = now + rest
        self._rest[probation.direction] = min(LONGEST_REST_SECONDS, 2 * rest)
        return False

    def _is_harmful(self, own: Outcome, start: Outcome, error: float, present: Mapping[str, Value]) -> bool:
        """Whether the settings are measured worse than those at the start, over several periods."""
        if present == self._start:
            known, self._kept = self._start_error, 0.0
            self._start_error = error if known is None else known + SMOOTHING * (error - known)
            return False
        if self._start_error is None:
            return False
        gain = math.log(start.seconds_per_token / own.seconds_per_token) - (error - self._start_error)
        self._kept += SMOOTHING * (gain - self._kept)
        return self._kept < -LEAST_GAIN

    # -- deeds -------------------------------------------------------------------------------------

    def _make(self, candidate: Candidate, measured: Mapping[str, float], now: float) -> None:
        """Make a change; on probation, unless it brings the setting back towards its value at the start."""
        setting, value, gain, back = candidate
        probation = Probation(setting, self._search.present[setting], value, self._errors, measured)
        reason = f"{probation}: rehearsed {math.expm1(gain):+.1%} faster"
        if self.mode is Mode.ADVISE:
            if (setting, value) != self._advised:
                self._advised = (setting, value)
                self._log(now, f"{reason}; not made")
            return
        self._probation = None if back else probation
        self._change(setting, value, reason, now)

    def _undo(self, probation: Probation, why: str, now: float) -> None:
        self._change(probation.setting, probation.before, f"{probation}: undone, {why}", now)

    def _return(self, now: float, why: str) -> None:
        """All settings back to their values at the start."""
        for name, value in self._search.present.items():
            if value != self._start[name] and self.mode is Mode.ON:
                self._change(
                    name, self._start[name], f"{name} {value:g} -> {self._start[name]:g}: {why}", now
                )

    def _change(self, setting: str, value: Value, why: str, now: float) -> None:
        """Ask for a change; the next period begins with it."""
        self._log(now, why)
        self._pending.append(Change(setting, value, f"tuner: {why}"))
        self._in_period, self._look_at = False, now

    def _log(self, now: float, what: str) -> None:
        self.notes = [*self.notes[-(MOST_NOTES - 1) :], Note(now, what)]

    # -- reports -----------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """Mode, settings with their bounds, the change on probation and the audit log, as JSON."""
        present, probation = self._search.present, self._probation
        error = self._errors.get(METRIC)
        return {
            "object": "tuner",
            "mode": self.mode.value,
            "metric": METRIC,
            "guards": dict(GUARDS),
            "settings": {
                name: {"value": present[name], "low": each.low, "high": each.high, "factor": each.factor}
                for name, each in self._ranges.items()
            },
            "measured_to_rehearsed": None if error is None else math.exp(error),
            "probation": None if probation is None else str(probation),
            "log": [{"at": note.at, "what": note.what} for note in self.notes],
        }
