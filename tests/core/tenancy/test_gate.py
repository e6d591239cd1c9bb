from __future__ import annotations

import math

import pytest

from headrace.core.request import RejectReason
from headrace.core.tenancy.gate import MAX_RETRY_AFTER, Forward, Limits, Load, Reject, decide
from headrace.core.tenancy.quota import Limit, Shortage

LIMITS = Limits(queued_requests=10, queued_tokens=100)


@pytest.mark.parametrize(
    ("load", "sequences", "tokens", "reason"),
    [
        (Load(0, 0, 0.0, False), 10, 100, None),
        (Load(9, 0, 0.0, False), 1, 1, None),
        (Load(9, 0, 0.0, False), 2, 1, RejectReason.QUEUE_FULL),
        (Load(10, 0, 0.0, False), 1, 1, RejectReason.QUEUE_FULL),
        (Load(1, 60, 0.0, False), 1, 40, None),
        (Load(1, 60, 0.0, False), 1, 41, RejectReason.QUEUE_TOKENS),
        (Load(0, 0, 0.0, True), 1, 1, RejectReason.DRAINING),
    ],
)
def test_decide(load, sequences, tokens, reason):
    decision = decide(load, sequences, tokens, LIMITS)
    if reason is None:
        assert decision == Forward()
    else:
        assert isinstance(decision, Reject)
        assert decision.reason is reason


@pytest.mark.parametrize(("rate", "seconds"), [(0.0, 1), (1000.0, 1), (2.0, 5), (0.01, MAX_RETRY_AFTER)])
def test_retry_after_follows_the_speed_of_the_queue(rate, seconds):
    decision = decide(Load(10, 0, rate, False), 1, 1, LIMITS)
    assert isinstance(decision, Reject)
    assert decision.retry_after == seconds
    assert "10" in decision.message


@pytest.mark.parametrize(
    ("sequences", "tokens"), [(LIMITS.queued_requests + 1, 1), (1, LIMITS.queued_tokens + 1)]
)
def test_a_call_too_large_for_an_empty_queue_gets_no_retry_after(sequences, tokens):
    decision = decide(Load(0, 0, 0.0, False), sequences, tokens, LIMITS)
    assert isinstance(decision, Reject)
    assert decision.reason is RejectReason.TOO_LARGE


def test_a_tenants_own_limit_comes_before_a_full_queue() -> None:
    full = Load(10, 0, 1.0, False)
    shortage = Shortage(Limit.REQUESTS_PER_MINUTE, 5, 5, 1, 12.2)
    verdict = decide(full, 1, 1, Limits(10, 100), shortage)
    assert isinstance(verdict, Reject)
    assert (verdict.reason, verdict.retry_after, verdict.limit) == (
        RejectReason.TENANT_LIMIT,
        13,
        Limit.REQUESTS_PER_MINUTE,
    )
    assert "5 requests per minute" in verdict.message


def test_a_call_beyond_the_tenants_limit_need_not_come_again() -> None:
    shortage = Shortage(Limit.TOKENS_PER_MINUTE, 100, 0, 500, math.inf)
    verdict = decide(Load(0, 0, 1.0, False), 1, 1, Limits(10, 100), shortage)
    assert isinstance(verdict, Reject)
    assert (verdict.reason, verdict.retry_after) == (RejectReason.TOO_LARGE, 0)


def test_too_many_open_calls_may_be_tried_again_soon() -> None:
    shortage = Shortage(Limit.CONCURRENT_REQUESTS, 2, 2, 1, None)
    verdict = decide(Load(0, 0, 1.0, False), 1, 1, Limits(10, 100), shortage)
    assert isinstance(verdict, Reject)
    assert verdict.retry_after == 1


def test_a_paused_server_takes_nothing_and_one_that_ends_says_so_first() -> None:
    paused = Load(0, 0, 0.0, draining=False, paused=True)
    verdict = decide(paused, 1, 1, Limits(10, 100))
    assert isinstance(verdict, Reject)
    assert (verdict.reason, verdict.retry_after) == (RejectReason.PAUSED, 5)
    ending = decide(paused._replace(draining=True), 1, 1, Limits(10, 100))
    assert isinstance(ending, Reject)
    assert ending.reason is RejectReason.DRAINING
