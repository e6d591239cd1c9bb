"""Checks one request against the route table and the API keys: may it use this route, and as which tenant?

The edge of the HTTP server calls it once per request, before the request's body is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from starlette.routing import compile_path

from headrace.api.auth.api_keys import Identity, Keys, Role


class Access(StrEnum):
    """The access that a route needs, once API keys are configured."""

    PUBLIC = "public"  # no key
    ANY_KEY = "any key"
    INFERENCE = "inference"
    METRICS = "metrics"
    ADMIN = "admin"


ALLOWED: Mapping[Access, frozenset[Role]] = {
    Access.PUBLIC: frozenset(Role),
    Access.ANY_KEY: frozenset(Role),
    Access.INFERENCE: frozenset({Role.INFERENCE, Role.ADMIN}),
    Access.METRICS: frozenset({Role.METRICS, Role.ADMIN}),
    Access.ADMIN: frozenset({Role.ADMIN}),
}
"""Which roles each access admits. An admin key may use every route."""


class KeyRequired(Exception):
    """The route needs an API key, and the request has none that the server knows."""


class RoleRequired(Exception):
    """The request's key is valid, but its role does not admit it to this route; `access` is what the route needs."""

    def __init__(self, access: Access) -> None:
        super().__init__(f"this route needs the access {access}")
        self.access = access


class AccessCheck:
    """The check for one port of the server: the keys, and the access that each method and path needs."""

    def __init__(self, keys: Keys, routes: Mapping[str, Access]) -> None:
        self._keys = keys
        self._exact = dict(routes)
        # Matched as the router does, so that no variant of a path reaches a route without its check.
        split = ((route.partition(" "), access) for route, access in routes.items())
        self._patterns = [(method, compile_path(path)[0], access) for (method, _, path), access in split]

    @property
    def keys_required(self) -> bool:
        """Whether a request needs a key at all."""
        return self._keys.required

    def identity(self, method: str, path: str, authorization: str | None) -> Identity | None:
        """The identity behind the request's key; None if no keys are configured, or on a public route without a key.

        Raises:
            KeyRequired: the route needs a key, and the request has none or an unknown one.
            RoleRequired: the key's role is not sufficient.
        """
        if not self._keys.required:
            return None
        access = self.access(method, path)
        identity = self._keys.identify(authorization)
        if access is Access.PUBLIC:
            return identity
        if identity is None:
            raise KeyRequired
        if identity.role not in ALLOWED[access]:
            raise RoleRequired(access)
        return identity

    def access(self, method: str, path: str) -> Access:
        """The access that a method and path need. Paths without a route need any key, and return 404 or 405."""
        method = "GET" if method == "HEAD" else method
        access = self._exact.get(f"{method} {path}")
        if access is not None:
            return access
        for each, pattern, needed in self._patterns:
            if each == method and pattern.match(path):
                return needed
        return Access.ANY_KEY


def route_path(path: str, root_path: str) -> str:
    """The part of a request's path that the router matches: without the prefix where the application is mounted."""
    if root_path and (path == root_path or path.startswith(f"{root_path.rstrip('/')}/")):
        return path[len(root_path.rstrip("/")) :]
    return path


def tenant_of(identity: Identity | None, header: str | None) -> tuple[str | None, str | None]:
    """The tenant that a request is bound to, and the one that it claims by ``X-Tenant-Id``.

    An inference key binds its requests to the key's tenant. A request without a key is bound to none, and neither is
    one with an admin key: it may act for the tenant that it names, or else for its own.
    """
    if identity is None:
        return None, header
    if identity.role is Role.ADMIN:
        return None, header or (identity.name if identity.named else None)
    return identity.name, header
