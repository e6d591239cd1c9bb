"""Short ways to a fleet in virtual time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace.core.blocks import BlockPool
from headrace.core.engine import Engine
from headrace.core.events import Event
from headrace.core.eviction import LeastRecentlyUsed
from headrace.core.gate import Limits
from headrace.core.knobs import Knobs
from headrace.core.routing import RoundRobin, RoutingPolicy
from headrace.core.scheduler.admission import Continuous
from headrace.core.scheduler.order import FirstComeFirstServed
from headrace.core.scheduler.scheduler import Scheduler
from headrace.core.scheduler.victims import LastRanked
from headrace.lab.simulate.device import Device
from headrace.lab.simulate.fleet import Fleet
from headrace.lab.simulate.front import Front
from headrace.lab.simulate.replica import SimulatedReplica
from headrace.lab.simulate.runner import SimulatedRunner
from headrace.lab.simulate.tally import Tally
from headrace.lab.simulate.work import StepWork
from headrace.lab.workload.call import Call
from headrace.lab.workload.synthesis import Synthesis

OPEN_DOOR = Limits(1 << 30, 1 << 60)


class Fixed:
    """A device on which a step takes ``step`` seconds and each token ``token`` more; the host ``host``."""

    def __init__(self, step: float = 0.01, token: float = 0.0, host: float = 0.0) -> None:
        self.step, self.token, self.host = step, token, host
        self.seen: list[StepWork] = []

    def seconds(self, work: StepWork) -> float:
        self.seen.append(work)
        return self.step + self.token * work.tokens

    def host_seconds(self, work: StepWork) -> float:
        return self.host


def fleet(
    device: Device,
    count: int = 1,
    *,
    num_blocks: int = 256,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_model_len: int = 512,
    batched_tokens: int = 64,
    overlap: int = 0,
    routing: RoutingPolicy | None = None,
    limits: Limits = OPEN_DOOR,
    front: Sequence[float] = (0.0, 0.0),
    max_tokens: int | None = None,
) -> Fleet:
    tally, answers = Tally(), {}
    replicas = []
    for _ in range(count):
        events: list[Event] = []
        scheduler = Scheduler(
            BlockPool(num_blocks, block_size, LeastRecentlyUsed(), events.append),
            FirstComeFirstServed(),
            Continuous(),
            LastRanked(),
            events,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
        )
        runner = SimulatedRunner(device, answers)
        engine = Engine(scheduler, runner, events, Knobs(batched_tokens=batched_tokens), overlap)
        replicas.append(SimulatedReplica(engine, runner, tally, answers, Front(*front)))
    return Fleet(replicas, routing or RoundRobin(), limits, tally, answers, max_tokens=max_tokens)


def run(live: Fleet, calls: Iterable[Call]) -> Tally:
    live.run(calls, Synthesis())
    return live.tally
