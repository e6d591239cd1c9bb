"""Checks which host a request names and which web page sent it, so that no page on the Internet can drive the server.

A browser on the same machine or network sends whatever a page tells it to. Three facts about it cannot be forged by the
page: `Host` is the name that the page used, `Origin` is where the page came from, `Sec-Fetch-Site` is their relation.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import urlsplit

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
