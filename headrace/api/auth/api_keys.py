"""API keys: reads them from options and files, again when a file changes, and finds the tenant and the role of a key.

It handles keys and header values, not routes. Limits and weights of tenants are in `core.tenancy.tenants`.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from headrace.service.file_watch import POLL_SECONDS, FileWatch

logger = logging.getLogger(__name__)

ANONYMOUS = "default"
"""The tenant of a request without one."""

NO_TENANT = "-"
"""In the tenant column of a key file: the key has a role but names no tenant."""


class Role(StrEnum):
    """The role of an API key."""

    INFERENCE = "inference"
    METRICS = "metrics"
    ADMIN = "admin"


class Grant(NamedTuple):
    """The configuration of a key: its tenant (None: the key is its own tenant) and its role."""

    tenant: str | None = None
    role: Role = Role.INFERENCE


class Identity(NamedTuple):
    """A checked key: its tenant's name or its public id, and its role.

    ``named``: the configuration names the tenant.
    """

    name: str
    role: Role
    named: bool = False


class Keys:
    """The API keys that the server accepts; with none, every request is accepted.

    Only digests are stored, so that neither a log line nor an error message can show a key. `replace` swaps all keys at
    once, while requests are being served.
    """

    def __init__(self, keys: Mapping[str, Grant]) -> None:
        self._identities = _identities(keys)

    @property
    def required(self) -> bool:
        """Whether requests need a key."""
        return bool(self._identities)

    def replace(self, keys: Mapping[str, Grant]) -> None:
        """Accept only these keys from now on. Requests that have already been accepted continue."""
        self._identities = _identities(keys)

    def count(self) -> Counter[Role]:
        """The number of keys of each role."""
        return Counter(identity.role for identity in self._identities.values())

    def identify(self, authorization: str | None) -> Identity | None:
        """The identity of the key in an ``Authorization: Bearer`` header; None if there is no such key.

        The key is compared with every known one in constant time, so that the duration does not reveal how close a
        guess was.
        """
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        digest, identities = _digest(key.strip()), self._identities
        matches = [hmac.compare_digest(digest, known) for known in identities]
        return identities[digest] if any(matches) else None


def read_keys(
    api_keys: Iterable[str],
    api_key_file: str | None,
    *,
    admin_keys: Iterable[str] = (),
    metrics_keys: Iterable[str] = (),
) -> dict[str, Grant]:
    """The keys given as options and those of a file, each with its tenant and role.

    A line of the file is ``KEY [TENANT [ROLE]]``, separated by spaces. ``-`` as tenant means none; the role is
    ``inference`` (default), ``metrics`` or ``admin``. Several keys may have one tenant. Empty lines and lines that
    begin with ``#`` are ignored.

    Raises:
        ValueError: the file cannot be read, contains no key or a wrong line; a key is empty, cannot be sent in an HTTP
            header, or has two roles; or only metrics keys are configured. The message never contains a key.
    """
    keys: dict[str, Grant] = {}
    for option, given, role in (
        ("--api-key", api_keys, Role.INFERENCE),
        ("--admin-key", admin_keys, Role.ADMIN),
        ("--metrics-key", metrics_keys, Role.METRICS),
    ):
        for key in given:
            _add(keys, key.strip(), Grant(None, role), option)
    if api_key_file is not None:
        for key, grant in _read_file(api_key_file):
            _add(keys, key, grant, f"--api-key-file {api_key_file}")
    if keys and all(grant.role is Role.METRICS for grant in keys.values()):
        raise ValueError(
            "only metrics keys are configured, so no client could send requests: add --api-key or --admin-key"
        )
    return keys


class KeyFile:
    """Reads the API key file again when it changes, so that keys can be rotated without a restart.

    If the file cannot be used, the previous keys stay valid and the error is logged once. Running streams continue.
    Owns the server's `keys`; ``read`` returns all keys, those of ``file`` and of options.

    Its ``watch`` reads a changed file again; `reload` reads it at once.

    Raises:
        ValueError: the keys cannot be used, see `read_keys`.
    """

    def __init__(
        self,
        read: Callable[[], Mapping[str, Grant]],
        file: str | None,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        self._read = read
        self.watch = FileWatch([] if file is None else [file], self.reload, poll_seconds)
        self.keys = Keys(read())

    def reload(self) -> bool:
        """Read the keys now; return whether they are valid. If not, the error is logged and the old keys stay valid."""
        self.watch.reading()
        try:
            keys = self._read()
        except ValueError as error:
            logger.warning("API keys not reloaded, the previous keys stay valid: %s", error)
            return False
        self.keys.replace(keys)
        counts = self.keys.count()
        logger.info("API keys reloaded: %s", ", ".join(f"{counts[role]} {role}" for role in Role))
        return True


def _add(keys: dict[str, Grant], key: str, grant: Grant, source: str) -> None:
    if not key:
        raise ValueError(f"{source} must not be empty")
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"{source}: a key must be printable ASCII, or no client could send it")
    if key in keys and keys[key].role is not grant.role:
        raise ValueError(f"{source}: a key is configured with two roles, {keys[key].role} and {grant.role}")
    keys[key] = grant


def _read_file(file: str) -> list[tuple[str, Grant]]:
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"--api-key-file {file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ValueError(f"--api-key-file {file} cannot be read: it is not UTF-8 text") from None
    numbered = [(number, line.split()) for number, line in enumerate(lines, 1)]
    found = [_grant(file, number, words) for number, words in numbered if words and words[0][0] != "#"]
    if not found:
        raise ValueError(f"--api-key-file {file} contains no key")
    return found


def _grant(file: str, number: int, words: list[str]) -> tuple[str, Grant]:
    key, *columns = words
    where = f"--api-key-file {file}, line {number}"
    if len(columns) > 2:
        raise ValueError(f"{where}: expected KEY [TENANT [ROLE]], got {len(words)} columns")
    tenant = columns[0] if columns else NO_TENANT
    role = columns[1] if len(columns) == 2 else Role.INFERENCE
    if not _TENANT.fullmatch(tenant):
        raise ValueError(f"{where}: a tenant's name must be 1 to 128 printable ASCII characters")
    if role not in tuple(Role):
        raise ValueError(f"{where}: the role must be one of {', '.join(Role)}")
    return key, Grant(None if tenant == NO_TENANT else tenant, Role(role))


_TENANT = re.compile(r"[\x21-\x7e]{1,128}")


def tenant(key_id: str | None, header: str | None, user: str | None) -> str:
    """A request's tenant: the key's tenant or id, else ``X-Tenant-Id``, else the field ``user``, else ``default``."""
    return key_id or header or user or ANONYMOUS


def _identities(keys: Mapping[str, Grant]) -> dict[bytes, Identity]:
    identities = {}
    for key, grant in keys.items():
        digest = _digest(key)
        name = grant.tenant or f"key-{digest.hex()[:12]}"
        identities[digest] = Identity(name, grant.role, named=grant.tenant is not None)
    return identities


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
