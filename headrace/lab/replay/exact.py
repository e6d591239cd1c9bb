"""Exact replay, call by call: the same requests at the same times, and every event compared with the recorded one.

Runner and drafter return what was recorded.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from headrace.core.drafting.proposal import Drafter, DraftRow, Proposal, StepLoad
from headrace.core.engine import Engine
from headrace.core.events import Admitted, Arrived, Event, Finished, Preempted, Skipped
from headrace.core.plan import Row, StepOutput, StepPlan, TokenLogprob
from headrace.core.ports import Runner
from headrace.core.request import Request
from headrace.lab.forced_acceptance import ForcedAcceptance
from headrace.lab.replay.trace import Answer, Drained, Step, Trace
from headrace.observe.steps.record import Waiting
from headrace.observe.trace_file import (
    SIZE,
    Background,
    Cancelled,
    Drafts,
    Outcome,
    Raised,
    Reset,
    Spent,
    Submitted,
    Turned,
    event_line,
)


@dataclass(slots=True)
class RequestStates:
    """A fold over events; ``waiting`` is in the order in which requests began to wait."""

    waiting: dict[str, Waiting] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)

    def fold(self, event: Event, now: float) -> None:
        match event:
            case Arrived():
                if event.request_id not in self.running:
                    self.waiting.setdefault(event.request_id, Waiting(event.request_id, now, "arrived"))
            case Admitted():
                self.waiting.pop(event.request_id, None)
                self.running.add(event.request_id)
            case Skipped():
                if (kept := self.waiting.get(event.request_id)) is not None:
                    self.waiting[event.request_id] = kept._replace(reason=str(event.reason))
            case Preempted():
                self.running.discard(event.request_id)
                why = f"preempted: {event.reason}"
                self.waiting[event.request_id] = Waiting(event.request_id, now, why)
            case Finished():
                self.waiting.pop(event.request_id, None)
                self.running.discard(event.request_id)


NO_RECORDED_DRAFTS = Drafts({})


class RecordedDrafts:
    """A `core.drafting.proposal.Drafter`; `begin` sets the proposals of the next step."""

    def __init__(self) -> None:
        self._drafts = NO_RECORDED_DRAFTS
        self._calls = 0
        self.seconds: dict[str, float] = {}
        """Empty: a replay spends no time on drafting."""

    @property
    def idle(self) -> bool:
        """Whether nothing was drafted in the recorded step."""
        return not any(self._drafts)

    def begin(self, drafts: Drafts | None) -> None:
        """Sets the recorded drafts of the next step."""
        self._drafts = drafts or NO_RECORDED_DRAFTS
        self._calls = 0

    def draft(self, draft_rows: Sequence[DraftRow], load: StepLoad) -> Sequence[Proposal | None]:
        """See `Drafter.draft`."""
        self._fail(0)
        drafts = self._drafts
        if drafts.seconds and load.times is not None:
            load.times.exclude(drafts.seconds)
        return [drafts.proposals.get(draft_row.request.id) for draft_row in draft_rows]

    def next_draft_step(self, request: Request) -> int:
        """See `Drafter.next_draft_step`: every request is asked, and has no proposal where none was recorded."""
        return 0

    def observed(self, rows: int, drawn: int, seconds: float, drafted: bool) -> None:
        """See `Drafter.observed`: ignored, because the proposals are recorded."""

    def verified(self, request_id: str, proposal: Proposal, accepted: int) -> None:
        """See `Drafter.verified`."""
        self._count()

    def ended(self, request: Request, tokens: list[int]) -> None:
        """See `Drafter.ended`."""
        self._count()

    def _count(self) -> None:
        self._calls += 1
        self._fail(self._calls)

    def _fail(self, call: int) -> None:
        failed = self._drafts.failed
        if failed is not None and failed[0] == call:
            raise type(failed[1], (Exception,), {})(failed[2])


NOTHING = Outcome({}, {}, {})
UNKNOWN = 1 << (8 * SIZE)
"""Ids from here on stand for tokens that were generated but never emitted (stale rows); fingerprints are smaller."""

_SCORE = TokenLogprob(0, 0.0, 1, ())


class PlannedRow(NamedTuple):
    """A row with the id and prompt length of its request."""

    request_id: str
    prompt_tokens: int
    row: Row


class RecordedRunner:
    """`core.ports.Runner` over recorded outputs.

    ``outcome`` is what the next `collect` returns in addition to tokens; the replay sets it before each step. ``rows``
    are the rows of the last `launch`, ``collected`` those of the last `collect`.
    """

    def __init__(self, answers: Mapping[str, Answer]) -> None:
        self.outcome = NOTHING
        self.rows: tuple[PlannedRow, ...] = ()
        self.collected: tuple[PlannedRow, ...] = ()
        self._answers = answers
        self._owners: dict[int, tuple[str, int]] = {}
        self._launched: deque[tuple[StepPlan, tuple[PlannedRow, ...]]] = deque()

    def launch(self, plan: StepPlan, now: float) -> None:
        for entry in plan.entries:
            self._owners[entry.slot] = (entry.request_id, entry.prompt_tokens)
        self.rows = tuple(PlannedRow(*self._owners[row.slot], row) for row in plan.rows)
        self._launched.append((plan, self.rows))

    def collect(self) -> StepOutput:
        plan, rows = self._launched.popleft()
        if self.outcome.broken_off:
            self.collected = ()
            return StepOutput(plan.step, (), arrivals=self.outcome.arrivals, broken_off=True)
        self.collected = rows
        tokens = tuple(
            self._drawn(each, self.outcome.counts.get(i, 1)) if each.row.samples else ()
            for i, each in enumerate(rows)
        )
        scores = {i: (_SCORE,) * count for i, count in self.outcome.scores.items()}
        return StepOutput(
            plan.step,
            tokens,
            prompt_logprobs=scores,
            failures=self.outcome.failures,
            arrivals=self.outcome.arrivals,
        )

    def _drawn(self, planned: PlannedRow, count: int) -> tuple[int, ...]:
        row = planned.row
        position = row.start + row.length - len(row.drafts) - planned.prompt_tokens
        answer = self._answers.get(planned.request_id, Answer()).tokens[position : position + count]
        return (*answer, *(UNKNOWN + position + i for i in range(len(answer), count)))


Compose = Callable[[Mapping[str, Any], Runner, Drafter | ForcedAcceptance], Engine]
"""Makes an engine from a trace's settings, a runner, and a drafter or drafts with a given acceptance rate."""


class Divergence(NamedTuple):
    """The first event in which replay and recording differ; None where one of them has no further event."""

    line: int
    recorded: list[Any] | None
    replayed: list[Any] | None


class Scene(NamedTuple):
    """The engine after one step.

    ``step`` counts calls of `Engine.step` from 0, ``line`` is the line of the file. ``rows`` were launched in this
    step, ``collected`` are the rows whose output it returned. ``drafting`` seconds of ``seconds`` were spent on drafts.
    ``error`` is what the step raised in the replay, ``recorded_error`` what it raised in the recording; empty if none.
    """

    step: int
    line: int
    now: float
    seconds: float
    rows: tuple[PlannedRow, ...]
    collected: tuple[PlannedRow, ...]
    running: int
    waiting: tuple[Waiting, ...]
    blocks_held: int
    blocks_total: int
    events: tuple[Event, ...]
    error: str = ""
    recorded_error: str = ""
    drafting: float = 0.0


class Replay:
    """One run through a trace. ``divergence`` is None as long as all events were equal."""

    def __init__(self, trace: Trace, compose: Compose) -> None:
        self.divergence: Divergence | None = None
        self._trace = trace
        self._runner = RecordedRunner(trace.answers)
        self._drafter = RecordedDrafts()
        self._engine = compose(trace.settings, self._runner, self._drafter)
        self._states = RequestStates()

    def scenes(self) -> Iterator[Scene]:
        """Replay the trace; a scene per step, up to the first divergence or the step that raised."""
        engine, step = self._engine, 0
        drafts = iter([each.drafts for each in self._trace.of(Step)])
        self._drafter.begin(next(drafts, None))  # of the first step, and of what comes before it
        for number, happening in self._trace.lines:
            match happening:
                case Submitted(request, now):
                    engine.submit(request, now)
                case Cancelled(request_id, why, now):
                    engine.cancel(request_id, why, now)
                case Turned(knobs):
                    engine.knobs = knobs
                case Reset(lower):
                    engine.reset_prefix_cache(lower=lower)
                case Spent(seconds):
                    engine.beside(partial(_spent, seconds))
                case Background(change):
                    engine.background(change)
                case Drained(events):
                    self._compare(number, events, engine.take_events())
                case Step():
                    yield self._step(step, number, happening)
                    self._drafter.begin(next(drafts, None))
                    step += 1
                case Raised(now, error):
                    yield self._raised(step, number, now, error)
                    return
            if self.divergence is not None:
                return

    def _step(self, step: int, number: int, recorded: Step) -> Scene:
        self._runner.outcome = recorded.outcome or NOTHING
        self._runner.rows = self._runner.collected = ()
        try:
            events = self._engine.step(recorded.now)
        except Exception as error:  # any error is a divergence: the recorded step raised none
            self.divergence = Divergence(
                number, ["no error", {}], [type(error).__name__, {"message": str(error)}]
            )
            return self._scene(step, number, recorded.now, recorded.seconds, ())._replace(
                error=_error_text(error)
            )
        self._compare(number, recorded.events, events)
        drafting = recorded.drafts.seconds if recorded.drafts else 0.0
        scene = self._scene(step, number, recorded.now, recorded.seconds, tuple(events))
        return scene._replace(drafting=drafting)

    def _raised(self, step: int, number: int, now: float, recorded: str) -> Scene:
        self._runner.outcome = NOTHING
        self._runner.rows = self._runner.collected = ()
        error = ""
        try:
            events = tuple(self._engine.step(now))
        except Exception as caught:
            error, events = _error_text(caught), tuple(self._engine.take_events())
        return self._scene(step, number, now, 0.0, events)._replace(error=error, recorded_error=recorded)

    def _scene(self, step: int, line: int, now: float, seconds: float, events: tuple[Event, ...]) -> Scene:
        for event in events:
            self._states.fold(event, now)
        pool = self._engine.scheduler.pool
        return Scene(
            step,
            line,
            now,
            seconds,
            self._runner.rows,
            self._runner.collected,
            len(self._states.running),
            tuple(self._states.waiting.values()),
            pool.num_blocks - pool.num_free,
            pool.num_blocks,
            events,
        )

    def _compare(self, number: int, recorded: list[list[Any]], events: list[Event]) -> None:
        replayed = json.loads(json.dumps([event_line(event, _keep_tokens) for event in events]))
        if recorded == replayed:
            return
        for i in range(max(len(recorded), len(replayed))):
            old = recorded[i] if i < len(recorded) else None
            new = replayed[i] if i < len(replayed) else None
            if old != new:
                self.divergence = Divergence(number, old, new)
                return


def _keep_tokens(request_id: str, tokens: tuple[int, ...]) -> tuple[int, ...]:
    return tokens


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _spent(seconds: float, room: float) -> float:
    """Other work that takes the recorded seconds, however much room it gets."""
    return seconds
