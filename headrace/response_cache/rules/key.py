"""The cache key of a response: SHA-256 over everything that can change it, and nothing else.

It is built from the resolved `Request`, not from the body of a call, so that defaults, templates and spellings have
been settled. Every sampling parameter is part of it, so that a new one is too. A table says to which part the other
fields of a request belong. A field that is missing in it and set by a request makes the request uncacheable. Forgetting
a field costs speed, but never serves a wrong response.

Each part is written as tag, length, bytes: no value can imitate a field or run into its neighbour. The fields of the
HTTP API have kinds of their own, `api.compile.fields.Way`. The samples of an unseeded request have a key each.
"""

from __future__ import annotations

import hashlib
import math
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from functools import lru_cache

from headrace.core.request import Request, SamplingParams

FORMAT = b"headrace/answer/3"
"""The prefix of every key; a new number separates old entries from new ones."""

KEY_BYTES = 32

MAX_MEMOIZED = 256
"""Encodings are memoized for sampling parameters with at most this many numbers and characters in their lists."""


class Part(StrEnum):
    """The part of the key to which a field belongs; an ``INERT`` field cannot change a response."""

    ENGINE = "engine"
    SCOPE = "scope"
    PROMPT = "prompt"
    GENERATION = "generation"
    INERT = "inert"


REQUEST: Mapping[str, Part] = {
    "id": Part.INERT,
    "tokens": Part.PROMPT,
    "params": Part.GENERATION,
    "arrived": Part.INERT,
    "tenant": Part.SCOPE,
    "model": Part.INERT,  # a name; the fingerprint and the adapter's digest say what computes
    "service_class": Part.INERT,
    "priority": Part.INERT,
    "deadline": Part.INERT,
    "slo": Part.INERT,
    "retention": Part.INERT,
    "affinity": Part.INERT,
    "peer": Part.INERT,
    "follows": Part.INERT,
    "answered": Part.GENERATION,
    "prediction": Part.INERT,
    "cached_answer": Part.INERT,
    "indexed": Part.INERT,
    "salt": Part.SCOPE,
    "adapter": Part.ENGINE,
    "seed": Part.GENERATION,  # only if tokens are sampled: greedy answers have no seed
    "eos_token_ids": Part.GENERATION,
    "call_format": Part.GENERATION,
    "images": Part.PROMPT,
    "settings": Part.INERT,  # drafts and timeouts change no complete answer
}
"""Every field of `core.request.Request`."""

NOT_KEYED = frozenset({"seed"})
"""The sampling parameter that is not part of the key: the resolved seed of the request counts."""

_REALS = frozenset(each.name for each in fields(SamplingParams) if each.type == "float")
"""Numbers that may be given as integers: 1 and 1.0 are the same temperature."""


class Unkeyable(ValueError):
    """A request that has no key; the message names the field that prevents it."""


@dataclass(frozen=True, slots=True)
class Engine:
    """The identity of an engine, as far as it can change a response.

    ``weights`` is a digest or an exact revision. ``numerics`` names device, kernels and data type: sums in another
    order flip near-ties. ``secret`` separates servers that share a store without sharing a secret.
    """

    model: str
    weights: str
    tokenizer: str
    template: str
    numerics: str
    version: str
    max_model_len: int = 0
    secret: str = field(default="", repr=False)

    def fingerprint(self) -> bytes:
        """32 bytes, equal for engines that give the same answers."""
        parts = [FORMAT, *(_encode(getattr(self, each.name)) for each in fields(self))]
        return hashlib.sha256(b"".join(parts)).digest()


def beginning_key(
    fingerprint: bytes, request: Request, continues: bool, instead: bytes | None = None
) -> bytes:
    """The key of ``request`` and of all requests that differ only in ``max_tokens``: their answers begin alike.

    Args:
        fingerprint: of the `Engine`.
        request: with every default resolved.
        continues: whether the answer continues the prompt's text. This decides whether a leading space is kept, and
            so where a stop string matches.
        instead: replaces the prompt's tokens, to name a *set* of requests that differ only in their prompts.

    Raises:
        Unkeyable: a field that no table lists is set, or a value cannot be encoded.
    """
    _refuse_unknown(request)
    parts = [
        _scope(fingerprint, request.adapter, request.tenant, request.salt, request.eos_token_ids, continues),
        _generation(request.params),
        _tagged(b"P", _tokens(request.tokens)) if instead is None else _tagged(b"Q", instead),
    ]
    if request.params.temperature > 0:
        parts.append(_tagged(b"R", _encode(request.seed)))
    if request.answered:
        parts.append(_tagged(b"A", _tokens(request.answered)))
    if request.call_format:
        parts.append(_tagged(b"K", _encode(request.call_format)))
    if request.images:
        spans = [(span.start, span.length, span.digest) for span in request.images]
        parts.append(_tagged(b"I", _encode(spans)))
    return hashlib.sha256(b"".join(parts)).digest()


def answer_key(beginning: bytes, request: Request) -> bytes:
    """The cache key of ``request``, whose `beginning_key` is ``beginning``."""
    return hashlib.sha256(FORMAT + _tagged(b"B", beginning) + _encode(request.params.max_tokens)).digest()


def digest(*values: object) -> bytes:
    """32 bytes for a list of plain values (text, numbers, bytes, lists, mappings); no value can imitate another.

    Raises:
        Unkeyable: a value has another type, or is NaN.
    """
    return hashlib.sha256(FORMAT + _encode(values)).digest()


_GENERATION = tuple(
    each.name for each in fields(SamplingParams) if each.name not in NOT_KEYED and each.name != "max_tokens"
)
"""All but ``max_tokens``, which is the only difference between requests of one `beginning_key`."""


def _unknown_fields() -> dict[str, object]:
    """Fields of `Request` that are not in its table, with their neutral default."""
    found = {}
    for each in fields(Request):
        if each.name not in REQUEST:
            default = each.default_factory() if each.default_factory is not MISSING else each.default
            found[each.name] = default
    return found


_UNKNOWN = _unknown_fields()


def _refuse_unknown(request: Request) -> None:
    for name, default in _UNKNOWN.items():
        if getattr(request, name) != default:
            raise Unkeyable(f"{name} is not part of the cache key")


@lru_cache(maxsize=1024)
def _scope(
    fingerprint: bytes, adapter: str, tenant: str, salt: str, eos_token_ids: frozenset[int], continues: bool
) -> bytes:
    """The part that all calls of one client have in common."""
    parts = [
        FORMAT,
        _tagged(b"E", fingerprint + _encode(adapter)),
        _tagged(b"S", _encode(tenant) + _encode(salt)),
        _tagged(b"Z", _encode(sorted(eos_token_ids))),
        _tagged(b"C", b"\x01" if continues else b"\x00"),
    ]
    return b"".join(parts)


def _generation(params: SamplingParams) -> bytes:
    """The encoded sampling parameters, memoized: most calls of a client use the same ones, and encoding 20 fields is
    slower than hashing.

    Large ones are encoded each time: a table of them would exceed every memory limit.
    """
    items = len(params.logit_bias) + len(params.allowed_token_ids or ()) + len(params.stop_token_ids)
    constraint = params.structured_outputs
    items += 0 if constraint is None else len(constraint.source)
    small = items + sum(map(len, params.bad_words)) + sum(map(len, params.stop)) <= MAX_MEMOIZED
    return _memoized(params) if small else _encode_params(params)


def _encode_params(params: SamplingParams) -> bytes:
    return _tagged(b"G", b"".join([_field(params, name) for name in _GENERATION]))


_memoized = lru_cache(maxsize=1024)(_encode_params)


def _field(params: SamplingParams, name: str) -> bytes:
    value = getattr(params, name)
    if name == "logit_bias":
        return _encode([(token, float(bias)) for token, bias in value])
    if name == "structured_outputs":
        return _encode(value if value is None else value.digest)
    return _encode(float(value) if name in _REALS else value)


def _tagged(tag: bytes, content: bytes) -> bytes:
    return tag + len(content).to_bytes(8, "little") + content


def _tokens(tokens: Iterable[int]) -> bytes:
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise Unkeyable(f"token ids must be below 2**32: {error}") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _encode(value: object) -> bytes:
    """One value with its type and length; floats as their 64 bits, with a single zero."""
    match value:
        case None:
            return b"n"
        case bool():
            return b"t" if value else b"f"
        case int():
            return _tagged(b"i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
        case float():
            if math.isnan(value):
                raise Unkeyable("a value is NaN")
            return b"d" + struct.pack("<d", value + 0.0)
        case str():
            return _tagged(b"s", value.encode("utf-8", "surrogatepass"))
        case bytes():
            return _tagged(b"b", value)
        case tuple() | list():
            return _tagged(b"l", b"".join([_encode(each) for each in value]))
        case Mapping():
            pairs = sorted((_encode(name), _encode(each)) for name, each in value.items())
            return _tagged(b"m", b"".join([part for pair in pairs for part in pair]))
    raise Unkeyable(f"a {type(value).__name__} cannot be part of a key")


def slot_key(key: bytes, slot: int) -> bytes:
    """The key of sample number ``slot`` of the request with ``key``."""
    return hashlib.sha256(b"headrace/sample" + key + slot.to_bytes(4, "little")).digest()


def slot_served(seed: int, samples: int) -> int:
    """Which of ``samples`` to serve: uniform over seeds. The responses of one call differ, because their seeds are
    consecutive.
    """
    return seed % samples
