"""One simulated engine with its own clock, mailbox and HTTP front end; or as a target of the benchmark."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Protocol

from headrace.core.engine import Engine
from headrace.core.events import Emitted, Event
from headrace.core.ports import Watcher
from headrace.core.request import Request
from headrace.core.scheduler.routing import ReplicaLoad
from headrace.core.tenancy.gate import Load
from headrace.lab.bench.engine import EngineTarget
from headrace.lab.simulate.runner import EOS, Front, SimulatedRunner
from headrace.lab.simulate.tally import Backlog, Tally
from headrace.lab.workload.work import Prompt


class Steering(Protocol):
    """Receives the events of each step, and may change the engine's knobs before the next one.

    ``assigned`` returns the request with the settings of its arm in an experiment.
    """

    def assigned(self, request: Request) -> Request: ...

    def saw(self, events: list[Event], now: float) -> None: ...

    def steer(self, engine: Engine, now: float) -> None: ...


class SimulatedReplica:
    """An engine that advances from one event to the next; ``due`` is the time of the next event, ``began`` the start of
    the last step.

    As in the server, requests that arrive during a step wait in the mailbox until it ends, and its events are handled
    then.
    """

    def __init__(
        self,
        engine: Engine,
        runner: SimulatedRunner,
        tally: Tally,
        answers: dict[str, tuple[int, ...]],
        front: Front,
        steering: Steering | None = None,
    ) -> None:
        self.due = math.inf
        self.backlog = Backlog()
        self.engine = engine
        self.runner = runner
        self._tally = tally
        self._answers = answers
        self._front = front
        self._steering = steering
        self._mail: deque[tuple[float, Request]] = deque()
        self._events: list[Event] = []
        self.began = 0.0
        self._stepping = False
        self._waking = False  # the engine was idle, and has emitted no token since
        self._watchers: list[Watcher] = []

    def watch(self, watcher: Watcher) -> None:
        """Sends all events from now on to ``watcher``."""
        self._watchers.append(watcher)

    def load(self) -> Load:
        """The load, for admission control."""
        return Load(self.backlog.queued_requests, self.backlog.queued_tokens, 0.0, False)

    def standing(self) -> ReplicaLoad:
        """The open work, for the router."""
        return ReplicaLoad(self.backlog.open_requests, self.backlog.open_tokens)

    def submit(self, request: Request, now: float) -> None:
        """Accepts a request that arrives ``now``."""
        backlog, tokens = self.backlog, len(request.tokens)
        backlog.open_requests += 1
        backlog.open_tokens += tokens
        backlog.queued_requests += 1
        backlog.queued_tokens += tokens
        ready = self._front.take(now, tokens, self._stepping)
        if self._steering is not None:
            request = self._steering.assigned(request)
        self._mail.append((ready, request))
        self.due = self.due + self._front.stall_seconds if self._stepping else min(self.due, ready)

    def start_again(self, tally: Tally) -> None:
        """Resets figures and prefix cache between two runs."""
        self._tally = tally
        self.runner.busy_seconds = 0.0
        self.engine.reset_prefix_cache()
        self.engine.take_events()

    def advance(self) -> None:
        """Advances to ``due``: handles the last step's events, reads the mailbox, begins the next step."""
        now = self.due
        read = now
        engine, mail = self.engine, self._mail
        if not self._stepping:
            self._waking = True
        else:
            self._stepping = False
            for request_id in self._tally.fold(self._events, self.began, now, self.backlog, self._front):
                del self._answers[request_id]
            for watcher in self._watchers:
                for event in self._events:
                    watcher.fold(event, now)
            if self._steering is not None:
                self._steering.saw(self._events, now)
            if self._waking and any(type(event) is Emitted for event in self._events):
                self._waking = False
                now += self._front.wake_seconds
        while mail and mail[0][0] <= read:
            engine.submit(mail.popleft()[1], read)
        wake = engine.wake_at(now)
        if wake is None or wake > now:
            self.due = min(mail[0][0] if mail else math.inf, math.inf if wake is None else wake)
            return
        if self._steering is not None:
            self._steering.steer(engine, now)
        self.began, self._stepping = now, True
        self._events = engine.step(now)
        self.due = max(now, self.runner.time)


class OneAnswer(Mapping[str, tuple[int, ...]]):
    """The same output for every request. Work ignores the end token, so outputs have the length that it prescribes."""

    def __getitem__(self, request_id: str) -> tuple[int, ...]:
        return (EOS,)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


class VirtualClock:
    """The clock of a simulated runner; `sleep` advances it while the engine is idle."""

    def __init__(self, runner: SimulatedRunner) -> None:
        self._runner = runner
        self._now = 0.0

    def now(self) -> float:
        """The virtual time in seconds."""
        self._now = max(self._now, self._runner.time)
        return self._now

    def sleep(self, seconds: float) -> None:
        """Advances the clock."""
        self._now = self.now() + seconds


def simulated_target(
    name: str, engine: Engine, runner: SimulatedRunner, concurrency: int | None = None
) -> EngineTarget:
    """A target around an engine over ``runner``; prompts are token ids. See `EngineTarget` for ``concurrency``."""
    clock = VirtualClock(runner)
    return EngineTarget(
        name,
        engine,
        token_ids,
        before=engine.reset_prefix_cache,
        clock=clock.now,
        sleep=clock.sleep,
        concurrency=concurrency,
    )


def token_ids(prompt: Prompt) -> tuple[int, ...]:
    """Returns a prompt of token ids unchanged."""
    return prompt  # type: ignore[return-value]
