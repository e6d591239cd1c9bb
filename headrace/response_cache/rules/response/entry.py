"""A cached response, the result of a lookup, and how long an entry may be served.

Tokens are stored, not text. A replay passes through the same detokenizer and the same writers as a live response, so
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
    """A chunk of the response: ``tokens`` tokens, emitted ``seconds`` after the first computation."""

    seconds: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A complete response, as it was computed once.

    ``reason`` is stop or length: other ends are not complete. ``prompt_tokens`` and ``seconds`` are its cost.
    ``created``, ``expires`` and ``stale_until`` are Unix times, fixed when it is written. A lookup does not extend
    them, and a response that resumes an older partial answer has that answer's times. ``versions`` are its tags, each
    with the version of the tag when computing *began*. Invalidating a tag raises its version, so a response computed
    during an invalidation is never served. ``barred`` is a marker instead of a response: a wrong response was
    reported, and nothing may be stored under this key.
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
    """A cache hit. ``key`` names the entry, which belongs to another, similar request if ``layer`` is semantic."""

    entry: Entry
    layer: Layer
    key: bytes
    age_seconds: float
    similarity: float | None = None


class Miss(NamedTuple):
    """A cache miss, and why; ``near`` names the group of similar requests that a level has found (empty: none).

    ``draft`` is a cached answer that may not be served, but is probably right.
    """

    why: str = "unknown"
    near: str = ""
    draft: tuple[int, ...] = ()


class Served(NamedTuple):
    """A record of a served response, so that its client can report later that it was wrong.

    ``key`` and ``beginning`` belong to the request. ``source`` is the key of the entry that was served, or of the
    entry written for the computed response, if any.
    """

    tenant: str
    key: bytes
    beginning: bytes = b""
    layer: Layer | None = None
    source: bytes | None = None


class Freshness(StrEnum):
    """What may be done with an entry now."""

    FRESH = "fresh"
    REFRESH = "refresh"  # served, and computed again in the background
    STALE = "stale"  # served only to requests that accept stale responses
    GONE = "gone"


JITTER = 0.1
"""The largest share of its lifetime that an entry may lose, so that entries written together do not expire together."""

SKEW_SECONDS = 60.0
"""An entry from further in the future than this is ignored: another clock wrote it, or this clock has jumped back."""


def lifetime(ttl: float, key: bytes) -> float:
    """The lifetime of an entry in seconds: ``ttl`` minus up to a tenth, chosen by the key; never more than ``ttl``."""
    return ttl * (1.0 - JITTER * int.from_bytes(key[:4], "little") / 2**32)


def freshness(entry: Entry, now: float, chance: float, max_age: float | None = None) -> Freshness:
    """The freshness of ``entry`` at the Unix time ``now``.

    A fresh entry is refreshed early with a probability that grows as its expiry approaches and with its computing
    time. So one request pays for the refresh, not all at once (XFetch: Vattani, Chierichetti, Lowenstein, PVLDB 8(8),
    2015).

    Args:
        entry: the entry found.
        now: Unix time.
        chance: minus the logarithm of a uniform random number from (0, 1].
        max_age: the maximum age that the client accepts, in seconds.
    """
    if entry.created > now + SKEW_SECONDS or now >= entry.stale_until:
        return Freshness.GONE
    if max_age is not None and now - entry.created > max_age:
        return Freshness.GONE
    if now >= entry.expires:
        return Freshness.STALE
    return Freshness.REFRESH if now + entry.seconds * chance >= entry.expires else Freshness.FRESH
