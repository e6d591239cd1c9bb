"""Replicas behind admission control and a router, in virtual time.

The only events are arrivals and times at which a replica is due. They are handled in order of time, arrivals first.
With a `Handover` a request arrives twice: at a prefill replica, and at a decode replica when its prompt is computed.
Nothing waits in real time: a simulation takes as long as the engines need to plan the steps.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush
from typing import NamedTuple

from headrace.core.events import Event, Finished
from headrace.core.peers import NO_OFFER, Inquiry, Offer
from headrace.core.request import Request, Retention
from headrace.core.scheduler.routing import RoutingPolicy
from headrace.core.tenancy.gate import Limits, Reject, decide
from headrace.lab.simulate.replica import SimulatedReplica
from headrace.lab.simulate.runner import EOS, SimulatedRequest
from headrace.lab.simulate.tally import Tally

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
