"""An answer that is kept, what a look-up finds, and how long it may serve.

Kept are tokens and not text: a replay goes through the same detokenizer and the same writers as a live answer, so
one entry serves streams and documents, chat and completions alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from headrace.core.events import Layer
from headrace.core.plan import TokenLogprob
from headrace.core.request import FinishReason


class Pulse(NamedTuple):
    """So many ``tokens`` came together, ``seconds`` after the answer had begun."""

    seconds: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A whole answer, as it was computed once.

    ``reason`` is stop or length: nothing else is whole. ``prompt_tokens`` and ``seconds`` are what it cost.
    ``created``, ``expires`` and ``stale_until`` are Unix times, fixed when it is written: being asked for does not
    keep a stale answer alive, and what goes on from an older beginning is as old. ``versions`` are its tags, each with
    the number that the tag had when computing *began*: whoever clears a tag raises its number, so an answer that was
    under way then is never served.
    ``barred`` is no answer at all but the memory of a wrong one: nothing is to be kept under this key.
    """

    tokens: tuple[int, ...]
    reason: FinishReason
    prompt_tokens: int
    seconds: float
    created: float
    expires: float
    stale_until: float
    logprobs: tuple[TokenLogprob, ...] = ()
    stop_token: int | None = None
    pulses: tuple[Pulse, ...] = ()
    versions: tuple[tuple[str, int], ...] = ()
    barred: bool = False


class Hit(NamedTuple):
    """An answer without computing: ``key`` names the entry, which is another question's where ``layer`` is semantic."""

    entry: Entry
    layer: Layer
    key: bytes
    age_seconds: float
    similarity: float | None = None


class Miss(NamedTuple):
    """Nothing to serve, and why; ``near`` names the group of alike questions that a level has found (empty: none)."""

    why: str = "unknown"
    near: str = ""


class Served(NamedTuple):
    """What is remembered of an answer that went out, so that its reader can say later that it was wrong.

    ``key`` and ``beginning`` are the asker's own. ``source`` is the key of the entry that was served, or of the one
    that the computed answer has become, if it has.
    """

    tenant: str
    key: bytes
    beginning: bytes = b""
    layer: Layer | None = None
    source: bytes | None = None


class StoreFacts(NamedTuple):
    """How full a store is; None where it does not know. ``evictions`` are entries that it dropped for want of room."""

    entries: int | None
    nbytes: int | None
    evictions: int


class Freshness(StrEnum):
    """What may be done with an entry now."""

    FRESH = "fresh"
    REFRESH = "refresh"  # it serves, and a new one should be on its way
    STALE = "stale"  # it serves only those who said that they take such
    GONE = "gone"


JITTER = 0.1
"""The share of its life that an entry may lose, so that what was written together does not end together."""

SKEW_SECONDS = 60.0
"""An entry from so far in the future was written by another clock, or this one has jumped back: it is not trusted."""


def lifetime(ttl: float, key: bytes) -> float:
    """Seconds that an entry lives: ``ttl`` less up to a tenth, which the key decides; never more than asked for."""
    return ttl * (1.0 - JITTER * int.from_bytes(key[:4], "little") / 2**32)


def freshness(entry: Entry, now: float, chance: float, max_age: float | None = None) -> Freshness:
    """How ``entry`` stands at the Unix time ``now``.

    A fresh entry is renewed early with a probability that grows as its end nears and with the seconds that it took
    to compute (XFetch: Vattani, Chierichetti, Lowenstein, PVLDB 8(8), 2015), so that one caller pays and not all at
    once.

    Args:
        entry: as it was found.
        now: Unix time.
        chance: how likely a call that comes at a uniformly random moment would be this late: minus the logarithm of
            a uniform number from (0, 1].
        max_age: what the caller calls too old, in seconds.
    """
    if entry.created > now + SKEW_SECONDS or now >= entry.stale_until:
        return Freshness.GONE
    if max_age is not None and now - entry.created > max_age:
        return Freshness.GONE
    if now >= entry.expires:
        return Freshness.STALE
    return Freshness.REFRESH if now + entry.seconds * chance >= entry.expires else Freshness.FRESH
