"""Replicas behind admission control and a router, in virtual time.

The only events are arrivals and times at which a replica is due. They are handled in order of time, arrivals first.
Nothing waits in real time, so a simulated day takes as long as its steps take to plan.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Sequence

from headrace.core.scheduler.routing import RoutingPolicy
from headrace.core.tenancy.gate import Limits, Reject, decide
from headrace.lab.simulate.replica import SimulatedReplica
from headrace.lab.simulate.requests import SimulatedRequest
from headrace.lab.simulate.tally import Tally


class Fleet:
    """``replicas`` share one ``tally`` and the ``answers`` that their runners return."""

    def __init__(
        self,
        replicas: Sequence[SimulatedReplica],
        routing: RoutingPolicy,
        limits: Limits,
        tally: Tally,
        answers: dict[str, tuple[int, ...]],
    ) -> None:
        self.replicas = tuple(replicas)
        self.tally = tally
        self._routing = routing
        self._limits = limits
        self._answers = answers

    @property
    def now(self) -> float:
        """Time of the last event."""
        return max(self.tally.ended, *(replica.runner.time for replica in self.replicas))

    def warm_up(self, asked: Iterable[SimulatedRequest]) -> None:
        """Run requests that do not count: the engines keep learnt lengths and times, but no cached prefixes.

        Later requests must arrive after `now`.
        """
        self.run(asked)
        self.tally = self.tally.anew()
        for replica in self.replicas:
            replica.start_again(self.tally)

    def run(self, asked: Iterable[SimulatedRequest]) -> None:
        """Run until the last request has ended; requests come in order of arrival.

        Garbage collection is off meanwhile: millions of values are made and none of them is in a cycle.
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
        replicas, arrivals = self.replicas, iter(asked)
        following = next(arrivals, None)
        while True:
            replica = min(replicas, key=_due) if len(replicas) > 1 else replicas[0]
            if following is not None and following.request.arrived <= replica.due:
                self._arrive(following)
                following = next(arrivals, None)
            elif replica.due == math.inf:
                break
            else:
                replica.advance()

    def _arrive(self, asked: SimulatedRequest) -> None:
        request, replicas = asked.request, self.replicas
        chosen = 0
        if len(replicas) > 1:
            chosen = self._routing.choose(request, [replica.standing() for replica in replicas])
        replica = replicas[chosen]
        verdict = decide(replica.load(), 1, len(request.tokens), self._limits)
        if isinstance(verdict, Reject):
            self.tally.refuse(request, verdict.reason.value)
            return
        self._answers[request.id] = asked.answer
        self.tally.expect(request)
        replica.submit(request, request.arrived)


def _due(replica: SimulatedReplica) -> float:
    return replica.due
