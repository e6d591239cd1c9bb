"""Names in a store that may forget anything, also what has been cleared.

Redis and Memcached keep each tag's version under a key of their own. If they lost that and kept the entries, cleared
answers would be served again. So every name begins with a random generation that is kept *with* the versions: when
they are gone a new generation begins, and no older entry can be found.
"""

from __future__ import annotations

import secrets

PREFIX = "headrace:1:"
"""Begins every name; another number parts the old entries from the new."""

VERSIONS = f"{PREFIX}versions"
GENERATION = "#generation"
"""Stands beside the tags' versions. No tag begins so."""


def new_generation() -> str:
    """A generation that never was."""
    return secrets.token_hex(8)


def entry_name(generation: str, key: bytes) -> str:
    """Where the entry of ``key`` lies."""
    return f"{PREFIX}{generation}:{key.hex()}"
