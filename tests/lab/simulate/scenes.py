"""Short ways to a fleet in virtual time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace.build.engine import make_engine
from headrace.config import CacheOptions, SchedulerOptions
from headrace.core.knobs import Knobs
from headrace.core.prediction.step_cost import TOKENS_ONLY
from headrace.core.scheduler.routing import RoundRobin, RoutingPolicy
from headrace.core.tenancy.gate import Limits
from headrace.lab.simulate.device import Device
from headrace.lab.simulate.fleet import Fleet
from headrace.lab.simulate.front import Front
from headrace.lab.simulate.replica import SimulatedReplica
from headrace.lab.simulate.requests import from_calls
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
    policy: str = "fcfs",
) -> Fleet:
    tally, answers = Tally(), {}
    replicas = []
    for _ in range(count):
        runner = SimulatedRunner(device, answers)
        engine = make_engine(
            SchedulerOptions(max_num_seqs=max_num_seqs, scheduling_policy=policy),
            CacheOptions(block_size=block_size),
            runner,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            knobs=Knobs(batched_tokens=batched_tokens),
            cost=TOKENS_ONLY,
            overlap=overlap,
        )
        replicas.append(SimulatedReplica(engine, runner, tally, answers, Front(*front)))
    return Fleet(replicas, routing or RoundRobin(), limits, tally, answers)


def run(live: Fleet, calls: Iterable[Call], max_tokens: int | None = None) -> Tally:
    live.run(from_calls(calls, Synthesis(), max_tokens))
    return live.tally
