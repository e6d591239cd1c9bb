"""A runner that loses its memory at any step: every request ends once, and no answer is made of what was lost."""

from __future__ import annotations

import random

import pytest

from headrace.core.events import Moved
from headrace.core.plan import StepOutput, StepPlan, Tier
from headrace.core.ports import LOST_PREFIX, RunnerLost
from headrace.core.request import FinishReason
from headrace.testing.engines import Record, drain, hashing_engine
from headrace.testing.hashing_runner import HashingRunner, expected_tokens, seed_of
from headrace.testing.requests import make_request


class ForgetfulRunner(HashingRunner):
    """Loses all pages but the disk's in a random step: that step and all in flight raise, what is read later is wrong,
    and copies under way have no end.
    """

    rng: random.Random
    losses = 0
    _launched = 0
    _raising = 0

    def launch(self, plan: StepPlan, now: float) -> None:
        self._launched += 1
        super().launch(plan, now)

    def collect(self) -> StepOutput:
        output = super().collect()
        if not self._raising and self.rng.random() < 0.1:
            self.losses += 1
            self._raising = self._launched
            for tier in self.tiers.keys() - {Tier.DISK}:
                for page in self.tiers[tier]:
                    page[:] = [self.rng.randrange(1 << 30) for _ in page]
            self._transfers.clear()
        self._launched -= 1
        if self._raising:
            self._raising -= 1
            raise RunnerLost("rank 1 ended")
        return output


@pytest.mark.parametrize("overlap", [0, 1, 3])
@pytest.mark.parametrize(("host_blocks", "disk_blocks"), [(0, 0), (24, 0), (3, 40)])
def test_every_request_ends_once_and_right(overlap: int, host_blocks: int, disk_blocks: int) -> None:
    losses = ends = fetched = 0
    blocks = 12 if disk_blocks else 24
    for seed in range(12):
        engine, plain = hashing_engine(
            num_blocks=blocks,
            max_num_seqs=4,
            max_model_len=40,
            overlap=overlap,
            host_blocks=host_blocks,
            disk_blocks=disk_blocks,
        )
        runner = ForgetfulRunner(blocks, 4, 4, host_blocks=host_blocks, disk_blocks=disk_blocks)
        runner.rng = rng = random.Random(seed)
        engine.runner = runner
        del plain
        prompts = [
            (*range(rng.randrange(1, 16)), *(rng.randrange(50) for _ in range(rng.randrange(1, 12))))
            for _ in range(12)
        ]
        requests = {}
        for i, prompt in enumerate(2 * prompts):  # the second time, the disk may hold what was lost
            requests[f"r{i}"] = make_request(f"r{i}", prompt, max_tokens=rng.randrange(1, 12), seed=i)
        record = Record()
        for request in requests.values():
            engine.submit(request, 0.0)
            record.fold(engine.step(0.0))
        drain(engine, record)
        engine.check_consistency()
        for name, request in requests.items():
            (end,) = record.ends[name]
            if end.reason is FinishReason.FAILED:
                assert end.message == f"{LOST_PREFIX}rank 1 ended"
                continue
            count = request.params.max_tokens or 0
            own = seed_of(request.params, request.seed)
            assert record.tokens[name] == expected_tokens(request.tokens, own, count, frozenset())
            ends += 1
        losses += runner.losses
        fetched += sum(each.source is Tier.DISK for each in record.of(Moved))
    assert losses > 20
    assert ends > 80
    assert bool(fetched) == bool(disk_blocks)
