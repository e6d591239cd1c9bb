"""Who calls: API keys in, a tenant's name out.

It knows keys and header values, no routes and no sockets. What a tenant may do is in `core.tenancy.tenants`.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

ANONYMOUS = "default"
"""The tenant of a caller who says nothing of himself."""


class Keys:
    """The API keys that open the server; with none, it is open to all.

    ``keys`` are keys and whom they belong to (None: nobody named, so each is a tenant of its own). Only digests are
    kept, so that neither a log nor an error can show a key.
    """

    def __init__(self, keys: Mapping[str, str | None]) -> None:
        self._ids = {_digest(key): owner or f"key-{_digest(key).hex()[:12]}" for key, owner in keys.items()}

    @property
    def required(self) -> bool:
        return bool(self._ids)

    def key_id(self, authorization: str | None) -> str | None:
        """Whom the key in an ``Authorization: Bearer`` header belongs to, or its public id; None if it opens nothing.

        Every key is compared, each in constant time: how long it takes tells nothing of how near a guess was.
        """
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._ids]
        return self._ids[digest] if any(matches) else None


def read_keys(api_keys: Iterable[str], api_key_file: str | None) -> dict[str, str | None]:
    """Keys given one by one and those of a file, each with its tenant where the file names one.

    A line of the file is a key, and after a space the tenant that it belongs to; several keys may have the same one.
    Empty lines and ``#`` comments are left out.

    Raises:
        ValueError: the file cannot be read, holds no key or a line that is not understood, or a key is empty or no HTTP
            header could carry it.
    """
    keys: dict[str, str | None] = {key.strip(): None for key in api_keys}
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
        keys |= dict(_key_line(api_key_file, line) for line in found)
    if not all(key.isascii() and key.isprintable() for key in keys):
        raise ValueError("--api-key: a key must be printable ASCII, or no client could send it")
    return keys


def _key_line(file: str, line: str) -> tuple[str, str | None]:
    key, *owner = line.split()
    if len(owner) > 1 or not all(_TENANT.fullmatch(name) for name in owner):
        raise ValueError(
            f"--api-key-file {file}: a line is a key and at most one tenant of 1 to 128 printable characters"
        )
    return key, owner[0] if owner else None


_TENANT = re.compile(r"[\x21-\x7e]{1,128}")


def tenant(key_id: str | None, header: str | None, user: str | None) -> str:
    """Whose request it is: the key's tenant or id, else ``X-Tenant-Id``, else the field ``user``, else ``default``."""
    return key_id or header or user or ANONYMOUS


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
