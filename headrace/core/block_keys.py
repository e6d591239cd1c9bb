"""Content keys of blocks: a SHA-256 chain over salt, adapter and all tokens so far."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


def root_key(salt: str, adapter: str) -> bytes:
    """The key before the first block: requests with different salt or adapter share no key below it."""
    parts = (salt.encode(), adapter.encode())
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()


_SHA256 = hashlib.sha256()
"""Copied for each key, which is faster than creating a new one."""


def chained_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a full block: SHA-256 over the parent's key and the block's tokens."""
    return chained_keys(parent, tokens, len(tokens))[0]


def chained_keys(parent: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """The keys of all full blocks of ``tokens``, each the parent of the next."""
    packed, width = array("q", tokens).tobytes(), 8 * block_size
    keys, start = [], _SHA256.copy
    for at in range(0, len(packed) - width + 1, width):
        sha = start()
        sha.update(parent + packed[at : at + width])
        parent = sha.digest()
        keys.append(parent)
    return keys
