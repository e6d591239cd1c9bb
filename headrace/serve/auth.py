"""Who calls: API keys in, a tenant's name out.

It knows keys and header values, no routes and no sockets. Next on the road: a key may carry its tenant's
quota and priority.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

ANONYMOUS = "default"
"""The tenant of a caller who says nothing of himself."""


class Keys:
    """The API keys that open the server; with none, it is open to all.

    Only digests are kept, so that neither a log nor an error can show a key.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple({_digest(key) for key in keys})

    @property
    def required(self) -> bool:
        return bool(self._digests)

    def key_id(self, authorization: str | None) -> str | None:
        """The public id of the key in an ``Authorization: Bearer`` header; None if it opens nothing.

        Every key is compared, each in constant time: how long it takes tells nothing of how near a guess was.
        """
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return f"key-{digest.hex()[:12]}" if any(matches) else None


def read_keys(api_keys: Iterable[str], api_key_file: str | None) -> list[str]:
    """Keys given one by one and those of a file: one a line, empty lines and ``#`` comments left out.

    Raises:
        ValueError: the file cannot be read or holds no key, or a key is empty or no HTTP header could carry it.
    """
    keys = [key.strip() for key in api_keys]
    if not all(keys):
        raise ValueError("--api-key must not be empty")
    if api_key_file is not None:
        try:
            lines = Path(api_key_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--api-key-file {api_key_file} cannot be read: {error}") from error
        found = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not found:
            raise ValueError(f"--api-key-file {api_key_file} holds no key")
        keys += found
    if not all(key.isascii() and key.isprintable() for key in keys):
        raise ValueError("--api-key: a key must be printable ASCII, or no client could send it")
    return keys


def tenant(key_id: str | None, header: str | None, user: str | None) -> str:
    """Whose request it is: the key's id, else ``X-Tenant-Id``, else the field ``user``, else ``default``."""
    return key_id or header or user or ANONYMOUS


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
