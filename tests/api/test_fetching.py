"""Images are fetched from allowed hosts, within limits of time, size and redirects, not from private addresses."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import asynccontextmanager

import httpx
import pytest

from headrace.api import fetching
from headrace.api.fetching import FetchRules, MediaFetcher, _is_public
from headrace.text.images import BadPicture

FILE = b"\x89PNG" + bytes(96)
HEAD = "HTTP/1.1 {}\r\nContent-Type: {}\r\nConnection: close\r\n"


class Host:
    """A server on loopback: a path says what it answers."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.open = self.most_open = 0
        self.port = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        self.most_open = max(self.open, self.most_open)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = head.split(" ", 2)[1]
            fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
            self.asked.append((path, {name.lower(): value for name, value in fields.items()}["host"]))
            await self.write(path, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open -= 1
            writer.close()

    async def write(self, path: str, writer: asyncio.StreamWriter) -> None:
        kind, _, rest = path[1:].partition("/")
        if kind == "to":
            writer.write(f"{HEAD.format('302 Found', 'text/plain')}Location: {rest}\r\n\r\n".encode())
        elif kind == "status":
            writer.write(f"{HEAD.format(f'{rest} Reason', 'image/png')}\r\n".encode() + FILE)
        elif kind == "type":
            writer.write(f"{HEAD.format('200 OK', rest)}\r\n".encode() + FILE)
        elif kind == "gzip":
            writer.write(f"{HEAD.format('200 OK', 'image/png')}Content-Encoding: gzip\r\n\r\n".encode())
        elif kind == "says":
            writer.write(f"{HEAD.format('200 OK', 'image/png')}Content-Length: {rest}\r\n\r\n".encode())
        elif kind == "sends":
            writer.write(f"{HEAD.format('200 OK', 'image/png')}\r\n".encode() + bytes(int(rest)))
        elif kind == "drips":
            writer.write(f"{HEAD.format('200 OK', 'image/png')}\r\n".encode())
            for _ in range(1000):
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.02)
        elif kind == "silent":
            await asyncio.sleep(20)
        elif kind == "waits":
            await asyncio.sleep(0.05)
            writer.write(f"{HEAD.format('200 OK', 'image/png')}\r\n".encode() + FILE)
        else:
            writer.write(f"{HEAD.format('200 OK', 'image/png')}\r\n".encode() + FILE)


@asynccontextmanager
async def hosted():
    host = Host()
    server = await asyncio.start_server(host.answer, "127.0.0.1", 0)
    host.port = server.sockets[0].getsockname()[1]
    try:
        yield host
    finally:
        server.close()


def fetch(path, most=1000, private=True, domains=None, seconds=5.0, host="localhost"):
    """What is fetched from a server on loopback, or why nothing is; and what the server was asked."""

    async def scene():
        async with hosted() as server:
            named = (f"{host}:{server.port}",) if domains is None else domains
            fetcher = MediaFetcher(FetchRules(named, private, seconds))
            url = path.format(port=server.port) if path[0] != "/" else f"http://{host}:{server.port}{path}"
            try:
                return await fetcher.fetch(url, most), server.asked
            except BadPicture as refused:
                return str(refused), server.asked

    return asyncio.run(scene())


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """Names of tests are addresses of loopback, one of them of IPv4 alone."""
    look_up = socket.getaddrinfo

    def found(host, port, *rest, **more):
        if host.endswith(".test"):
            host = "127.0.0.1"
        return look_up(host, port, *rest, **{"family": socket.AF_INET, **more})

    monkeypatch.setattr(socket, "getaddrinfo", found)


def test_a_file_of_an_allowed_host_is_fetched_under_its_name():
    found, ((path, host),) = fetch("/a.png?size=1#part", host="pictures.test")
    assert (found, path) == (FILE, "/a.png?size=1")
    assert host.startswith("pictures.test:")


@pytest.mark.parametrize("kind", ["image/jpeg", "Image/PNG; charset=x", "application/octet-stream"])
def test_types_of_images_and_of_unknown_files_are_read(kind):
    assert fetch(f"/type/{kind}")[0] == FILE


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/status/404", "localhost answered with status 404"),
        ("/status/500", "status 500"),
        ("/status/206", "status 206"),
        ("/type/text/html", "content type 'text/html'"),
        ("/type/image/svg+xml", "content type 'image/svg+xml'"),
        ("/gzip/", "compressed"),
        ("/says/1001", "larger than 1000 bytes"),
        ("/sends/1001", "larger than 1000 bytes"),
        ("/says/500", "cannot be read"),
        ("/to//to//to//to//a.png", "more than 3 redirects"),
        ("/to/http://elsewhere.test/a.png", "elsewhere.test:80 is not among the hosts"),
        ("/to/file:///etc/passwd", "must begin with http"),
        ("/to/http://a:b@localhost/", "user name"),
    ],
)
def test_other_answers_are_refused_with_the_reason(path, why):
    assert why in fetch(path)[0]


def test_a_few_redirects_are_followed():
    found, asked = fetch("/to//to//to//a.png")
    assert found == FILE
    assert [path for path, _ in asked] == ["/to//to//to//a.png", "/to//to//a.png", "/to//a.png", "/a.png"]


@pytest.mark.parametrize(
    ("url", "domains", "why"),
    [
        ("http://localhost:{port}/a", (), "--allowed-media-domains"),
        ("http://localhost:{port}/a", ("localhost",), "is not among the hosts"),  # only the ports 80 and 443
        ("http://localhost:{port}/a", ("localhost:1",), "is not among the hosts"),
        ("http://sub.example.com/a", ("example.com",), "is not among the hosts"),
        ("http://example.com.evil.org/a", ("example.com",), "is not among the hosts"),
        ("http://example.com@evil.org/a", ("example.com",), "user name"),
        ("http://evil.org#@example.com/a", ("example.com",), "is not among the hosts"),
        ("http://evil.org\\@example.com/a", ("example.com",), "must not|invalid|not among"),
        ("ftp://example.com/a", ("example.com",), "must begin with http"),
        ("gopher://example.com/a", ("example.com",), "must begin with http"),
        ("http:///a", ("example.com",), "must begin with http"),
        ("http://exa mple.com/a", ("example.com",), "invalid|not among"),
        ("http://" + "a" * 9000, ("example.com",), "must begin with http"),
        ("http://[::1]:{port}/a", ("localhost",), "is not among the hosts"),
    ],
)
def test_only_named_hosts_and_schemes_are_asked(url, domains, why):
    refused, asked = fetch(url, domains=domains)
    assert any(each in refused for each in why.split("|")), refused
    assert asked == []


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "name.test"])
def test_private_addresses_are_refused_unless_they_are_allowed(host):
    refused, asked = fetch("/a.png", private=False, host=host)
    assert "--allow-private-media-addresses" in refused
    assert asked == []
    assert fetch("/a.png", host=host)[0] == FILE


def test_one_private_address_among_public_ones_is_enough_to_refuse(monkeypatch):
    entries = [(socket.AF_INET, 1, 6, "", (each, 80)) for each in ("8.8.8.8", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: entries)
    assert "private address" in fetch("http://two.test/a", private=False, domains=("two.test",))[0]


def test_a_name_is_resolved_once_and_its_address_is_connected_to(monkeypatch):
    """A second answer of the DNS, of another address, has no effect."""
    answers, asked = ["127.0.0.1"], []
    look_up = socket.getaddrinfo

    def found(host, port, *rest, **more):
        asked.append(host)
        return look_up(answers.pop(0) if host == "turn.test" else host, port, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", found)
    assert fetch("/a.png", host="turn.test")[0] == FILE
    assert asked.count("turn.test") == 1


def test_an_unknown_name_is_an_error_of_the_image(monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert "gone.test cannot be read" in fetch("http://gone.test/a", domains=("gone.test",))[0]


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        *[
            (each, False)
            for each in ("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254")
        ],
        *[(each, False) for each in ("0.0.0.0", "100.64.0.1", "224.0.0.1", "255.255.255.255", "192.0.2.1")],
        *[
            (each, False)
            for each in ("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1", "2001:db8::1")
        ],
        *[
            (each, False)
            for each in ("::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::")
        ],
        ("64:ff9b::808:808", True),
    ],
)
def test_public_addresses(address, public):
    assert _is_public(address) is public


@pytest.mark.parametrize("path", ["/silent/", "/drips/"])
def test_a_slow_host_is_given_up_in_time(path):
    began = time.monotonic()
    assert "did not send the image in 0.2 s" in fetch(path, seconds=0.2, most=100_000)[0]
    assert time.monotonic() - began < 5


def test_a_slow_host_delays_only_its_own_images(monkeypatch):
    monkeypatch.setattr(fetching, "MOST_FETCHES_OF_HOST", 2)
    monkeypatch.setattr(fetching, "MOST_FETCHES", 4)

    async def scene():
        async with hosted() as slow, hosted() as quick:
            domains = (f"slow.test:{slow.port}", f"quick.test:{quick.port}")
            fetcher = MediaFetcher(FetchRules(domains, private=True, seconds=30.0))
            waiting = [
                asyncio.create_task(fetcher.fetch(f"http://slow.test:{slow.port}/silent/", 1000))
                for _ in range(20)
            ]
            async with asyncio.timeout(10):
                while slow.open < 2:
                    await asyncio.sleep(0.01)
            url = f"http://quick.test:{quick.port}/a.png"
            async with asyncio.timeout(10):
                assert await asyncio.gather(*[fetcher.fetch(url, 1000) for _ in range(5)]) == [FILE] * 5
            for each in waiting:
                each.cancel()
            await asyncio.wait(waiting)
            return slow.most_open, fetcher._hosts

    assert asyncio.run(scene()) == (2, {})


def test_certificates_are_checked_for_the_name_and_not_for_the_address(monkeypatch):
    """The request names the host to TLS, although its URL has the address."""
    sent = []

    async def send(self, request, **_):
        sent.append(request)
        raise httpx.ConnectError("not here")

    monkeypatch.setattr(httpx.AsyncClient, "send", send)
    fetch("https://name.test/a.png", domains=("name.test",))
    (request,) = sent
    assert (request.url.host, request.headers["host"]) == ("127.0.0.1", "name.test")
    assert request.extensions["sni_hostname"] == "name.test"
