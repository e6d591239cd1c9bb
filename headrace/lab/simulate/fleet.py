"""Replicas behind the gate and a router, driven through virtual time by the calls of a workload.

The only things that happen are arrivals and moments at which a replica is due; they are lived in order of time, and
an arrival goes before what happens at the same time. Nothing waits, so a day takes as long as its steps take to plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from headrace.core.gate import Limits, Reject, decide
from headrace.core.request import Request, SamplingParams
from headrace.core.routing import RoutingPolicy
from headrace.lab.simulate.replica import SimulatedReplica
from headrace.lab.simulate.runner import EOS_IDS
from headrace.lab.simulate.tally import Tally
from headrace.lab.workload.call import Call
from headrace.lab.workload.synthesis import Synthesis


class Fleet:
    """``replicas`` share one ``tally`` and the ``answers`` that their runners play.

    ``max_tokens`` is what every request asks for at most (None: as far as the context reaches); the length of its
    answer is known to the runner alone.
    """

    def __init__(
        self,
        replicas: Sequence[SimulatedReplica],
        routing: RoutingPolicy,
        limits: Limits,
        tally: Tally,
        answers: dict[str, tuple[int, ...]],
        *,
        max_tokens: int | None = None,
    ) -> None:
        self.replicas = tuple(replicas)
        self.tally = tally
        self._routing = routing
        self._limits = limits
        self._answers = answers
        self._params = SamplingParams(max_tokens=max_tokens)

    def run(self, calls: Iterable[Call], synthesis: Synthesis) -> None:
        """Live through all calls, which come in order of arrival, until the last has ended."""
        replicas = self.replicas
        arrivals = enumerate(calls)
        number, call = next(arrivals, (0, None))
        while True:
            replica = min(replicas, key=_due) if len(replicas) > 1 else replicas[0]
            if call is not None and call.arrival <= replica.due:
                self._arrive(number, call, synthesis)
                number, call = next(arrivals, (0, None))
            elif replica.due == math.inf:
                break
            else:
                replica.advance()
        self.tally.close()
        if self.tally.open_requests:
            raise RuntimeError(f"{self.tally.open_requests} requests never ended")

    def _arrive(self, number: int, call: Call, synthesis: Synthesis) -> None:
        request = Request(
            f"r{number}",
            synthesis.prompt(call),
            self._params,
            call.arrival,
            call.tenant,
            call.service_class,
            salt=call.tenant,
            eos_token_ids=EOS_IDS,
        )
        replicas = self.replicas
        chosen = 0
        if len(replicas) > 1:
            chosen = self._routing.choose(request, [replica.standing() for replica in replicas])
        replica = replicas[chosen]
        verdict = decide(replica.load(), 1, call.prompt_tokens, self._limits)
        if isinstance(verdict, Reject):
            self.tally.refuse(request, verdict.reason.value)
            return
        self._answers[request.id] = synthesis.answer(call)
        self.tally.expect(request)
        replica.submit(request, call.arrival)


def _due(replica: SimulatedReplica) -> float:
    return replica.due
