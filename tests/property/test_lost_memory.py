"""A runner that loses its memory at any step: every request ends once, and no answer is made of what was lost.

Requests are computed again until there are too many losses, of the engine or of a request.
"""

from __future__ import annotations

import random

import pytest

from headrace.core.capacity import NO_WINDOWS, WindowGroups
from headrace.core.events import EngineLost, Moved, Preempted, PreemptReason
from headrace.core.plan import StepOutput, StepPlan, Tier
from headrace.core.ports import LOST_PREFIX, RunnerLost
from headrace.core.recovery import LOSS_SECONDS, MOST_LOSSES, MOST_LOSSES_OF_REQUEST, Recovery
from headrace.core.request import FinishReason
from headrace.testing.checks import make_request
from headrace.testing.engines import Record, drain, hashing_engine
from headrace.testing.hashing_runner import HashingRunner, expected_tokens, seed_of


class ForgetfulRunner(HashingRunner):
    """Loses all pages but the disk's in a random step: that step and all in flight raise, what is read later is wrong,
    and copies under way have no end.
    """

    rng: random.Random
    losses = 0
    most = 1 << 30
    _launched = 0
    _raising = 0

    def launch(self, plan: StepPlan, now: float) -> None:
        self._launched += 1
        super().launch(plan, now)

    def collect(self) -> StepOutput:
        output = super().collect()
        if not self._raising and self.losses < self.most and self.rng.random() < 0.1:
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


@pytest.mark.parametrize("most", [MOST_LOSSES_OF_REQUEST, 1 << 30])
@pytest.mark.parametrize("overlap", [0, 1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("host_blocks", "disk_blocks", "windows"),
    [(0, 0, NO_WINDOWS), (24, 0, NO_WINDOWS), (3, 40, NO_WINDOWS), (0, 0, WindowGroups(2, 6, 8))],
)
def test_every_request_ends_once_and_right(
    overlap: int, host_blocks: int, disk_blocks: int, windows: WindowGroups, most: int
) -> None:
    losses = ends = fetched = recomputed = failed = 0
    blocks = (12 if disk_blocks else 24) * (1 + windows.groups)
    for seed in range(10):
        engine, plain = hashing_engine(
            num_blocks=blocks,
            max_num_seqs=4,
            max_model_len=40,
            overlap=overlap,
            host_blocks=host_blocks,
            disk_blocks=disk_blocks,
            windows=windows,
        )
        tiers = {"host_blocks": host_blocks, "disk_blocks": disk_blocks}
        runner = ForgetfulRunner(blocks, 4, 4, **tiers, windows=windows)
        runner.rng, runner.most = (rng := random.Random(seed)), most
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
                failed += 1
                continue
            count = request.params.max_tokens or 0
            own = seed_of(request.params, request.seed)
            assert record.tokens[name] == expected_tokens(
                request.tokens, own, count, frozenset(), windows=windows
            )
            assert end.output_tokens == count
            ends += 1
        counted = record.of(EngineLost)
        assert len(counted) == runner.losses
        assert all(each.failed for each in counted[MOST_LOSSES:] if each.recomputed + each.failed)
        assert not any(each.recomputed for each in counted[MOST_LOSSES:])
        preempted = [each for each in record.of(Preempted) if each.reason is PreemptReason.LOST]
        assert len(preempted) == sum(each.recomputed for each in counted)
        losses += runner.losses
        recomputed += len(preempted)
        fetched += sum(each.source is Tier.DISK for each in record.of(Moved))
    assert losses > 15
    assert ends > 100
    assert recomputed > 15
    assert bool(failed) == (most > MOST_LOSSES_OF_REQUEST)
    assert bool(fetched) == bool(disk_blocks)


def test_losses_far_apart_do_not_count_together() -> None:
    recovery = Recovery()
    assert [recovery.lost(now) for now in (0.0, 1.0, 2.0, 3.0)] == [True, True, True, False]
    assert not recovery.lost(LOSS_SECONDS)
    assert recovery.lost(LOSS_SECONDS + 10.0)
