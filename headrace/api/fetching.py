"""Fetches images that requests name by URL, and nothing else that this machine can reach.

- Hosts are those that the operator has named. An entry without a port allows the ports 80 and 443.
- A name is resolved once, all its addresses must be public, and the connection goes to one of them. So an answer of
  the DNS that changes cannot lead elsewhere. Each redirect is checked like a first URL.
- Time, size and redirects are limited, and so are the fetches at a time, in all and of one host: a slow host does not
  hold up the others.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import NamedTuple

import httpx

from headrace.text.images import BadPicture

FETCH_SECONDS = 5.0
"""The time of one fetch, with its redirects and its wait for a turn."""

MOST_REDIRECTS = 3
MOST_FETCHES = 32
MOST_FETCHES_OF_HOST = 8
MOST_LOOKUPS = 8
"""Names that are resolved at a time, on threads of their own: a lookup cannot be interrupted."""

MOST_URL_CHARACTERS = 8192

_PORTS = {"http": 80, "https": 443}
_TYPES = frozenset(
    (
        *("image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif"),
        *("application/octet-stream", "binary/octet-stream", ""),
    )
)


class FetchRules(NamedTuple):
    """What may be fetched: ``domains`` are host names with a port or without one; ``private`` allows all addresses."""

    domains: tuple[str, ...] = ()
    private: bool = False
    seconds: float = FETCH_SECONDS


class _Target(NamedTuple):
    url: httpx.URL
    host: str
    port: int


class MediaFetcher:
    """Fetches by HTTP and HTTPS under the ``rules``. For one event loop."""

    def __init__(self, rules: FetchRules) -> None:
        self._rules = rules
        self._domains = frozenset(each.lower().rstrip(".") for each in rules.domains)
        self._tls = httpx.create_ssl_context(trust_env=False) if rules.domains else False
        self._lookups = ThreadPoolExecutor(MOST_LOOKUPS, "headrace-media-names")
        self._turns = asyncio.Semaphore(MOST_FETCHES)
        self._hosts: dict[str, tuple[asyncio.Semaphore, int]] = {}

    async def fetch(self, url: str, most_bytes: int) -> bytes:
        """The body of a URL.

        Raises:
            BadPicture: the URL is not allowed, or there is no image of at most ``most_bytes`` within the time.
        """
        target = self._target(url)
        try:
            async with asyncio.timeout(self._rules.seconds), self._turn(target.host):
                return await self._followed(target, most_bytes)
        except TimeoutError:
            raise BadPicture(f"{target.host} did not send the image in {self._rules.seconds:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            raise BadPicture(f"{target.host} cannot be read ({type(error).__name__})") from None

    async def _followed(self, target: _Target, most_bytes: int) -> bytes:
        for _ in range(MOST_REDIRECTS + 1):
            address = await self._address(target)
            # A client of its own, since pools of connections would know hosts by the address.
            async with httpx.AsyncClient(
                verify=self._tls, trust_env=False, timeout=self._rules.seconds
            ) as client:
                request = client.build_request(
                    "GET",
                    target.url.copy_with(host=address),
                    headers={
                        "Host": target.url.netloc.decode("ascii"),
                        "Accept": "image/*",
                        "Accept-Encoding": "identity",
                        "User-Agent": "headrace",
                    },
                    extensions={"sni_hostname": target.host},
                )
                response = await client.send(request, stream=True)
                try:
                    if not response.has_redirect_location:
                        return await _body(response, target.host, most_bytes)
                    target = self._target(str(target.url.join(response.headers["location"])))
                finally:
                    await response.aclose()
        raise BadPicture(f"the URL has more than {MOST_REDIRECTS} redirects")

    def _target(self, text: str) -> _Target:
        """The parts of a URL that may be fetched."""
        if not self._domains:
            raise BadPicture(
                "this server fetches no images: send it as a data URL, "
                "or ask the operator for --allowed-media-domains"
            )
        try:
            url = httpx.URL(text if len(text) <= MOST_URL_CHARACTERS else "")
        except (httpx.InvalidURL, ValueError):
            raise BadPicture("the URL is invalid") from None
        host = url.raw_host.decode("ascii").lower().rstrip(".")
        if url.scheme not in _PORTS or not host:
            raise BadPicture("the URL must begin with http://, https:// or data:")
        if url.userinfo:
            raise BadPicture("the URL must not contain a user name or password")
        port = url.port or _PORTS[url.scheme]
        named = f"[{host}]" if ":" in host else host
        if f"{named}:{port}" not in self._domains and not (
            named in self._domains and port in _PORTS.values()
        ):
            raise BadPicture(
                f"{named}:{port} is not among the hosts that this server may fetch from (--allowed-media-domains)"
            )
        return _Target(url.copy_with(fragment=None), host, port)

    async def _address(self, target: _Target) -> str:
        """An address of the host; every address that it has is allowed."""
        look_up = partial(socket.getaddrinfo, target.host, target.port, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self._lookups, look_up)
        addresses = [str(entry[4][0]) for entry in found]
        if not self._rules.private and not all(map(_is_public, addresses)):
            raise BadPicture(
                f"{target.host} has a private address; "
                "the operator can allow them with --allow-private-media-addresses"
            )
        return addresses[0]

    @asynccontextmanager
    async def _turn(self, host: str) -> AsyncIterator[None]:
        """One of the fetches of a host, and then one of all."""
        turns, users = self._hosts.get(host, (asyncio.Semaphore(MOST_FETCHES_OF_HOST), 0))
        self._hosts[host] = turns, users + 1
        try:
            async with turns, self._turns:
                yield
        finally:
            users = self._hosts[host][1] - 1
            if users:
                self._hosts[host] = turns, users
            else:
                del self._hosts[host]


def _is_public(address: str) -> bool:
    """Whether an address belongs to the internet; of an IPv6 address that holds one of IPv4, whether both do."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        held = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if held is None and ip in _NAT64:
            held = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if held is not None:
            return held.is_global and not held.is_multicast
    return ip.is_global and not ip.is_multicast


_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


async def _body(response: httpx.Response, host: str, most_bytes: int) -> bytes:
    if response.status_code != 200:
        raise BadPicture(f"{host} answered with status {response.status_code}")
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in _TYPES:
        raise BadPicture(f"{host} sent the content type {kind[:80]!r}, which is no supported image")
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise BadPicture(f"{host} sent a compressed body")
    too_large = BadPicture(f"the file is larger than {most_bytes} bytes")
    length = response.headers.get("content-length", "0")
    if length.isascii() and length.isdigit() and int(length[:20]) > most_bytes:
        raise too_large
    body = bytearray()
    async for piece in response.aiter_raw():
        body += piece
        if len(body) > most_bytes:
            raise too_large
    return bytes(body)
