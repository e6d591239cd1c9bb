"""Names of entries in a shared store that may lose any of its data, including invalidations.

Redis and Memcached store the versions of tags under separate keys. If they lost these and not the entries, invalidated
responses would be served again. Therefore every name begins with a random generation that is stored *with* the
versions: when the versions are lost, a new generation begins and no older entry can be found.
"""

from __future__ import annotations

import secrets

PREFIX = "headrace:2:"
"""Prefix of every name; its number changes with the format of entries."""

VERSIONS = f"{PREFIX}versions"
GENERATION = "#generation"
"""The field of the generation among the versions. No tag begins with this character."""


def new_generation() -> str:
    """A new, unique generation."""
    return secrets.token_hex(8)


def entry_name(generation: str, key: bytes) -> str:
    """The name of the entry of ``key``."""
    return f"{PREFIX}{generation}:{key.hex()}"
