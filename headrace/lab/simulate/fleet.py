"""Replicas behind admission control and a router, in virtual time.

The only events are arrivals and times at which a replica is due. They are handled in order of time, arrivals first.
With a `Handover` a request arrives twice: at a prefill replica, and at a decode replica when its prompt is computed.
Nothing waits in real time: a simulation takes as long as the engines need to plan the steps.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Sequence

from headrace.core.request import Request
from headrace.core.scheduler.routing import RoutingPolicy
from headrace.core.tenancy.gate import Limits, Reject, decide
from headrace.lab.simulate.handover import Handover
from headrace.lab.simulate.replica import SimulatedReplica
from headrace.lab.simulate.requests import SimulatedRequest
from headrace.lab.simulate.tally import Tally


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
