"""Simulation of the recorded requests with other settings.

Requests arrive at the recorded times and get the recorded outputs; the scheduling may differ. Time is virtual: a
`core.prediction.step_times.StepTimes` learned from the recorded steps predicts each step's time. Since that model is
not exact, the run with changed settings is compared with a run of the unchanged settings under the same model, and the
model's error against the recording is reported beside them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import NamedTuple

from headrace.core.engine import Engine
from headrace.core.events import AdmitReason, Admitted, Emitted, Event, Finished, Preempted, Stepped, Verified
from headrace.core.plan import Arrival, Move, StepOutput, StepPlan, Tier
from headrace.core.prediction.step_times import StepTimes
from headrace.core.request import FinishReason, Request
from headrace.lab.forced_acceptance import ForcedAcceptance, measured_rates
from headrace.lab.replay.exact import Compose, Divergence, PlannedRow, RecordedRunner, Replay, Scene
from headrace.lab.replay.trace import Answer, Step, Trace
from headrace.observe.trace_file import Cancelled, Outcome, Reset, Submitted


@dataclass(slots=True)
class Tally:
    """A fold over one run; times are in seconds from a request's arrival.

    ``waits`` end at the first admission, ``ttft`` at the first token, ``e2e`` at the end of a completed output.
    """

    waits: list[float] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    e2e: list[float] = field(default_factory=list)
    preemptions: int = 0
    lost_tokens: int = 0
    cached_tokens: int = 0
    steps: int = 0
    busy_seconds: float = 0.0
    _since: dict[str, float] = field(default_factory=dict)
    _without_token: set[str] = field(default_factory=set)

    def expect(self, request: Request) -> None:
        """Registers a request. The server's warm-up request, whose arrival is minus infinity, does not count."""
        if request.arrived != -math.inf:
            self._since[request.id] = request.arrived
            self._without_token.add(request.id)

    def fold(self, event: Event, now: float) -> None:
        match event:
            case Admitted(request_id, reason, cached) if request_id in self._since:
                self.cached_tokens += cached
                if reason is AdmitReason.NEW:
                    self.waits.append((now if event.at is None else event.at) - self._since[request_id])
            case Emitted(request_id) if request_id in self._without_token:
                self._without_token.discard(request_id)
                self.ttft.append(now - self._since[request_id])
            case Preempted():
                self.preemptions += 1
                self.lost_tokens += event.lost_tokens
            case Finished(request_id, reason) if request_id in self._since:
                since = self._since.pop(request_id)
                self._without_token.discard(request_id)
                if reason in (FinishReason.STOP, FinishReason.LENGTH):
                    self.e2e.append(now - since)
            case Stepped():
                self.steps += 1


class TimedRunner(RecordedRunner):
    """Steps take the time that ``times`` predicts; copies to and from the disk take ``disk_seconds`` each, in sequence.

    ``time`` is the end of the last collected step. A request that failed fails again after the same number of tokens.
    Drafts are verified against the recorded output. The drafting time of ``drafts`` is added to the step.
    """

    def __init__(
        self,
        answers: Mapping[str, Answer],
        times: StepTimes,
        disk_seconds: float,
        drafts: ForcedAcceptance | None = None,
    ) -> None:
        super().__init__(answers)
        self._drafts = drafts
        self._drafting = 0.0  # drafting seconds that steps already include
        self.time = -math.inf
        self.busy_seconds = 0.0
        self._times = times
        self._disk_seconds = disk_seconds
        self._device_free_at = self._disk_free_at = -math.inf
        self._steps: deque[tuple[float, bool, tuple[PlannedRow, ...]]] = deque()  # end, waits, rows
        self._copies: deque[tuple[float, Move]] = deque()

    def launch(self, plan: StepPlan, now: float) -> None:
        super().launch(plan, now)
        seconds = self._times.predict(*sizes(self.rows)) if plan.rows else 0.0
        if self._drafts is not None:
            seconds += self._drafts.seconds - self._drafting
            self._drafting = self._drafts.seconds
        self.busy_seconds += seconds
        self._device_free_at = max(self._device_free_at, now) + seconds
        self._steps.append((self._device_free_at, plan.waits, self.rows))
        for move in plan.moves:
            if Tier.DISK in (move.source_tier, move.target_tier):
                self._disk_free_at = max(self._disk_free_at, now) + self._disk_seconds
                self._copies.append((self._disk_free_at, move))

    def collect(self) -> StepOutput:
        end, waits, rows = self._steps.popleft()
        if waits and self._copies:
            end = max(end, self._copies[0][0])
        self.time = end
        arrivals = []
        while self._copies and self._copies[0][0] <= end:
            arrivals.append(Arrival(self._copies.popleft()[1], True, self._disk_seconds))
        self.outcome = Outcome({}, {}, self._failing(rows), tuple(arrivals))
        return super().collect()

    def _drawn(self, planned: PlannedRow, count: int) -> tuple[int, ...]:
        drafts, answer = planned.row.drafts, super()._drawn(planned, 1 + len(planned.row.drafts))
        for right, (draft, token) in enumerate(zip(drafts, answer, strict=False)):
            if draft != token:
                return answer[: right + 1]
        return answer

    def _failing(self, rows: tuple[PlannedRow, ...]) -> dict[int, str]:
        failing = {}
        for i, each in enumerate(rows):
            answer = self._answers.get(each.request_id)
            if answer is not None and answer.reason is FinishReason.FAILED and each.row.samples:
                drawn = each.row.start + each.row.length - len(each.row.drafts) - each.prompt_tokens
                if drawn >= len(answer.tokens):
                    failing[i] = answer.message
        return failing


def sizes(rows: tuple[PlannedRow, ...]) -> tuple[int, int, int]:
    """Number of rows, number of tokens, and the sum over the tokens of the positions that each attends to."""
    planned = [each.row for each in rows]
    tokens = sum(row.length for row in planned)
    contexts = sum(row.length * row.start + row.length * (row.length + 1) // 2 for row in planned)
    return len(planned), tokens, contexts


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
