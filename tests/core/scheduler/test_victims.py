from __future__ import annotations

from headrace.core.scheduler.victims import LastRanked
from headrace.core.sequence import Sequence
from tests.doubles.scenes import request


def test_whoever_would_be_served_last_gives_way():
    candidates = [Sequence(request(f"r{i}"), (i,), 64) for i in range(3)]
    assert LastRanked().choose(candidates, 0.0) is candidates[2]
