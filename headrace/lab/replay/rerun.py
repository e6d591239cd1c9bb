"""Simulation of the recorded requests with other settings.

Requests arrive at the recorded times and get the recorded outputs; the scheduling may differ. Time is virtual: a
`core.prediction.step_times.StepTimes` learned from the recorded steps predicts each step's time. Since that model is
not exact, the run with changed settings is compared with a run of the unchanged settings under the same model, and the
model's error against the recording is reported beside them.
"""

from __future__ import annotations

import math
from collections import deque
from operator import attrgetter, itemgetter
from typing import NamedTuple

from headrace.core.engine import Engine
from headrace.core.events import Emitted, Verified
from headrace.core.prediction.step_times import StepTimes
from headrace.core.request import FinishReason
from headrace.lab.forced_acceptance import ForcedAcceptance, measured_rates
from headrace.lab.replay.exact import Compose, Divergence, Replay, Scene
from headrace.lab.replay.tally import Tally
from headrace.lab.replay.timed import TimedRunner, sizes
from headrace.lab.replay.trace import Step, Trace
from headrace.observe.recording.moments import Cancelled, Reset, Submitted

MOST_DRAFTED = 16
"""Default maximum length of a proposal in tokens."""

FIRST_SHARE = 0.2
"""First estimate of the time to draft a token, as a share of a step; the engine then learns the actual time."""

IDLE_SECONDS = 1e-3
"""Time to advance when a step did nothing and the engine is due again at once."""


class Drafting(NamedTuple):
    """Drafts of a recording: acceptance rate by position (empty: no draft was verified), and the mean seconds of a
    drafting pass, which drafts one token for each row.
    """

    rates: tuple[float, ...] = ()
    pass_seconds: float = 0.0


NO_DRAFTS = Drafting()


class Recorded(NamedTuple):
    """The recording: its figures, the step times and drafts learned from it, and where its replay diverged."""

    tally: Tally
    times: StepTimes
    divergence: Divergence | None
    drafting: Drafting = NO_DRAFTS


def recorded(trace: Trace, compose: Compose) -> Recorded:
    """Replays the trace exactly, and learns the times of its steps."""
    replay = Replay(trace, compose)
    tally, times = Tally(), StepTimes()
    for happening in trace.of(Submitted):
        tally.expect(happening.request)
    before: Scene | None = None
    for scene in replay.scenes():
        if before is not None:
            _learn(before, scene.now, tally, times)
        for event in scene.events:
            tally.fold(event, scene.now + scene.seconds)
        before = scene
    return Recorded(tally, times, replay.divergence, _drafting(trace))


def recorded_rates(trace: Trace) -> tuple[float, ...]:
    """Acceptance rate by position of the drafts verified in a recording; empty if there were none."""
    events = [event for step in trace.of(Step) for event in step.events]
    return measured_rates(
        [(fields["drafted"], fields["accepted"]) for name, fields in events if name == Verified.__name__]
    )


def _drafting(trace: Trace) -> Drafting:
    drafts = [each.drafts for each in trace.of(Step) if each.drafts is not None]
    passes = sum(max((len(each.tokens) for each in step.proposals.values()), default=0) for step in drafts)
    seconds = sum(step.seconds for step in drafts)
    return Drafting(recorded_rates(trace), seconds / passes if passes else 0.0)


def _learn(scene: Scene, following: float, tally: Tally, times: StepTimes) -> None:
    """If requests still run, the step's time ends when the ``following`` one begins, to include event handling."""
    if scene.collected:
        seconds = (following - scene.now if scene.running else scene.seconds) - scene.drafting
        drafted = any(each.row.drafts for each in scene.collected)
        times.observe(*sizes(scene.collected), seconds, drafted)
        tally.busy_seconds += seconds


def rerun(trace: Trace, compose: Compose, times: StepTimes, drafting: Drafting = NO_DRAFTS) -> Tally:
    """Runs the trace's requests in virtual time. Drafts have the recorded acceptance rate (0 if none was recorded).

    Cancellations come at their recorded times, except those for a stop string, which come after the same output token.
    Recorded changes of knobs are ignored: they may concern the settings under test.
    """
    answers = {name: answer.tokens for name, answer in trace.answers.items()}
    forced = ForcedAcceptance(answers, drafting.rates or (0.0,), MOST_DRAFTED, key=attrgetter("id"))
    if drafting.pass_seconds:
        forced.cost = lambda asks: drafting.pass_seconds
        forced.share = FIRST_SHARE
    runner = TimedRunner(trace.answers, times, _disk_seconds(trace), forced)
    return _Run(trace, compose(trace.settings, runner, forced), runner).run()


class _Run:
    """One run in virtual time."""

    def __init__(self, trace: Trace, engine: Engine, runner: TimedRunner) -> None:
        self._engine = engine
        self._runner = runner
        self._tally = Tally()
        self._calls = deque(_timed_calls(trace))
        stopped = {each.request_id for each in trace.of(Cancelled) if each.why is FinishReason.STOP}
        initial_tokens = {each.request.id: len(each.request.answered) for each in trace.of(Submitted)}
        self._remaining_tokens = {
            request_id: len(answer.tokens) - initial_tokens[request_id]
            for request_id, answer in trace.answers.items()
            if request_id in stopped or answer.reason is None
        }
        self._now = self._calls[0][0] if self._calls else 0.0

    def run(self) -> Tally:
        while True:
            self._apply_due_calls()
            due = self._engine.wake_at(self._now)
            if due is None or due > self._now:
                coming = self._calls[0][0] if self._calls else math.inf
                following = min(coming, math.inf if due is None else due)
                if following == math.inf:
                    return self._tally
                self._now = following
                continue
            self._step()

    def _apply_due_calls(self) -> None:
        while self._calls and self._calls[0][0] <= self._now:
            match self._calls.popleft()[1]:
                case Submitted(request):
                    self._tally.expect(request)
                    self._engine.submit(request, self._now)
                case Cancelled(request_id, why):
                    self._engine.cancel(request_id, why, self._now)
                case Reset(lower):
                    self._engine.reset_prefix_cache(lower=lower)

    def _step(self) -> None:
        runner = self._runner
        runner.rows = ()
        before = runner.busy_seconds
        events = self._engine.step(self._now)
        end = max(self._now, runner.time)
        if end == self._now and not events and not runner.rows:
            end += IDLE_SECONDS
        self._now = end
        self._tally.busy_seconds += runner.busy_seconds - before
        for event in events:
            self._tally.fold(event, self._now)
            if isinstance(event, Emitted) and event.request_id in self._remaining_tokens:
                self._remaining_tokens[event.request_id] -= len(event.tokens)
                if self._remaining_tokens[event.request_id] <= 0:
                    self._engine.cancel(event.request_id, FinishReason.STOP, self._now)


def _timed_calls(trace: Trace) -> list[tuple[float, Submitted | Cancelled | Reset]]:
    """Calls to the engine in order of time. A request is submitted at its arrival, even if the recorded engine read it
    later; a reset has the time of the line before it."""
    now = 0.0
    calls: list[tuple[float, Submitted | Cancelled | Reset]] = []
    for _, happening in trace.lines:
        now = getattr(happening, "now", now)
        match happening:
            case Submitted(request):
                calls.append(
                    (min(now, request.arrived) if math.isfinite(request.arrived) else now, happening)
                )
            case Cancelled(_, why) if why is not FinishReason.STOP:
                calls.append((now, happening))
            case Reset():
                calls.append((now, happening))
    return sorted(calls, key=itemgetter(0))


def _disk_seconds(trace: Trace) -> float:
    """Mean seconds of a copy to or from the disk; 0 if there was none."""
    took = [
        arrival.seconds
        for step in trace.of(Step)
        if step.outcome is not None
        for arrival in step.outcome.arrivals
    ]
    return sum(took) / len(took) if took else 0.0
