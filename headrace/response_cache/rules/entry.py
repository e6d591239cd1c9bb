"""A cached response, how long it may be served, and its bytes: one versioned layout for every store.

Tokens are stored, not text. A replay passes through the same detokenizer and the same writers as a live response, so
one entry serves streams and documents, chat and completions alike.

``magic | key | fixed fields | tags | tokens | pulses | log-probabilities | checksum``, all little-endian. A value
that was truncated, changed, written under another key or by another version is rejected. Reading never executes
anything. If other programs can write to a store, `Seal` adds a MAC that binds the value to its key.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import sys
import zlib
from array import array
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from headrace.core.events import Layer
from headrace.core.plan import TokenLogprob
from headrace.core.request import FinishReason
from headrace.response_cache.rules.key import KEY_BYTES


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
    """A cache hit. ``key`` names the entry, which belongs to another, similar request if ``layer`` is semantic.

    ``certificate`` says which certificate of the semantic cache it is served by.
    """

    entry: Entry
    layer: Layer
    key: bytes
    age_seconds: float
    similarity: float | None = None
    certificate: str = ""


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


# -- bytes -----------------------------------------------------------------------------------------


MAGIC = b"HRA\x01"
"""The last byte is the version of the layout."""

_FIXED = struct.Struct(
    "<BqIddddIIII"
)  # flags, stop token, prompt, seconds, created, expires, stale, four counts
_PULSE = struct.Struct("<fI")
_SCORE = struct.Struct("<dII")
_ALTERNATIVE = struct.Struct("<Id")
_CHECK = struct.Struct("<I")
_LENGTH, _BARRED = 1, 2
_NO_STOP = -1
_MAC_BYTES = 32


class Damaged(ValueError):
    """Bytes that are not a valid entry, or not the entry of this key."""


def pack(key: bytes, entry: Entry) -> bytes:
    """The bytes to store under ``key``."""
    flags = _LENGTH * (entry.reason is FinishReason.LENGTH) | _BARRED * entry.barred
    tags = b"".join([_tag(name, version) for name, version in entry.versions])
    fixed = _FIXED.pack(
        flags,
        _NO_STOP if entry.stop_token is None else entry.stop_token,
        entry.prompt_tokens,
        entry.seconds,
        entry.created,
        entry.expires,
        entry.stale_until,
        len(tags),
        len(entry.tokens),
        len(entry.pulses),
        len(entry.logprobs),
    )
    pulses = b"".join([_PULSE.pack(*pulse) for pulse in entry.pulses])
    scores = b"".join([_score(score) for score in entry.logprobs])
    body = b"".join((MAGIC, key, fixed, tags, _numbers(entry.tokens), pulses, scores))
    return body + _CHECK.pack(zlib.crc32(body))


def unpack(key: bytes, value: bytes) -> Entry:
    """The entry that `pack` wrote under ``key``.

    Raises:
        Damaged: the bytes are not such an entry.
    """
    head = len(MAGIC) + KEY_BYTES
    if len(value) < head + _FIXED.size + _CHECK.size or not value.startswith(MAGIC):
        raise Damaged("not an entry of this version")
    if _CHECK.unpack_from(value, len(value) - _CHECK.size)[0] != zlib.crc32(value[: -_CHECK.size]):
        raise Damaged("the checksum does not match")
    if value[len(MAGIC) : head] != key:
        raise Damaged("the entry belongs to another key")
    try:
        return _unpack(value, head)
    except (struct.error, ValueError) as error:  # written by another program, or the checksum fits by chance
        raise Damaged(str(error)) from None


def _unpack(value: bytes, at: int) -> Entry:
    flags, stop, prompt, seconds, created, expires, stale, *counts = _FIXED.unpack_from(value, at)
    tag_bytes, tokens, pulses, scores = counts
    at += _FIXED.size
    versions = _tags(value[at : at + tag_bytes])
    at += tag_bytes
    listed = array("I", value[at : at + 4 * tokens])
    if sys.byteorder == "big":
        listed.byteswap()
    at += 4 * tokens
    beats = tuple(map(Pulse._make, _PULSE.iter_unpack(value[at : at + _PULSE.size * pulses])))
    at += _PULSE.size * pulses
    logprobs, at = _scores(value, at, scores)
    if at != len(value) - _CHECK.size or len(listed) != tokens:
        raise Damaged("the lengths of its parts do not match")
    return Entry(
        tokens=tuple(listed),
        reason=FinishReason.LENGTH if flags & _LENGTH else FinishReason.STOP,
        prompt_tokens=prompt,
        seconds=seconds,
        created=created,
        expires=expires,
        stale_until=stale,
        logprobs=logprobs,
        stop_token=None if stop == _NO_STOP else stop,
        pulses=beats,
        versions=versions,
        barred=bool(flags & _BARRED),
    )


class Seal:
    """Authenticates values in a store that other programs can write to: HMAC-SHA-256 over the key and the value.

    ``secret`` is shared by the servers that share the store.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def close(self, key: bytes, value: bytes) -> bytes:
        """``value`` with its MAC in front."""
        return self._mac(key, value) + value

    def open(self, key: bytes, sealed: bytes) -> bytes:
        """Check the MAC and return the value.

        Raises:
            Damaged: no server with this secret wrote it under this key.
        """
        value = sealed[_MAC_BYTES:]
        if not hmac.compare_digest(sealed[:_MAC_BYTES], self._mac(key, value)):
            raise Damaged("not written by a server that knows the secret")
        return value

    def _mac(self, key: bytes, value: bytes) -> bytes:
        return hmac.digest(self._secret, len(key).to_bytes(4, "little") + key + value, hashlib.sha256)


def _numbers(values: tuple[int, ...]) -> bytes:
    listed = array("I", values)
    if sys.byteorder == "big":
        listed.byteswap()
    return listed.tobytes()


def _tag(name: str, version: int) -> bytes:
    spelt = name.encode("utf-8", "surrogatepass")
    return struct.pack("<QI", version, len(spelt)) + spelt


def _tags(raw: bytes) -> tuple[tuple[str, int], ...]:
    found = []
    at = 0
    while at < len(raw):
        version, length = struct.unpack_from("<QI", raw, at)
        at += 12 + length
        found.append((raw[at - length : at].decode("utf-8", "surrogatepass"), version))
    return tuple(found)


def _score(score: TokenLogprob) -> bytes:
    head = struct.pack("<I", score.token) + _SCORE.pack(score.logprob, score.rank, len(score.top))
    return head + b"".join([_ALTERNATIVE.pack(*each) for each in score.top])


def _scores(value: bytes, at: int, count: int) -> tuple[tuple[TokenLogprob, ...], int]:
    found = []
    for _ in range(count):
        (token,) = struct.unpack_from("<I", value, at)
        logprob, rank, alternatives = _SCORE.unpack_from(value, at + 4)
        at += 4 + _SCORE.size
        end = at + _ALTERNATIVE.size * alternatives
        top = tuple(_ALTERNATIVE.iter_unpack(value[at:end]))
        at = end
        found.append(TokenLogprob(token, logprob, rank, top))
    return tuple(found), at
