"""Keyed hashes of tokens: they reveal only which prefixes are equal.

The fingerprint of a token hashes the token and everything before it (salt and adapter first) with a random key, which
is never written. Two prompts have equal fingerprints exactly for their common prefix. It is per token, because the
prefix cache also copies parts of blocks. Without the key, a guessed prompt cannot be verified.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence

from headrace.core.block_keys import root_key
from headrace.core.request import Request

SIZE = 3
"""Bytes of a fingerprint; different tokens after the same prefix collide with a probability of 1 in 16 million."""

STOP = 0
"""The fingerprint of every token that ends an output; no other fingerprint is 0."""


def written(fingerprints: Iterable[int]) -> str:
    """Encode fingerprints as text, four characters each."""
    return base64.b64encode(b"".join(value.to_bytes(SIZE, "big") for value in fingerprints)).decode()


def read(text: str) -> tuple[int, ...]:
    """Decode the text of `written`.

    Raises:
        ValueError: the text is not a list of fingerprints.
    """
    raw = base64.b64decode(text, validate=True)
    if len(raw) % SIZE:
        raise ValueError(f"{len(raw)} bytes are not a whole number of fingerprints")
    return tuple(int.from_bytes(raw[i : i + SIZE], "big") for i in range(0, len(raw), SIZE))


class _Chain:
    """The running hash of one request, and the tokens that end its output."""

    __slots__ = ("hash", "holders", "stops")

    def __init__(self, request: Request, key: bytes) -> None:
        self.hash = hashlib.blake2b(root_key(request.salt, request.adapter), digest_size=SIZE, key=key)
        self.stops = frozenset(request.params.stop_token_ids)
        if not request.params.ignore_eos:
            self.stops |= request.eos_token_ids
        self.holders = 0

    def extend(self, tokens: Iterable[int], stops: frozenset[int] = frozenset()) -> tuple[int, ...]:
        values = []
        for token in tokens:
            self.hash.update(token.to_bytes(8, "little"))
            value = int.from_bytes(self.hash.digest(), "big") or 1
            values.append(STOP if token in stops else value)
        return tuple(values)


class Fingerprints:
    """The fingerprints of all open requests of one engine; ``key`` is the secret of the recording, up to 64 bytes."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._chains: dict[str, _Chain] = {}

    def begin(self, request: Request) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Fingerprints of a new request's prompt, and of output tokens that it was submitted with.

        A second request with the same id changes nothing, since the engine rejects it.
        """
        chain = _Chain(request, self._key)
        shown = chain.extend(request.tokens), chain.extend(request.answered, chain.stops)
        self._chains.setdefault(request.id, chain).holders += 1
        return shown

    def answer(self, request_id: str, tokens: Iterable[int]) -> tuple[int, ...]:
        """Fingerprints of the next output tokens; a token that ends the output is `STOP`."""
        chain = self._chains[request_id]
        return chain.extend(tokens, chain.stops)

    def first_end(self, request_id: str, tokens: Sequence[int]) -> int | None:
        """Index of the first of ``tokens`` that ends the output; None if none does."""
        stops = self._chains[request_id].stops
        return next((place for place, token in enumerate(tokens) if token in stops), None)

    def group(self, name: str) -> str:
        """A keyed hash of the name of a request group, which a client chose; empty for no group."""
        return hashlib.blake2b(name.encode(), digest_size=8, key=self._key).hexdigest() if name else ""

    def end(self, request_id: str) -> None:
        """Forget a finished request."""
        chain = self._chains[request_id]
        chain.holders -= 1
        if not chain.holders:
            del self._chains[request_id]
