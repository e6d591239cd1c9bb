"""Random lives of the core with bounds on the KV memory of tenants and classes.

Every request ends, no bound is exceeded after any step, and the books agree.
"""

from __future__ import annotations

import random

import pytest

from headrace.core.events import Admitted, Finished, Preempted, Skipped, SkipReason
from headrace.core.tenancy.kv_limits import KvBounds
from tests.property.random_runs import run


@pytest.mark.parametrize("seed", [*range(60), 1621])
def test_bounds_hold_and_every_request_ends(seed: int) -> None:
    rng = random.Random(seed)

    def bound() -> int | None:
        return rng.choice([None, rng.randint(1, 40), rng.randint(20, 120)])

    record = run(seed, kv=KvBounds({"a": bound()}, bound(), {"priority": bound(), "flex": bound()}))
    running: set[str] = set()
    for event in record.events:
        if isinstance(event, Admitted):
            running.add(event.request_id)
        elif isinstance(event, Preempted | Finished):
            running.discard(event.request_id)
        elif isinstance(event, Skipped) and event.reason is SkipReason.KV_LIMIT:
            assert event.request_id not in running, f"{event.request_id} runs and waits"


def test_requests_wait_for_their_bounds() -> None:
    lives = [run(seed, kv=KvBounds({}, 60, {})) for seed in range(20)]
    assert SkipReason.KV_LIMIT in {event.reason for life in lives for event in life.of(Skipped)}
