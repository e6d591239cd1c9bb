from __future__ import annotations

import math
from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.tenancy import quota
from headrace.core.tenancy.quota import Limit, Quotas, SlidingWindow
from headrace.core.tenancy.tenants import EQUALS, TenantLimits, Tenants, TenantTerms

SECONDS, SLICES = 60.0, 6


def tenants(**limits: int) -> Tenants:
    return Tenants({"acme": TenantTerms(limits=TenantLimits(**limits))})


# -- one window ------------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(st.floats(0.0, 90.0), st.integers(0, 60), st.floats(0.0, 1.0)), min_size=1, max_size=40
)


@given(STEPS)
def test_no_stretch_of_time_holds_more_than_the_limit(steps: list[tuple[float, int, float]]) -> None:
    window = SlidingWindow(100, SECONDS, SLICES)
    now, taken = 0.0, []
    for pause, amount, kept in steps:
        now += pause
        if window.wait_for(amount, now) == 0.0:
            number = window.take(amount, now)
            used = round(amount * kept)
            window.give_back(amount - used, number, now)
            taken.append((now, used))
        assert sum(used for at, used in taken if at > now - SECONDS) <= window.used(now) <= 100


@given(STEPS)
def test_the_reported_wait_is_exact(steps: list[tuple[float, int, float]]) -> None:
    window = SlidingWindow(100, SECONDS, SLICES)
    now = 0.0
    for pause, amount, _ in steps:
        now += pause
        wait = window.wait_for(amount, now)
        if wait == 0.0:
            window.take(amount, now)
            continue
        assert wait <= SECONDS + SECONDS / SLICES
        assert deepcopy(window).wait_for(amount, now + wait - 0.001) > 0.0
        assert deepcopy(window).wait_for(amount, now + wait + 0.001) == 0.0


@given(st.lists(st.tuples(st.floats(-1e5, 1e5), st.integers(0, 60), st.booleans()), max_size=60))
def test_whatever_the_clock_and_the_refunds_do_a_window_stays_within_its_bounds(
    steps: list[tuple[float, int, bool]],
) -> None:
    window = SlidingWindow(100, SECONDS, SLICES)
    numbers = [0]
    for now, amount, gives in steps:
        if gives:
            window.give_back(amount, numbers[amount % len(numbers)], now)
        elif window.wait_for(amount, now) == 0.0:
            numbers.append(window.take(amount, now))
        room = window.room(now)
        assert 0 <= room.remaining <= 100
        assert room.remaining == 100 - window.used(now)
        assert len(window._slices) <= SLICES + 2


def test_a_clock_that_jumps_back_frees_nothing_and_blocks_nothing_for_ever() -> None:
    window = SlidingWindow(1, SECONDS, SLICES)
    window.take(1, 1000.0)
    wait = window.wait_for(1, 0.0)
    assert wait == pytest.approx(1070.0, abs=10.0)
    assert window.wait_for(1, wait) == 0.0


def test_more_than_the_limit_never_fits() -> None:
    assert SlidingWindow(10, SECONDS, SLICES).wait_for(11, 0.0) == math.inf


# -- a tenant's account ----------------------------------------------------------------------------


def test_a_call_that_computed_little_gives_the_rest_back() -> None:
    quotas = Quotas(tenants(tokens_per_minute=100))
    hold = quotas.take("acme", "m", 90, 0.0)
    assert hold is not None
    shortage = quotas.shortage("acme", "m", 20, 1.0)
    assert shortage is not None
    assert shortage[:4] == (Limit.TOKENS_PER_MINUTE, 100, 90, 20)
    assert shortage.seconds == pytest.approx(60.0)
    quotas.settle(hold, 5, 2.0)
    assert quotas.shortage("acme", "m", 20, 2.0) is None
    assert quotas.rooms("acme", "m", 2.0)[Limit.TOKENS_PER_MINUTE].remaining == 95


def test_a_call_that_computed_more_than_it_held_is_charged_for_it() -> None:
    quotas = Quotas(tenants(tokens_per_minute=100))
    hold = quotas.take("acme", "m", 10, 0.0)
    assert hold is not None
    quotas.settle(hold, 130, 1.0)
    assert quotas.rooms("acme", "m", 1.0)[Limit.TOKENS_PER_MINUTE].remaining == 0
    assert quotas.shortage("acme", "m", 1, 1.0) is not None


def test_the_limit_with_the_longest_wait_is_reported() -> None:
    quotas = Quotas(tenants(requests_per_minute=1, tokens_per_day=100))
    quotas.take("acme", "m", 90, 0.0)
    shortage = quotas.shortage("acme", "m", 20, 1.0)
    assert shortage is not None
    assert shortage.limit is Limit.TOKENS_PER_DAY
    shortage = quotas.shortage("acme", "m", 5, 1.0)
    assert shortage is not None
    assert shortage.limit is Limit.REQUESTS_PER_MINUTE


def test_open_calls_are_counted_until_they_are_settled() -> None:
    quotas = Quotas(tenants(concurrent_requests=1))
    hold = quotas.take("acme", "m", 1, 0.0)
    assert hold is not None
    shortage = quotas.shortage("acme", "m", 1, 0.0)
    assert shortage == (Limit.CONCURRENT_REQUESTS, 1, 1, 1, None)
    quotas.settle(hold, 1, 0.0)
    assert quotas.shortage("acme", "m", 1, 0.0) is None


def test_a_model_with_limits_of_its_own_is_counted_apart() -> None:
    terms = TenantTerms(
        limits=TenantLimits(requests_per_minute=1), models={"large": TenantLimits(requests_per_minute=1)}
    )
    quotas = Quotas(Tenants({"acme": terms}))
    quotas.take("acme", "small", 1, 0.0)
    assert quotas.shortage("acme", "other", 1, 0.0) is not None
    assert quotas.shortage("acme", "large", 1, 0.0) is None
    quotas.take("acme", "large", 1, 0.0)
    assert quotas.shortage("acme", "large", 1, 0.0) is not None


def test_nothing_is_kept_of_tenants_without_limits() -> None:
    quotas = Quotas(EQUALS)
    assert quotas.take("anybody", "m", 10, 0.0) is None
    assert quotas.shortage("anybody", "m", 10**9, 0.0) is None
    assert quotas.rooms("anybody", "m", 0.0) == {}
    assert len(quotas) == 0


def everybody(**limits: int) -> Tenants:
    return Tenants(default=TenantTerms(limits=TenantLimits(**limits)))


def test_idle_accounts_are_forgotten() -> None:
    quotas = Quotas(everybody(requests_per_minute=5))
    for i in range(5000):
        hold = quotas.take(f"tenant-{i}", "m", 1, float(i))
        assert hold is not None
        quotas.settle(hold, 1, float(i))
        assert len(quotas) <= 4 * 61 + 2 * quota.SWEEP


def test_invented_tenants_share_one_account_once_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota, "MAX_ACCOUNTS", 100)
    quotas = Quotas(everybody(requests_per_minute=5))
    for i in range(105):
        quotas.take(f"tenant-{i}", "m", 1, 0.0)
    assert len(quotas) == 101
    assert quotas.shortage("one-more", "m", 1, 0.0) is not None
    assert quotas.shortage("tenant-1", "m", 1, 0.0) is None


def test_a_crowd_that_has_gone_makes_room_for_accounts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota, "MAX_ACCOUNTS", 100)
    quotas = Quotas(everybody(requests_per_minute=5))
    for i in range(105):
        hold = quotas.take(f"tenant-{i}", "m", 1, 0.0)
        assert hold is not None
        quotas.settle(hold, 1, 0.0)
    for i in range(20):
        assert quotas.shortage(f"later-{i}", "m", 1, 600.0) is None
        quotas.take(f"later-{i}", "m", 1, 600.0)
    assert len(quotas) <= 21


def test_new_limits_apply_to_what_has_been_used_already() -> None:
    quotas = Quotas(Tenants({"a": TenantTerms(limits=TenantLimits(requests_per_minute=2))}))
    hold = quotas.take("a", "", 10, 0.0)
    assert hold is not None
    quotas.replace(
        Tenants({"a": TenantTerms(limits=TenantLimits(requests_per_minute=1, tokens_per_minute=50))})
    )
    shortage = quotas.shortage("a", "", 10, 1.0)
    assert shortage is not None
    assert (shortage.limit, shortage.used) == (Limit.REQUESTS_PER_MINUTE, 1)
    assert quotas.rooms("a", "", 1.0)[Limit.TOKENS_PER_MINUTE].remaining == 50
    quotas.settle(hold, 10, 2.0)


def test_a_limit_that_is_lifted_frees_its_tenant_while_calls_are_open() -> None:
    limits = TenantLimits(tokens_per_minute=10, concurrent_requests=1)
    quotas = Quotas(Tenants({"a": TenantTerms(limits=limits)}))
    hold = quotas.take("a", "", 10, 0.0)
    assert hold is not None
    assert quotas.shortage("a", "", 10, 1.0) is not None
    quotas.replace(Tenants())
    assert quotas.shortage("a", "", 10, 1.0) is None
    assert quotas.rooms("a", "", 1.0) == {}
    quotas.settle(hold, 5, 2.0)
