"""The current bottleneck of the server with its reason, as a pure function of a few indicators."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

IDLE_SHARE = 0.5
"""With no open request for this share of the time, the server is idle."""

GAP_SHARE = 0.3
"""With open requests but no computing step for this share of the time, the front end is the bottleneck."""

LOOP_SHARE = 0.85
"""Share of one core at which the event loop (HTTP and text) cannot keep up."""

FULL_SHARE = 0.95
"""Share of KV blocks in use at which the KV cache counts as full."""

PREEMPT_SHARE = 0.8
"""Preemptions with at least this share of KV blocks held are for lack of blocks, not for fairness."""

PREFILL_SHARE = 0.5
"""If the peaks are unknown: from this share of prefill time on, steps are bound by arithmetic, else by bandwidth."""


class Kind(StrEnum):
    """The resource that bounds the server."""

    SLOTS = "slots"
    MEMORY = "memory"
    ARITHMETIC = "arithmetic"
    BANDWIDTH = "bandwidth"
    FRONT_END = "front_end"
    IDLE = "idle"


class Signs(NamedTuple):
    """Indicators over the last seconds. Shares are 0 to 1.

    ``computing``, ``idle`` and ``gap`` divide the wall clock: steps computed, no request was open, requests were open
    but no step computed. ``loop`` is the event loop's CPU time per second. ``slots`` is the limit of running requests.
    ``blocked`` and ``preempted`` count requests that began to wait for KV blocks, and preemptions. ``prefill`` is the
    share of step time spent on prompt tokens. ``mfu`` and ``mbu`` are the utilization of peak arithmetic and bandwidth
    while steps compute (None: the peak is unknown).
    """

    running: int
    waiting: int
    slots: int
    kv: float
    computing: float
    idle: float
    gap: float
    loop: float
    blocked: int
    preempted: int
    prefill: float
    mfu: float | None = None
    mbu: float | None = None


class Bottleneck(NamedTuple):
    """A bottleneck with its reason."""

    kind: Kind
    sentence: str


def bottleneck(signs: Signs) -> Bottleneck:
    """The resource that limits the server. Queues are checked first, because their cause is certain."""
    if signs.waiting and signs.running >= signs.slots:
        return Bottleneck(
            Kind.SLOTS,
            f"All {_count(signs.slots, 'slot')} {_are(signs.slots)} in use and {_count(signs.waiting, 'request')} "
            f"{_wait(signs.waiting)}; steps compute {_percent(signs.computing)} of the time.",
        )
    preempted = signs.preempted and signs.kv >= PREEMPT_SHARE
    if preempted or (signs.waiting and (signs.blocked or signs.kv >= FULL_SHARE)):
        return Bottleneck(Kind.MEMORY, _memory(signs))
    if signs.idle >= IDLE_SHARE:
        return Bottleneck(Kind.IDLE, f"No request was open for {_percent(signs.idle)} of the last seconds.")
    if signs.loop >= LOOP_SHARE:
        return Bottleneck(
            Kind.FRONT_END,
            f"The event loop, which handles HTTP and text, uses {_percent(signs.loop)} of a core; steps compute "
            f"{_percent(signs.computing)} of the time.",
        )
    if signs.gap >= GAP_SHARE:
        return Bottleneck(
            Kind.FRONT_END,
            f"Requests were open but no step computed for {_percent(signs.gap)} of the time: HTTP, text and scheduling "
            "take longer than the model.",
        )
    return _device(signs)


def _memory(signs: Signs) -> str:
    held = f"{_percent(signs.kv)} of the KV blocks are held"
    if signs.preempted:
        return f"{held} and {_count(signs.preempted, 'request')} had to give up blocks in the last seconds."
    return f"{held} and {_count(signs.waiting, 'request')} {_wait(signs.waiting)} for blocks."


def _device(signs: Signs) -> Bottleneck:
    """The bottleneck when steps run without gaps: by utilization if peaks are known, else by the kind of rows."""
    if signs.mfu is not None and signs.mbu is not None:
        use = f"{_percent(signs.mfu)} of peak arithmetic and {_percent(signs.mbu)} of peak bandwidth"
        kind = Kind.ARITHMETIC if signs.mfu >= signs.mbu else Kind.BANDWIDTH
        return Bottleneck(kind, f"Steps compute {_percent(signs.computing)} of the time and use {use}.")
    if signs.prefill >= PREFILL_SHARE:
        return Bottleneck(
            Kind.ARITHMETIC,
            f"{_percent(signs.prefill)} of the step time is spent on prompt tokens, which share a read of the "
            f"weights; steps compute {_percent(signs.computing)} of the time.",
        )
    return Bottleneck(
        Kind.BANDWIDTH,
        f"{_percent(1 - signs.prefill)} of the step time is spent on decoding, which reads all weights for one token "
        f"of each request; steps compute {_percent(signs.computing)} of the time.",
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _wait(number: int) -> str:
    return "waits" if number == 1 else "wait"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
