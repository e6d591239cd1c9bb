"""Simulated engines: one with its own clock, mailbox and HTTP front end, alone also as a target of the benchmark, and
replicas behind admission control and a router, in virtual time.

The only events of a fleet are arrivals and times at which a replica is due. They are handled in order of time, arrivals
first. With a `Handover` a request arrives twice: at a prefill replica, and at a decode replica when its prompt is
computed. Nothing waits in real time: a simulation takes as long as the engines need to plan the steps.
"""

from __future__ import annotations

import gc
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush
from typing import NamedTuple, Protocol

from headrace.core.engine import Engine
from headrace.core.events import Emitted, Event, Finished
from headrace.core.peers import NO_OFFER, Inquiry, Offer
from headrace.core.ports import Watcher
from headrace.core.request import Request, Retention
from headrace.core.scheduler.routing import ReplicaLoad, RoutingPolicy
from headrace.core.tenancy.gate import Limits, Load, Reject, decide
from headrace.lab.bench.engine import EngineTarget
from headrace.lab.simulate.runner import EOS, Front, SimulatedRequest, SimulatedRunner
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


PROMPT = "prompt of "
"""Prefix of request ids at prefill replicas."""

_KEPT = (Retention(0, None, 60, 60.0),)
"""Retention of prompts on a prefill server."""


class Wire(NamedTuple):
    """The connection between replicas.

    ``latency`` is the time in seconds from the end of a prefill to the arrival at the decode replica (a second request
    and a lookup of blocks). ``bytes_per_second`` is the bandwidth of one replica. With ``at_once``, both replicas get a
    request at its arrival, and the latency begins then.
    """

    latency: float
    bytes_per_second: float
    at_once: bool = False


class Publisher:
    """The published prefix cache of a prefill replica: keys of blocks with the times they were stored.

    ``clock`` is that of its runner; ``free_at`` is when all pulled blocks are sent.
    """

    def __init__(self) -> None:
        self.clock: Callable[[], float] = float
        self.keys: dict[bytes, float] = {}
        self.free_at = 0.0

    def stored(self, parent: bytes | None, key: bytes, tokens: Sequence[int], block: int) -> None:
        self.keys[key] = self.clock()

    def removed(self, key: bytes) -> None:
        self.keys.pop(key, None)

    def cleared(self) -> None:
        self.keys.clear()


class SimulatedPeers:
    """`core.peers.Peers` of a decode replica: a lookup takes no time, a block takes ``block_seconds``.

    Each replica sends or receives one block at a time. ``clock`` gives the time of a lookup.
    """

    def __init__(self, publishers: Mapping[str, Publisher], block_seconds: float) -> None:
        self.clock: Callable[[], float] = float
        self.block_seconds = block_seconds
        self._publishers = publishers
        self._sources: dict[int, Publisher] = {}
        self._free_at = 0.0

    def ask(self, inquiry: Inquiry) -> None:
        publisher = self._publishers.get(inquiry.peer)
        if publisher is None:
            inquiry.answer = NO_OFFER
            return
        keys, since, now = inquiry.keys, publisher.keys, self.clock()
        held = next((i for i, key in enumerate(keys) if since.get(key, math.inf) > now), len(keys))
        inquiry.answer = Offer(inquiry.peer, held)

    def assign(self, block: int, peer: str, key: bytes) -> None:
        self._sources[block] = self._publishers[peer]

    def pull(self, block: int, now: float) -> float:
        """When a block has arrived if its pull starts ``now``."""
        source = self._sources[block]
        self._free_at = source.free_at = max(self._free_at, source.free_at, now) + self.block_seconds
        return self._free_at


class Handover:
    """The prefill replicas of a fleet, and requests on their way from them to the decode replicas."""

    def __init__(
        self,
        replicas: Sequence[SimulatedReplica],
        publishers: Mapping[str, Publisher],
        routing: RoutingPolicy,
        wire: Wire,
        tally: Tally,
        answers: dict[str, tuple[int, ...]],
    ) -> None:
        self.replicas = tuple(replicas)
        self.wire = wire
        self.tally = tally
        self._routing = routing
        self._answers = answers
        self._computing: dict[str, Request] = {}
        self._on_the_way: list[tuple[float, int, Request]] = []
        self._sent = 0
        self._names = dict(zip(replicas, publishers, strict=True))
        for replica, name in self._names.items():
            publishers[name].clock = partial(getattr, replica.runner, "time")
            replica.engine.scheduler.pool.notifier.listeners.append(publishers[name])
            replica.watch(_Exit(self, name))

    @property
    def due(self) -> float:
        """Time at which the next request arrives at a decode replica."""
        return self._on_the_way[0][0] if self._on_the_way else math.inf

    def choose(self, request: Request) -> SimulatedReplica:
        """The prefill replica of a request."""
        return self.replicas[self._routing.choose(request, [each.standing() for each in self.replicas])]

    def begin(self, request: Request, replica: SimulatedReplica) -> None:
        """Submits the prompt of an arriving request to a prefill replica."""
        params = replace(request.params, max_tokens=1)
        prompt = replace(request, id=PROMPT + request.id, params=params, retention=_KEPT)
        self._computing[prompt.id] = request
        self._answers[prompt.id] = (EOS,)
        self.tally.expect(prompt, counted=False)
        replica.submit(prompt, request.arrived)
        if self.wire.at_once:
            self._send(request, self._names[replica], request.arrived)

    def computed(self, prompt_id: str, name: str, now: float) -> None:
        """Sends a request on when its prompt has ended. If the prompt failed, the decode replica finds no blocks."""
        request = self._computing.pop(prompt_id)
        if not self.wire.at_once:
            self._send(request, name, now)

    def _send(self, request: Request, name: str, now: float) -> None:
        due = now + self.wire.latency
        request = replace(request, arrived=due, peer=name, follows=self.wire.at_once)
        self._sent += 1
        heappush(self._on_the_way, (due, self._sent, request))

    def take(self) -> Request:
        """Removes and returns the request that arrives at `due`."""
        return heappop(self._on_the_way)[2]


class _Exit:
    """Watches one prefill replica for finished prompts."""

    def __init__(self, handover: Handover, name: str) -> None:
        self._handover = handover
        self._name = name

    def fold(self, event: Event, now: float) -> None:
        if type(event) is Finished:
            self._handover.computed(event.request_id, self._name, now)


class Fleet:
    """Replicas that share one ``tally`` and the ``answers`` (outputs by request id) that their runners return.

    With a ``handover``, requests go through its prefill replicas first. The attribute `replicas` includes them.
    """

    def __init__(
        self,
        replicas: Sequence[SimulatedReplica],
        routing: RoutingPolicy,
        limits: Limits,
        tally: Tally,
        answers: dict[str, tuple[int, ...]],
        handover: Handover | None = None,
    ) -> None:
        self.replicas = (*replicas, *(handover.replicas if handover else ()))
        self.tally = tally
        self._routing = routing
        self._limits = limits
        self._answers = answers
        self._decoding = tuple(replicas)
        self._handover = handover

    @property
    def now(self) -> float:
        """Time of the last event."""
        return max(self.tally.ended, *(replica.runner.time for replica in self.replicas))

    def warm_up(self, asked: Iterable[SimulatedRequest]) -> None:
        """Runs requests that do not count: the engines keep learned lengths and times, but no cached prefixes.

        Later requests must arrive after `now`.
        """
        self.run(asked)
        self.tally = self.tally.anew()
        for replica in self.replicas:
            replica.start_again(self.tally)
        if self._handover:
            self._handover.tally = self.tally

    def run(self, asked: Iterable[SimulatedRequest]) -> None:
        """Runs all requests, which must be in order of arrival.

        Garbage collection is disabled meanwhile, because none of the many allocated values is in a cycle.
        """
        collecting = gc.isenabled()
        gc.disable()
        try:
            self._live(asked)
        finally:
            if collecting:
                gc.enable()
        self.tally.close()
        if self.tally.open_requests:
            raise RuntimeError(f"{self.tally.open_requests} requests never ended")

    def _live(self, asked: Iterable[SimulatedRequest]) -> None:
        replicas, arrivals, handover = self.replicas, iter(asked), self._handover
        following = next(arrivals, None)
        while True:
            replica = min(replicas, key=_due) if len(replicas) > 1 else replicas[0]
            if handover is not None and _precedes(handover.due, replica, following):
                request = handover.take()
                self._chosen(request).submit(request, request.arrived)
            elif following is not None and following.request.arrived <= replica.due:
                self._arrive(following)
                following = next(arrivals, None)
            elif replica.due == math.inf:
                break
            else:
                replica.advance()

    def _arrive(self, asked: SimulatedRequest) -> None:
        request, handover = asked.request, self._handover
        replica = handover.choose(request) if handover else self._chosen(request)
        verdict = decide(replica.load(), 1, len(request.tokens), self._limits)
        if isinstance(verdict, Reject):
            self.tally.refuse(request, verdict.reason.value)
            return
        self._answers[request.id] = asked.answer
        self.tally.expect(request)
        if handover:
            handover.begin(request, replica)
        else:
            replica.submit(request, request.arrived)

    def _chosen(self, request: Request) -> SimulatedReplica:
        replicas = self._decoding
        if len(replicas) == 1:
            return replicas[0]
        return replicas[self._routing.choose(request, [replica.standing() for replica in replicas])]


def _precedes(due: float, replica: SimulatedReplica, following: SimulatedRequest | None) -> bool:
    """Whether the next event is the arrival of a request from a prefill replica."""
    return due < math.inf and due <= replica.due and (following is None or due < following.request.arrived)


def _due(replica: SimulatedReplica) -> float:
    return replica.due
