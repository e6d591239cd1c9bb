"""Exact replay, call by call: the same requests at the same times, and every event compared with the recorded one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from headrace.core.drafting.proposal import Drafter
from headrace.core.engine import Engine
from headrace.core.events import Event
from headrace.core.ports import Runner
from headrace.lab.forced_acceptance import ForcedAcceptance
from headrace.lab.replay.drafter import RecordedDrafts
from headrace.lab.replay.request_states import RequestStates
from headrace.lab.replay.runner import NOTHING, PlannedRow, RecordedRunner
from headrace.lab.replay.trace import Drained, Step, Trace
from headrace.observe.recording.moments import Cancelled, Raised, Reset, Submitted, Turned
from headrace.observe.recording.trace_file import event_line
from headrace.observe.steps.record import Waiting

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
