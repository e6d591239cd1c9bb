"""Content keys of blocks: a SHA-256 chain over salt, adapter and all tokens so far.

Where an image stands, the key of a block covers the image's digest and offset in place of a token (`core.images`).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from headrace.core.images import encoded


def root_key(salt: str, adapter: str) -> bytes:
    """The key before the first block: requests with different salt or adapter share no key below it."""
    parts = (salt.encode(), adapter.encode())
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()


_SHA256 = hashlib.sha256()
"""Copied for each key, which is faster than creating a new one."""


def chained_key(parent: bytes, contents: Sequence[int]) -> bytes:
    """The key of a full block: SHA-256 over the parent's key and the block's contents."""
    return chained_keys(parent, contents, len(contents))[0]


def chained_keys(parent: bytes, contents: Sequence[int], block_size: int) -> list[bytes]:
    """The keys of all full blocks of ``contents`` (`core.images.contents`), each the parent of the next."""
    keys, start = list[bytes](), _SHA256.copy
    try:
        packed, width = array("q", contents).tobytes(), 8 * block_size
    except OverflowError:  # positions of images
        for at in range(0, len(contents) - block_size + 1, block_size):
            sha = start()
            sha.update(parent + encoded(contents[at : at + block_size]))
            parent = sha.digest()
            keys.append(parent)
        return keys
    for at in range(0, len(packed) - width + 1, width):
        sha = start()
        sha.update(parent + packed[at : at + width])
        parent = sha.digest()
        keys.append(parent)
    return keys
