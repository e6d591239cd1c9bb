"""The tuner: one small change of one setting at a time, rehearsed before it is made and measured afterwards.

Traffic is cut into scenes of a few windows. At the end of a scene its requests are rehearsed with the present settings.
The logarithm of measured over rehearsed time per token is the error of the rehearsal; it has little of the load's
noise, because both sides have the same requests. Then, in this order:

    a change on probation   gain = what the rehearsal says the change brings - what the error has risen since.
                            Below zero, or beyond a guard: it is undone, and its direction rests.
    otherwise               rehearse each setting one and two steps up and down, and the settings at the start, at this
                            and at a higher load. The best one that gains enough in this scene, and anything in the
                            one before, is made, and is on probation next.

The settings at the start are returned to at once, without a probation, where they would be better, and while requests
mostly wait: this is the way back when the load rises. A direction that was undone rests for a time that doubles with
each failure. An experiment of a person freezes the tuner until it has ended.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Generator, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from headrace.core.knobs import Knobs
from headrace.core.prediction.step_times import StepTimes
from headrace.observe.experiments.conductor import Change
from headrace.observe.steering.settings import Setting, Value, changed
from headrace.observe.tuner.history import History, Watched
from headrace.observe.tuner.rehearsal import Outcome, Rehearsal, Scene
from headrace.observe.tuner.steps import Range
from headrace.observe.tuner.verdict import (
    GUARDS,
    METRIC,
    Probation,
    Rehearsed,
    errors_of,
    gain_of,
    is_within,
    judge,
    waiting_share,
)

LOADS = (1.0, 1.3)
"""Changes are chosen for the sum over these multiples of the present load: what is best just below saturation can be
far worse just above it, and the next scene may have more load. Where it has even more, settings return to the start."""

LOAD_SCENES = 5
"""Scenes whose highest load the next one is compared with, so that bursts are not taken for another load."""

SCENE_WINDOWS = 3
"""Windows of a scene."""

LEAST_GAIN = 0.03
"""Rehearsed gain from which on a change is made; smaller ones are not worth a change."""

MOST_ERROR = math.log(2.0)
"""Error of a rehearsal, as a logarithm, beyond which nothing is changed: it does not describe this engine."""

MOST_WAITING = 0.6
"""Share of their time that requests wait, beyond which settings return to the start and nothing is tried: a queue that
grows for minutes hardly shows in the rehearsal of one."""

MOST_STEPS = 2
"""Steps of a setting that one change may take: where a step alone brings nothing, two may."""

NO_EFFECT = 1e-3
"""Rehearsed gain up to which a setting does not bind; more of the same is not rehearsed."""

SMOOTHING = 0.3
"""Weight of the newest scene in smoothed errors."""

REST_SECONDS = 600.0
"""How long a direction that was undone rests the first time."""

LONGEST_REST_SECONDS = 24 * 3600.0

MOST_NOTES = 200
"""Lines of the audit log that are kept."""


class Mode(StrEnum):
    """``advise`` rehearses changes and reports the better ones, but makes none."""

    OFF = "off"
    ADVISE = "advise"
    ON = "on"


class Note(NamedTuple):
    """One line of the audit log."""

    at: float
    what: str


class Choice(NamedTuple):
    """A change that a rehearsal prefers; ``gain`` is a difference of logarithms."""

    setting: str
    value: Value
    gain: float


class Tuner:
    """Decides on changes of ``settings`` within ``ranges``; ``knobs`` returns the engine's present ones.

    ``times`` are the step times that the engine learns (None: it learns none, and nothing is changed). ``start`` are
    the values of the settings at the beginning. `history` must see all events unless the mode is off.
    """

    def __init__(
        self,
        settings: Mapping[str, Setting],
        ranges: Mapping[str, Range],
        start: Mapping[str, Value],
        knobs: Callable[[], Knobs],
        times: StepTimes | None,
        mode: Mode,
        window_seconds: float = 30.0,
    ) -> None:
        self.mode = mode
        self.notes: list[Note] = []
        self.history = History()
        self._settings, self._ranges = settings, dict(ranges)
        self._start = {name: start[name] for name in ranges}
        self._knobs, self._times = knobs, times
        self._slots = int(settings["max_running"].high)
        self._window_seconds = window_seconds
        self._pending: deque[Change] = deque()
        self._probation: Probation | None = None
        self._errors: dict[str, float] = {}  # of the last scene
        self._kept: float | None = None  # smoothed gain over the start, as measured
        self._start_error: float | None = None  # smoothed error with the settings at the start
        self._before: Scene | None = None
        self._loads: deque[float] = deque(maxlen=LOAD_SCENES)
        self._thinking: Generator[None, None, None] | None = None
        self._advised: tuple[str, Value] | None = None  # what has been reported last
        self._in_scene = False
        self._look_at = -math.inf
        self._rest: dict[tuple[str, bool], float] = {}  # seconds of the next rest
        self._resting: dict[tuple[str, bool], float] = {}  # until when

    # -- time --------------------------------------------------------------------------------------

    def tick(self, now: float, *, frozen: bool) -> Change | None:
        """Advance to ``now``; the change that is due, if any. ``frozen``: an experiment runs.

        One call rehearses once at most, which takes some milliseconds, so the caller is not held up.
        """
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
        return -math.inf if self._thinking is not None else self._look_at

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
        self._probation = self._thinking = self._before = None
        self._in_scene, self._look_at = False, now

    def _advance(self, now: float) -> None:
        if self._thinking is None and now >= self._look_at:
            watched = self.history.close(now) if self._in_scene else None
            self.history.open(now)
            self._in_scene, self._look_at = True, now + SCENE_WINDOWS * self._window_seconds
            times = self._times
            if watched is not None and times is not None and times.ready and times.curve.known:
                self._thinking = self._think(watched, times, now)
        if self._thinking is not None:
            try:
                next(self._thinking)
            except StopIteration:
                self._thinking = None

    # -- decisions ---------------------------------------------------------------------------------

    def _think(self, watched: Watched, times: StepTimes, now: float) -> Generator[None, None, None]:
        """Decide at the end of a scene; yields between rehearsals."""
        scene, present = watched.scene, self._present()
        own = start = self._rehearse(scene, times)
        yield
        errors = errors_of(watched.measured, own)
        if METRIC not in errors:
            return
        waiting = waiting_share(watched.measured)
        surge = scene.load > LOADS[-1] * max(self._loads, default=math.inf)
        self._loads.append(scene.load)
        self._errors = errors
        if waiting > MOST_WAITING:
            self._probation = self._before = None
            why = f"requests wait for {waiting:.0%} of their time"
            if present == self._start:
                self._log(now, f"no change: {why}")
            self._return(now, why)
            return
        if present != self._start:
            if surge:
                self._probation = None
                self._return(now, "the load is higher than what the values were chosen for")
                return
            start = self._rehearse(scene, times, self._start)
            yield
        probation, self._probation = self._probation, None
        if probation is not None:
            before = self._rehearse(scene, times, {probation.setting: probation.before})
            yield
            if not self._confirm(probation, watched.measured, errors, Rehearsed(own, before, start), now):
                return
        if abs(errors[METRIC]) > MOST_ERROR:
            self._log(now, f"no change: {METRIC} is {math.exp(errors[METRIC]):.2f} times as rehearsed")
            if errors[METRIC] > 0.0:
                self._return(now, "rehearsals are far off")
        elif self._is_harmful(own, start, errors[METRIC], present):
            self._return(now, "measured worse than the values at the start")
        else:
            own = yield from self._foresee(scene, times, {})
            start = yield from self._foresee(scene, times, self._start)
            choice = yield from self._best(scene, times, own, start, now)
            back = gain_of(own, start)
            if back > 0.0 and (choice is None or back >= choice.gain):
                self._return(now, f"rehearsed {math.expm1(back):+.1%} faster at the start's values")
            elif choice is not None:
                self._make(choice, watched.measured, now)
            self._before = scene

    def _confirm(
        self,
        probation: Probation,
        measured: Mapping[str, float],
        errors: Mapping[str, float],
        rehearsed: Rehearsed,
        now: float,
    ) -> bool:
        """Whether a change is kept after its first scene; otherwise it is undone."""
        verdict = judge(probation, measured, errors, rehearsed)
        if verdict.good:
            self._log(now, f"{probation}: kept, {verdict}")
            self._rest.pop(probation.direction, None)
            return True
        self._undo(probation, str(verdict), now)
        rest = self._rest.get(probation.direction, REST_SECONDS)
        self._resting[probation.direction] = now + rest
        self._rest[probation.direction] = min(LONGEST_REST_SECONDS, 2 * rest)
        return False

    def _is_harmful(self, own: Outcome, start: Outcome, error: float, present: Mapping[str, Value]) -> bool:
        """Whether the settings are measured worse than those at the start, over several scenes."""
        if present == self._start:
            known, self._kept = self._start_error, None
            self._start_error = error if known is None else known + SMOOTHING * (error - known)
            return False
        if self._start_error is None:
            return False
        gain = math.log(start.seconds_per_token / own.seconds_per_token) - (error - self._start_error)
        self._kept = gain if self._kept is None else self._kept + SMOOTHING * (gain - self._kept)
        return self._kept < -LEAST_GAIN

    def _best(
        self, scene: Scene, times: StepTimes, own: Outcome, start: Outcome, now: float
    ) -> Generator[None, None, Choice | None]:
        """The change of a setting that gains most, of those that gain enough here and anything in the scene before."""
        found, present = [], self._present()
        for name, up in itertools.product(self._ranges, (True, False)):
            value = present[name]
            for _ in range(MOST_STEPS if self._resting.get((name, up), -math.inf) <= now else 0):
                following = self._ranges[name].step(value, up)
                if following is None:
                    break
                value = following
                outcome = yield from self._foresee(scene, times, {name: value})
                gain = gain_of(own, outcome)
                if is_within(outcome, own, start) and gain > LEAST_GAIN:
                    found.append(Choice(name, value, gain))
                if gain < -LEAST_GAIN or abs(gain) < NO_EFFECT:
                    break
        for choice in sorted(found, key=lambda each: -each.gain):
            if (yield from self._held_before(choice, times)):
                return choice
        return None

    def _held_before(self, choice: Choice, times: StepTimes) -> Generator[None, None, bool]:
        """Whether a change would also have gained in the scene before."""
        if self._before is None:
            return False
        own = yield from self._foresee(self._before, times, {})
        outcome = yield from self._foresee(self._before, times, {choice.setting: choice.value})
        return gain_of(own, outcome) > 0.0

    def _foresee(
        self, scene: Scene, times: StepTimes, values: Mapping[str, Value]
    ) -> Generator[None, None, Outcome]:
        """The outcome of a scene; all jobs are open as long as at all of `LOADS` together."""
        outcomes = []
        for load in LOADS:
            outcomes.append(self._rehearse(scene.denser(load), times, values))
            yield
        return outcomes[0]._replace(open_seconds=sum(each.open_seconds for each in outcomes))

    def _rehearse(self, scene: Scene, times: StepTimes, values: Mapping[str, Value] | None = None) -> Outcome:
        knobs = self._knobs()
        for name, value in (values or {}).items():
            knobs = changed(self._settings, knobs, name, value)
        static = "static_batch_timeout" in self._settings
        return Rehearsal(scene, knobs, times, self._slots, static=static).run()

    # -- deeds -------------------------------------------------------------------------------------

    def _make(self, choice: Choice, measured: Mapping[str, float], now: float) -> None:
        setting, value, gain = choice
        probation = Probation(setting, self._present()[setting], value, self._errors, measured)
        reason = f"{probation}: rehearsed {math.expm1(gain):+.1%} faster"
        if self.mode is Mode.ADVISE:
            if (setting, value) != self._advised:
                self._advised = (setting, value)
                self._log(now, f"{reason}; not made")
            return
        self._probation = probation
        self._change(setting, value, reason, now)

    def _undo(self, probation: Probation, why: str, now: float) -> None:
        self._change(probation.setting, probation.before, f"{probation}: undone, {why}", now)

    def _return(self, now: float, why: str) -> None:
        """All settings back to their values at the start."""
        for name, value in self._present().items():
            if value != self._start[name] and self.mode is Mode.ON:
                self._change(
                    name, self._start[name], f"{name} {value:g} -> {self._start[name]:g}: {why}", now
                )

    def _change(self, setting: str, value: Value, why: str, now: float) -> None:
        """Ask for a change. The next scene begins a window later: what the old value left behind has settled."""
        self._log(now, why)
        self._pending.append(Change(setting, value, f"tuner: {why}"))
        self._before = None
        self._in_scene, self._look_at = False, now + self._window_seconds

    def _log(self, now: float, what: str) -> None:
        self.notes = [*self.notes[-(MOST_NOTES - 1) :], Note(now, what)]

    # -- reports -----------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """Mode, settings with their bounds, the change on probation and the audit log, as JSON."""
        present, probation = self._present(), self._probation
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

    def _present(self) -> dict[str, Value]:
        knobs = self._knobs()
        return {name: getattr(knobs, self._settings[name].field) for name in self._ranges}
