"""Rate limits of tenants: sliding windows over requests and tokens, with `now` as an argument.

A window forgets by slices: use in a slice counts until the whole slice is older than the window. So no period as long
as the window ever contains more than the limit. A token bucket does not guarantee this: its fill and what flows in
meanwhile add up. The time at which enough use will have expired is known exactly.

A call is charged at admission with the most that it may compute, and corrected at its end with what it did compute.
"""

from __future__ import annotations

import math
from collections import deque
from enum import StrEnum
from typing import NamedTuple

from headrace.core.tenancy.tenants import UNLIMITED, TenantLimits, Tenants

MINUTE = 60.0
DAY = 86_400.0
MINUTE_SLICES = 60  # see docs/decisions/scheduling.md#rate-limits
DAY_SLICES = 96

MAX_ACCOUNTS = 10_000
"""Maximum number of accounts. Above it, further unnamed tenants share the account `OTHERS`."""

OTHERS = "other"
SWEEP = 64
"""Idle accounts kept in addition to twice the number in use."""

SWEEP_SECONDS = 10.0
"""Minimum time between two sweeps while there are too many accounts, because a sweep may find none to remove."""


class Limit(StrEnum):
    """The limit that a call exceeds."""

    REQUESTS_PER_MINUTE = "requests_per_minute"
    TOKENS_PER_MINUTE = "tokens_per_minute"
    TOKENS_PER_DAY = "tokens_per_day"
    CONCURRENT_REQUESTS = "concurrent_requests"
    KV_TOKENS = "kv_tokens"
    CLASS_KV_TOKENS = "class_kv_tokens"


KV_LIMITS = frozenset({Limit.KV_TOKENS, Limit.CLASS_KV_TOKENS})
"""The limits on the KV memory of one request."""


class Shortage(NamedTuple):
    """A limit that a call exceeds: ``used`` of ``allowed`` are taken and ``asked`` more are needed.

    There will be room in ``seconds`` if no other call takes it (inf: never; None: when a call of the same tenant
    ends).
    """

    limit: Limit
    allowed: int
    used: int
    asked: int
    seconds: float | None


class Room(NamedTuple):
    """The state of one limit: how much is left, and in how many seconds all of it will be available."""

    allowed: int
    remaining: int
    reset_seconds: float


class SlidingWindow:
    """Amounts used in the last ``seconds``, by slices. If the clock jumps back, the window keeps its last time."""

    __slots__ = ("_now", "_slices", "_used", "_width", "allowed", "seconds")

    def __init__(self, allowed: int, seconds: float, slices: int) -> None:
        self.allowed = allowed
        self.seconds = seconds
        self._width = seconds / slices
        self._slices: deque[list[int]] = deque()  # [number of the slice, used in it], oldest first
        self._used = 0
        self._now = -math.inf

    def used(self, now: float) -> int:
        """The amount that counts now."""
        self._forget(now)
        return self._used

    def wait_for(self, amount: int, now: float) -> float:
        """Seconds until ``amount`` fits: 0 now, inf never."""
        self._forget(now)
        if amount > self.allowed:
            return math.inf
        over = self._used + amount - self.allowed
        if over <= 0:
            return 0.0
        for number, used in self._slices:
            over -= used
            if over <= 0:
                return self._end(number) - now
        raise AssertionError("the slices add up to less than the recorded use")

    def take(self, amount: int, now: float) -> int:
        """Charge ``amount``, whether it fits or not; returns the number of its slice, for `give_back`."""
        self._forget(now)
        number = math.floor(self._now / self._width)
        if not self._slices or self._slices[-1][0] != number:
            self._slices.append([number, 0])
        self._slices[-1][1] += amount
        self._used += amount
        return number

    def give_back(self, amount: int, number: int, now: float) -> None:
        """Refund a part of what was charged to slice ``number``; expired use is not refunded."""
        self._forget(now)
        for entry in self._slices:
            if entry[0] == number:
                amount = min(amount, entry[1])
                entry[1] -= amount
                self._used -= amount
                break

    def room(self, now: float) -> Room:
        """What is left now."""
        self._forget(now)
        last = next((number for number, used in reversed(self._slices) if used), None)
        reset = 0.0 if last is None else self._end(last) - now
        return Room(self.allowed, max(0, self.allowed - self._used), reset)

    def _end(self, number: int) -> float:
        """When slice ``number`` expires."""
        return (number + 1) * self._width + self.seconds

    def _forget(self, now: float) -> None:
        self._now = max(self._now, now)
        while self._slices and self._end(self._slices[0][0]) <= self._now:
            self._used -= self._slices.popleft()[1]


class _Account:
    """The use of one tenant under one set of limits."""

    __slots__ = ("limits", "open", "windows")

    def __init__(self, limits: TenantLimits) -> None:
        self.limits = limits
        self.open = 0
        self.windows = {
            limit: SlidingWindow(allowed, seconds, slices)
            for limit, allowed, seconds, slices in (
                (Limit.REQUESTS_PER_MINUTE, limits.requests_per_minute, MINUTE, MINUTE_SLICES),
                (Limit.TOKENS_PER_MINUTE, limits.tokens_per_minute, MINUTE, MINUTE_SLICES),
                (Limit.TOKENS_PER_DAY, limits.tokens_per_day, DAY, DAY_SLICES),
            )
            if allowed is not None
        }

    def change(self, limits: TenantLimits) -> None:
        """Use other limits from now on; what has been used in a window still counts."""
        new = _Account(limits).windows
        for limit in new.keys() & self.windows.keys():
            self.windows[limit].allowed = new[limit].allowed
            new[limit] = self.windows[limit]
        self.limits, self.windows = limits, new

    def is_idle(self, now: float) -> bool:
        return not self.open and not any(window.used(now) for window in self.windows.values())


class Charge(NamedTuple):
    """The charge of an open call, until `Quotas.settle`."""

    key: tuple[str, str]
    tokens: int
    slices: tuple[tuple[Limit, int], ...]


class Quotas:
    """The accounts of all tenants that have limits."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._accounts: dict[tuple[str, str], _Account] = {}
        self._sweep_at = SWEEP
        self._sweep_after = -math.inf

    def __len__(self) -> int:
        return len(self._accounts)

    def shortage(self, tenant: str, model: str, tokens: int, now: float) -> Shortage | None:
        """The limit that rejects a call of ``tokens``, the one with the longest wait; None if the call may enter."""
        account = self._accounts.get(self._key(tenant, model, now)) or _Account(
            self._tenants.terms(tenant).limits_of(model)
        )
        worst: Shortage | None = None
        for limit, window in account.windows.items():
            asked = _amount(limit, tokens)
            seconds = window.wait_for(asked, now)
            if seconds > 0.0 and (worst is None or worst.seconds is None or seconds > worst.seconds):
                worst = Shortage(limit, window.allowed, window.used(now), asked, seconds)
        max_open = account.limits.concurrent_requests
        if worst is None and max_open is not None and account.open >= max_open:
            worst = Shortage(Limit.CONCURRENT_REQUESTS, max_open, account.open, 1, None)
        return worst

    def take(self, tenant: str, model: str, tokens: int, now: float) -> Charge | None:
        """Charge a call of at most ``tokens``; None for a tenant without limits, which has no account."""
        limits = self._tenants.terms(tenant).limits_of(model)
        if limits == UNLIMITED:
            return None
        key = self._key(tenant, model, now)
        account = self._accounts.get(key)
        if account is None:
            self._sweep(now)
            account = self._accounts[key] = _Account(limits)
        account.open += 1
        slices = tuple(
            (limit, window.take(_amount(limit, tokens), now)) for limit, window in account.windows.items()
        )
        return Charge(key, tokens, slices)

    def settle(self, charge: Charge, tokens: int, now: float) -> None:
        """A call has ended and used ``tokens``: refund the rest of its charge, or add what is missing."""
        account = self._accounts[charge.key]
        account.open -= 1
        for limit, number in charge.slices:
            window = account.windows.get(limit)
            if window is None:  # the limit has been lifted since
                continue
            change = _amount(limit, tokens) - _amount(limit, charge.tokens)
            if change < 0:
                window.give_back(-change, number, now)
            elif change:
                window.take(change, now)

    def rooms(self, tenant: str, model: str, now: float) -> dict[Limit, Room]:
        """The state of a tenant's limits; empty if it has none."""
        limits = self._tenants.terms(tenant).limits_of(model)
        account = self._accounts.get(self._key(tenant, model, now)) or _Account(limits)
        rooms = {limit: window.room(now) for limit, window in account.windows.items()}
        if limits.concurrent_requests is not None:
            left = max(0, limits.concurrent_requests - account.open)
            rooms[Limit.CONCURRENT_REQUESTS] = Room(limits.concurrent_requests, left, 0.0)
        return rooms

    def replace(self, tenants: Tenants) -> None:
        """Use other terms from now on. Calls that are open keep what they hold."""
        self._tenants = tenants
        for (tenant, model), account in self._accounts.items():
            terms = tenants.terms(tenant)
            account.change(terms.limits_of(model) if model in terms.models else terms.limits)

    def _key(self, tenant: str, model: str, now: float) -> tuple[str, str]:
        terms = self._tenants.terms(tenant)
        key = (tenant, model if model in terms.models else "")
        if key in self._accounts or tenant in self._tenants.named or len(self._accounts) < MAX_ACCOUNTS:
            return key
        self._sweep(now)
        return key if len(self._accounts) < MAX_ACCOUNTS else (OTHERS, key[1])

    def _sweep(self, now: float) -> None:
        """Remove idle accounts before they outnumber those in use; a new account would be in the same state."""
        count = len(self._accounts)
        if count >= self._sweep_at or (count >= MAX_ACCOUNTS and now >= self._sweep_after):
            self._accounts = {key: each for key, each in self._accounts.items() if not each.is_idle(now)}
            self._sweep_at = 2 * len(self._accounts) + SWEEP
            self._sweep_after = now + SWEEP_SECONDS


def _amount(limit: Limit, tokens: int) -> int:
    return 1 if limit is Limit.REQUESTS_PER_MINUTE else tokens
