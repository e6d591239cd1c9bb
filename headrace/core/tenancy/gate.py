"""Admission control: whether a request may enter the queue, as a pure decision."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from headrace.core.request import RejectReason
from headrace.core.tenancy.quota import KV_LIMITS, Limit, Shortage


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what may wait at once, in sequences and in prompt tokens."""

    queued_requests: int
    queued_tokens: int


class Load(NamedTuple):
    """What waits now, and the recent admission rate (sequences per second; 0 if unknown)."""

    queued_requests: int
    queued_tokens: int
    admitted_per_second: float
    draining: bool
    paused: bool = False
    sleeping: bool = False


class Forward(NamedTuple):
    """Hand the request to the engine."""


class Reject(NamedTuple):
    """Reject the call. It may be retried after ``retry_after`` seconds; 0: it is too large at any time.

    ``limit`` is the tenant's limit that it exceeds, if that is the reason.
    """

    reason: RejectReason
    message: str
    retry_after: int
    limit: Limit | None = None


MAX_RETRY_AFTER = 60


def decide(
    load: Load, sequences: int, prompt_tokens: int, limits: Limits, shortage: Shortage | None = None
) -> Forward | Reject:
    """Admit ``sequences`` with ``prompt_tokens`` in total, or say why not and when to retry.

    ``shortage`` is the tenant's own limit that the call exceeds. It is checked before the queue, because an idle
    server would reject the same call.
    """
    if load.draining:
        return Reject(RejectReason.DRAINING, "the server is shutting down", 5)
    if load.paused:
        return Reject(RejectReason.PAUSED, "the server is paused by an administrator", 5)
    if load.sleeping:
        return Reject(RejectReason.SLEEPING, "the model sleeps until an administrator wakes it up", 5)
    if sequences > limits.queued_requests or prompt_tokens > limits.queued_tokens:
        return Reject(
            RejectReason.TOO_LARGE,
            f"the call asks for {sequences} answers and {prompt_tokens} prompt tokens; at most "
            f"{limits.queued_requests} and {limits.queued_tokens} may wait at once",
            0,
        )
    if shortage is not None:
        return _reject_tenant(shortage)
    if load.queued_requests + sequences > limits.queued_requests:
        return Reject(
            RejectReason.QUEUE_FULL,
            f"{load.queued_requests} requests wait already; the limit is {limits.queued_requests}",
            _retry_after(load),
        )
    if load.queued_tokens + prompt_tokens > limits.queued_tokens:
        return Reject(
            RejectReason.QUEUE_TOKENS,
            f"{load.queued_tokens} prompt tokens wait already and {prompt_tokens} more were asked for; "
            f"the limit is {limits.queued_tokens}",
            _retry_after(load),
        )
    return Forward()


def _reject_tenant(shortage: Shortage) -> Reject:
    if shortage.limit in KV_LIMITS:
        owner = "tenant" if shortage.limit is Limit.KV_TOKENS else "class"
        message = (
            f"a request of the call may hold {shortage.asked} tokens of KV memory, prompt and output, and the limit of "
            f"its {owner} is {shortage.allowed}; use a shorter prompt or a lower max_tokens"
        )
        return Reject(RejectReason.TOO_LARGE, message, 0, shortage.limit)
    bound = f"{shortage.allowed} {shortage.limit.replace('_', ' ')}"
    if shortage.seconds == math.inf:
        message = f"the call may use {shortage.asked} tokens and the tenant's limit is {bound}"
        return Reject(RejectReason.TOO_LARGE, message, 0, shortage.limit)
    message = f"the tenant's limit is {bound}: {shortage.used} used, {shortage.asked} more asked for"
    wait = 1 if shortage.seconds is None else max(1, math.ceil(shortage.seconds))
    return Reject(RejectReason.TENANT_LIMIT, message, wait, shortage.limit)


def _retry_after(load: Load) -> int:
    if load.admitted_per_second <= 0:
        return 1
    return max(1, min(MAX_RETRY_AFTER, round(load.queued_requests / load.admitted_per_second)))
