"""Short ways to a fleet in virtual time."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence

from headrace.config import CacheOptions, SchedulerOptions
from headrace.core.drafting.proposal import DraftRow, Proposal
from headrace.core.knobs import Knobs
from headrace.core.prediction.step_curve import TOKENS_ONLY
from headrace.core.request import Request
from headrace.core.scheduler.routing import RoundRobin, RoutingPolicy
from headrace.core.tenancy.gate import Limits
from headrace.lab.simulate.fleet import Fleet, SimulatedReplica
from headrace.lab.simulate.runner import Device, Front, SimulatedRunner, StepWork, from_calls
from headrace.lab.simulate.tally import Tally
from headrace.lab.workload.work import Call, Synthesis
from headrace.wiring.drafting import ModelDrafts
from headrace.wiring.engine import TierSizes, make_engine

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


class Foreknown:
    """A draft model that knows the answers: each token that it proposes is right with probability ``rate``."""

    name = "draft_model"

    def __init__(self, answers: Mapping[str, tuple[int, ...]], rate: float) -> None:
        self.seconds = 0.0
        self._answers, self._rate, self._random = answers, rate, random.Random(1)

    def propose(self, draft_rows: Sequence[DraftRow]) -> Sequence[Proposal | None]:
        return [self._propose(draft_row) for draft_row in draft_rows]

    def _propose(self, draft_row: DraftRow) -> Proposal:
        begun, right = len(draft_row.tokens) - len(draft_row.request.tokens), self._rate
        true = self._answers[draft_row.request.id][begun : begun + draft_row.max_tokens]
        tokens = tuple(token if self._random.random() < right else token ^ 1 for token in true)
        self.seconds += 1e-4 * len(tokens)
        return Proposal(tokens, (right,) * len(tokens), self.name)

    def ended(self, request: Request, tokens: list[int]) -> None:
        pass


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
    draft_rate: float | None = None,
    host_blocks: int = 0,
) -> Fleet:
    """``draft_rate``: a draft model proposes tokens, of which this share is right; ``host_blocks``: a host tier."""
    tally, answers = Tally(), {}
    drafted = {"method": ["ngram", "draft_model"], "model": "none", "num_speculative_tokens": 4}
    speculation = None if draft_rate is None else json.dumps(drafted)
    replicas = []
    for _ in range(count):
        runner = SimulatedRunner(device, answers)
        engine = make_engine(
            SchedulerOptions(
                max_num_seqs=max_num_seqs, scheduling_policy=policy, speculative_config=speculation
            ),
            CacheOptions(block_size=block_size),
            runner,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            knobs=Knobs(batched_tokens=batched_tokens),
            cost=TOKENS_ONLY,
            overlap=overlap,
            drafts=None if draft_rate is None else ModelDrafts(Foreknown(answers, draft_rate), 0.05),
            tiers=TierSizes(host_blocks, 0, 64, 1e6) if host_blocks else None,
        )
        replicas.append(SimulatedReplica(engine, runner, tally, answers, Front(*front)))
    return Fleet(replicas, routing or RoundRobin(), limits, tally, answers)


def run(live: Fleet, calls: Iterable[Call], max_tokens: int | None = None) -> Tally:
    live.run(from_calls(calls, Synthesis(), max_tokens))
    return live.tally
