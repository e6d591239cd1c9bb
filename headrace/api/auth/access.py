"""Checks one request before its body is read: by the route table and the API keys, and by its host and origin.

May the request use this route, and as which tenant? The edge of the HTTP server asks once per request. Which host
does it name, and which web page sent it? No page on the Internet shall drive the server. A browser on the same
machine or network sends whatever a page tells it to. Three facts about it cannot be forged by the page: `Host` is the
name that the page used, `Origin` is where the page came from, `Sec-Fetch-Site` is their relation.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from urllib.parse import urlsplit

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


DEFAULT_PORTS = {"http": 80, "https": 443}
SAFE_SITES = frozenset({"same-origin", "none"})
"""Values of ``Sec-Fetch-Site``: a page of this server, or the user."""

ANY = "*"

KNOWN_NAMES = 64
"""Names of hosts that are known to be addresses, or none: clients use the same ones again and again."""


class HostRefused(Exception):
    """The request names a host that is not this server's."""


class OriginRefused(Exception):
    """The request was sent by a page of another origin; the argument names it."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """The names under which the server may be called: ``allowed`` with ``*.domain`` for all names below it, or ``*``.

    IP addresses and ``localhost`` are always allowed: a page cannot make them lead elsewhere. ``bound`` is the name of
    the loopback address on which the server listens; empty if other machines reach it. Without ``allowed``, other names
    are refused only on a loopback address: elsewhere (containers, proxies) the server cannot know its names.
    """

    allowed: Sequence[str] = ()
    bound: str = ""

    def check(self, host: str | None, keys_required: bool) -> None:
        """Raise `HostRefused` for a ``Host`` that is not allowed. Keys protect a server whose names are not given."""
        if not self.allowed and (keys_required or not self.bound):
            return
        if host is None or ANY in self.allowed:  # a request without Host comes from no browser
            return
        name = _split(host)[0]
        if name == "localhost" or name.endswith(".localhost") or _is_address(name):
            return
        if not any(_matches(name, each.lower().rstrip(".")) for each in (self.bound, *self.allowed)):
            raise HostRefused(host)


class OriginCheck:
    """The check for one port: the ``origins`` whose pages may call it, and its ``hosts``."""

    def __init__(self, origins: Iterable[str] = (), hosts: Hosts = Hosts()) -> None:
        self._origins = {plain_origin(each) for each in origins}
        self._hosts = hosts

    def check(self, method: str, headers: Mapping[str, str], keys_required: bool) -> None:
        """Check the headers of a request; their names are in lower case.

        Raises:
            HostRefused: it names a host that is not allowed.
            OriginRefused: a page of another origin sent it, and is not allowed to. A link to a page of the server is.
        """
        host = headers.get("host")
        self._hosts.check(host, keys_required)
        if ANY in self._origins:
            return
        origin = headers.get("origin")
        if origin is not None:
            given = plain_origin(origin)
            forwarded = headers.get("x-forwarded-host", "").split(
                ","
            )  # pages cannot set it without a preflight
            own = any(_same(given, each.strip()) for each in (host, *forwarded) if each)
            if not own and given not in self._origins:
                raise OriginRefused(origin)
        elif headers.get("sec-fetch-site", "none").lower() not in SAFE_SITES and not _is_link(
            method, headers
        ):
            raise OriginRefused(f"a page of another site (Sec-Fetch-Site: {headers['sec-fetch-site']})")


def _is_link(method: str, headers: Mapping[str, str]) -> bool:
    """Whether the browser opens a document in a tab, which the page with the link cannot read."""
    return (
        method in ("GET", "HEAD")
        and headers.get("sec-fetch-mode") == "navigate"
        and headers.get("sec-fetch-dest") == "document"
    )


def plain_origin(text: str) -> str:
    """An origin as browsers write it: lower case, without a default port, a trailing dot or a slash."""
    scheme, mark, host = text.strip().lower().rstrip("/").partition("://")
    if not mark:
        return scheme
    name, port = _split(host)
    name = f"[{name}]" if ":" in name else name
    suffix = "" if port is None or port == str(DEFAULT_PORTS.get(scheme)) else f":{port}"
    return f"{scheme}://{name}{suffix}"


def _same(origin: str, host: str) -> bool:
    """Whether an origin is that of a ``Host``. Its scheme is the client's, which a proxy with TLS may have changed."""
    scheme, mark, _ = origin.partition("://")
    return bool(mark) and scheme in DEFAULT_PORTS and origin == plain_origin(f"{scheme}://{host}")


def _split(host: str) -> tuple[str, str | None]:
    """The name and the port of a host, the name in lower case without brackets and without a trailing dot."""
    host = host.strip().lower()
    if host.startswith("["):
        name, _, port = host[1:].partition("]")
        return name, port.removeprefix(":") or None
    name, _, port = host.partition(":")
    return name.removesuffix("."), port or None


@lru_cache(KNOWN_NAMES)
def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def _matches(name: str, allowed: str) -> bool:
    """Whether a name is ``allowed``, or below it if that is ``*.domain``."""
    if allowed.startswith("*."):
        return name.endswith(allowed[1:])
    return name == allowed


def allowed_host_problem(text: str) -> str:
    """Why a value of ``--allowed-hosts`` cannot match any host, or an empty text."""
    if text == ANY or _is_address(text.strip("[]")):
        return ""
    name = text.removeprefix("*.").removesuffix(".")
    if not name or any(each in name for each in "*/:@ \t"):
        return "expected a host name without scheme, port and path, such as llm.example or *.example, or *"
    return ""


def allowed_origin_problem(text: str) -> str:
    """Why a value of ``--allowed-origins`` cannot match any page, or an empty text."""
    if text in (ANY, "null"):
        return ""
    parts = urlsplit(text)
    bare = parts._replace(path="" if parts.path == "/" else parts.path)
    if not parts.scheme or bare.path or bare.query or bare.fragment or "://" not in text:
        return "expected an origin such as https://page.example or http://localhost:3000, null, or *"
    return ""
