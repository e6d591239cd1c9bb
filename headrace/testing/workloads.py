"""Checks that every workload must pass: it draws the requested number of requests, and the same ones again."""

from __future__ import annotations

import math
from collections.abc import Callable

from headrace.lab.workload.dataset import Dataset, Workload

MakeWorkload = Callable[[], Workload]

DATASET = Dataset(name="under-test", count=20, seed=5)


def draws_the_requested_number(make: MakeWorkload) -> None:
    """`draw` returns ``count`` requests, each with its own id, a prompt, and at least one output token."""
    work = make().draw(DATASET)
    assert len(work) == DATASET.count, f"{len(work)} requests drawn, expected {DATASET.count}"
    assert len({each.id for each in work}) == len(work), "two requests have the same id"
    for each in work:
        assert each.prompt, f"request {each.id} has an empty prompt"
        assert each.max_tokens >= 1, f"request {each.id} has max_tokens {each.max_tokens}"
        arrives = math.isfinite(each.arrival) and each.arrival >= 0.0
        assert arrives, f"request {each.id} arrives at {each.arrival}"


def equal_seeds_draw_equal_requests(make: MakeWorkload) -> None:
    """Two workloads draw the same requests for the same dataset."""
    assert list(make().draw(DATASET)) == list(make().draw(DATASET)), "a second workload draws other requests"


WORKLOAD_CHECKS = (draws_the_requested_number, equal_seeds_draw_equal_requests)


def check_workload(make: MakeWorkload) -> None:
    """All `WORKLOAD_CHECKS`."""
    for check in WORKLOAD_CHECKS:
        check(make)
