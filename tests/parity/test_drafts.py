"""Two ways, one answer: with a drafter that lies, every request gets the tokens that it gets without drafts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.core.events import Preempted, Verified
from tests.parity.drafted_runs import check_same, liar, random_requests, serve

WAYS: list[dict[str, Any]] = [
    {},
    {"batched_tokens": 11},
    {"overlap": 1},
    {"overlap": 3, "batched_tokens": 9},
    {"blocks": 26},
    {"blocks": 26, "overlap": 1, "prefix_caching": False},
]
BATCH = 60


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_drafts_change_no_answer(way, pytestconfig):
    count = pytestconfig.getoption("--lives") // 25
    preemptions = 0
    for seed in range(0, count, BATCH):
        todo = random_requests(seed, BATCH)
        plain = serve(todo, **way)
        drafter = liar(plain, seed)
        drafted = serve(todo, drafter, **way)
        check_same(plain, drafted)
        told = [event for event in drafted.events if isinstance(event, Verified)]
        assert sum(event.drafted for event in told) == drafter.drafted > 100
        assert sum(event.accepted for event in told) == drafter.accepted > 50
        preemptions += sum(isinstance(event, Preempted) for event in drafted.events)
    assert bool(preemptions) == ("blocks" in way)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8], ids=str)
def test_the_numbers_of_native_kernels_do_not_depend_on_drafts(kv_dtype):
    """Bit for bit: a query's result depends neither on its tile nor on the rest of the batch."""
    todo = random_requests(7, BATCH)
    plain = serve(todo, kernels="cpp", kv_dtype=kv_dtype)
    drafted = serve(todo, liar(plain, 7), kernels="cpp", kv_dtype=kv_dtype)
    assert drafted.answers == plain.answers
    assert sum(event.accepted for event in drafted.events if isinstance(event, Verified)) > 50
