"""An engine that is put to sleep between any two steps, with running requests: no answer is made of what was freed."""

from __future__ import annotations

import random

import pytest

from headrace.core.capacity import NO_WINDOWS, WindowGroups
from headrace.core.events import AdmitReason, Admitted, Preempted, PreemptReason
from headrace.core.plan import Tier
from headrace.core.request import FinishReason
from headrace.testing.checks import make_request
from headrace.testing.engines import Record, drain, hashing_engine
from headrace.testing.hashing_runner import HashingRunner, expected_tokens, seed_of


def forget(runner: HashingRunner, rng: random.Random) -> None:
    """All pages but the disk's hold something else, and copies under way have no end."""
    for tier in runner.tiers.keys() - {Tier.DISK}:
        for page in runner.tiers[tier]:
            page[:] = [rng.randrange(1 << 30) for _ in page]
    runner._transfers.clear()


@pytest.mark.parametrize("overlap", [0, 1, 3])
@pytest.mark.parametrize(
    ("host_blocks", "disk_blocks", "windows"),
    [(0, 0, NO_WINDOWS), (24, 0, NO_WINDOWS), (3, 40, NO_WINDOWS), (0, 0, WindowGroups(2, 6, 8))],
)
def test_requests_continue_with_the_same_tokens(
    overlap: int, host_blocks: int, disk_blocks: int, windows: WindowGroups
) -> None:
    resumed = slept = cancelled = 0
    for seed in range(20):
        rng = random.Random(seed)
        engine, runner = hashing_engine(
            num_blocks=24 * (1 + windows.groups),
            max_num_seqs=4,
            max_model_len=40,
            overlap=overlap,
            host_blocks=host_blocks,
            disk_blocks=disk_blocks,
            windows=windows,
        )
        assert isinstance(runner, HashingRunner)
        record, requests = Record(), {}
        for i in range(16):
            prompt = (*range(rng.randrange(1, 16)), *(rng.randrange(50) for _ in range(rng.randrange(1, 12))))
            request = make_request(f"r{i}", prompt, max_tokens=rng.randrange(1, 12), seed=i)
            requests[request.id] = request
            engine.submit(request, 0.0)
            record.fold(engine.step(0.0))
            if rng.random() < 0.3:
                freed = rng.random() < 0.8
                engine.sleep((lambda: forget(runner, rng)) if freed else None)  # noqa: B023
                slept += 1
                if rng.random() < 0.3:
                    engine.cancel(rng.choice(list(requests)), FinishReason.CANCELLED, 0.0)
                before = runner.computed_tokens
                record.fold(engine.step(0.0))
                assert runner.computed_tokens == before
                assert engine.wake_at(0.0) is None
                engine.check_consistency()
                engine.wake_up()
        drain(engine, record)
        engine.check_consistency()
        for name, request in requests.items():
            (end,) = record.ends[name]
            if end.reason is FinishReason.CANCELLED:
                cancelled += 1
                continue
            count = request.params.max_tokens or 0
            own = seed_of(request.params, request.seed)
            assert record.tokens[name] == expected_tokens(
                request.tokens, own, count, frozenset(), windows=windows
            )
        resumed += sum(each.reason is AdmitReason.RESUMED for each in record.of(Admitted))
        assert all(each.reason is not PreemptReason.OWED for each in record.of(Preempted))
    assert min(slept, resumed, cancelled) > 5
