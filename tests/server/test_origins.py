"""Pages of other origins and foreign host names, tried with raw requests and with a real browser."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest

from tests.server.browser import Browser, browsing
from tests.server.conftest import Server, serving

TRY = """
const [base, done] = arguments;
const prompt = '{"prompt": "x", "max_tokens": 1}';
const ways = {
  text: ["/v1/completions", {method: "POST", mode: "no-cors", body: prompt}],
  form: ["/v1/completions", {method: "POST", mode: "no-cors", body: new URLSearchParams(prompt)}],
  beacon: ["/pause", {method: "POST", mode: "no-cors", body: new Blob(["{}"])}],
  pause: ["/pause", {method: "POST", mode: "no-cors"}],
  json: ["/v1/completions", {method: "POST", body: prompt, headers: {"Content-Type": "application/json"}}],
  read: ["/v1/steps", {}],
  image: ["/v1/steps", {mode: "no-cors"}],
};
(async () => {
  const seen = {};
  for (const [name, [path, init]] of Object.entries(ways)) {
    try {
      const answer = await fetch(base + path, init);
      seen[name] = answer.type === "opaque" ? "opaque" : answer.status;
    } catch { seen[name] = "blocked"; }
  }
  done(seen);
})();
"""


@contextmanager
def page() -> Iterator[int]:
    """A web server with an empty page; its port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>page</title>")

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        try:
            yield web.server_address[1]
        finally:
            web.shutdown()


@pytest.fixture(scope="module")
def local() -> Iterator[Server]:
    with serving("--metrics-port", "0") as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser for which two names of the Internet lead to this machine, as after DNS rebinding."""
    with browsing("--host-resolver-rules=MAP *.example 127.0.0.1") as opened:
        yield opened


def raw(port: int, head: str, body: str = "") -> tuple[int, str]:
    """Status and text of a response to a request that is sent as it stands."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        text = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    return int(text.split()[1]), text


def port_of(server: Server) -> int:
    return urlsplit(server.url).port or 0


def metrics_port(server: Server) -> int:
    return next(int(line.rpartition("port=")[2]) for line in server.lines if "metrics port" in line)


def served(server: Server) -> float:
    """How many requests were computed."""
    return server.metric("request_success_total")


def test_a_foreign_host_is_refused_on_every_port(local):
    for port, paths in (
        (port_of(local), ("/v1/steps", "/v1/models", "/health", "/dashboard", "/metrics")),
        (metrics_port(local), ("/metrics", "/health")),
    ):
        for path in paths:
            assert raw(port, f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n")[0] in (200, 307)
            for host in ("evil.example", f"evil.example:{port}", f"127.0.0.1.evil.example:{port}"):
                status, text = raw(port, f"GET {path} HTTP/1.1\r\nHost: {host}\r\n")
                assert status == 403
                assert "--allowed-hosts" in text


def test_two_of_a_header_are_refused(local):
    port = port_of(local)
    for name, one, two in (
        ("Authorization", "Bearer a", "Bearer b"),
        ("Host", "127.0.0.1", "evil.example"),
        ("Content-Length", "5", "6"),
        ("Content-Length", "0", "0"),
        ("x-api-key", "a", "a"),
    ):
        host = "" if name == "Host" else "Host: 127.0.0.1\r\n"
        assert raw(port, f"GET /v1/models HTTP/1.1\r\n{host}{name}: {one}\r\n{name}: {two}\r\n")[0] == 400, (
            name
        )
    both = "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(f"POST /pause HTTP/1.1\r\nHost: 127.0.0.1\r\n{both}\r\n0\r\n\r\n".encode())
        assert b" 400 " in connection.recv(65536).split(b"\r\n")[0] + b" "


def test_allowed_hosts_are_served_and_others_not():
    with serving(
        "--allowed-hosts", "llm.example", "--allowed-hosts", "*.svc", "--api-key", "alpha"
    ) as server:
        port = port_of(server)
        for host, status in (
            *(("llm.example", 200), ("headrace.default.svc", 200), ("127.0.0.1", 200), ("localhost", 200)),
            *(("x.llm.example", 403), ("evil.example", 403), ("svc", 403)),
        ):
            assert raw(port, f"GET /health HTTP/1.1\r\nHost: {host}\r\n")[0] == status, host


def test_a_page_of_another_origin_changes_and_reads_nothing(local, browser):
    before = served(local)
    with page() as port:
        for site in (f"http://localhost:{port}", f"http://evil.example:{port}"):
            browser.open(site)
            seen = browser.driver.execute_async_script(TRY, local.url)
            assert seen.pop("json") == seen.pop("read") == "blocked", site
            assert set(seen.values()) <= {"opaque", "blocked"}
    assert served(local) == before
    answer = local.post("/v1/completions", {"prompt": "x", "max_tokens": 1})  # not paused
    assert answer.status_code == 200


def test_a_rebound_name_changes_and_reads_nothing(local, browser):
    before = served(local)
    base = f"http://evil.example:{port_of(local)}"
    browser.open(base + "/nothing")
    seen = browser.driver.execute_async_script(TRY, base)
    assert set(seen.values()) == {403}
    assert served(local) == before


def test_the_pages_of_the_server_work_and_may_be_linked_to(local, browser):
    for base in (local.url, local.url.replace("127.0.0.1", "localhost")):
        browser.open(base + "/nothing")
        seen = browser.driver.execute_async_script(TRY, base)
        assert seen["pause"] == seen["read"] == 200
        assert seen["json"] == 503  # it has paused the server
        assert seen["text"] == seen["form"] == seen["beacon"] == 415  # not declared as JSON
        assert local.post("/resume").status_code == 200
    with page() as port:
        browser.open(f"http://evil.example:{port}")
        browser.run(
            "const a = document.createElement('a'); a.href = arguments[0]; document.body.append(a); a.click()",
            local.url + "/dashboard",
        )
        browser.eventually(lambda: browser.driver.current_url.startswith(local.url))
        browser.shows("Headrace")
