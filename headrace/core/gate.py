"""Whether the server takes a request on: a pure decision before anything is queued."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class RejectReason(StrEnum):
    """Why the server does not take a request on."""

    QUEUE_FULL = "queue_full"
    QUEUE_TOKENS = "queue_tokens"
    DRAINING = "draining"
    TOO_LARGE = "too_large"


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what may wait at once, in sequences and in prompt tokens."""

    queued_requests: int
    queued_tokens: int


class Load(NamedTuple):
    """What waits now, and how quickly the queue has moved lately (sequences per second; 0 unknown)."""

    queued_requests: int
    queued_tokens: int
    admitted_per_second: float
    draining: bool


class Forward(NamedTuple):
    """Hand the request to the engine."""


class Reject(NamedTuple):
    """Turn it away; it may come again after ``retry_after`` seconds, unless it is too large for any time."""

    reason: RejectReason
    message: str
    retry_after: int


MAX_RETRY_AFTER = 60


def decide(load: Load, sequences: int, prompt_tokens: int, limits: Limits) -> Forward | Reject:
    """Admit ``sequences`` with ``prompt_tokens`` in all, or say why not and when to come again."""
    if load.draining:
        return Reject(RejectReason.DRAINING, "the server is shutting down", 5)
    if sequences > limits.queued_requests or prompt_tokens > limits.queued_tokens:
        return Reject(
            RejectReason.TOO_LARGE,
            f"the call asks for {sequences} answers and {prompt_tokens} prompt tokens; at most "
            f"{limits.queued_requests} and {limits.queued_tokens} may wait at once",
            0,
        )
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


def _retry_after(load: Load) -> int:
    if load.admitted_per_second <= 0:
        return 1
    return max(1, min(MAX_RETRY_AFTER, round(load.queued_requests / load.admitted_per_second)))
