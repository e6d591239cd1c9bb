"""Where a server listens and how: a Unix socket, several names, few open files, TLS files that change."""

import os
import shutil
import signal
import socket
import ssl
import time

import httpx
import pytest

from tests.api.runtime.test_listening import pair
from tests.server.conftest import serving
from tests.waiting import eventually


def test_a_server_on_a_unix_socket_answers_under_each_of_its_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ["--uds", "headrace.sock", "--metrics-port", "0", "--served-model-name", "first", "second"]
    with serving("builtin", *flags) as server:
        assert server.url == "unix:headrace.sock"
        transport = httpx.HTTPTransport(uds="headrace.sock")
        with httpx.Client(transport=transport, base_url="http://any", timeout=60) as client:
            listed = client.get("/v1/models").json()["data"]
            assert {each["num_parameters"] for each in listed} == {
                client.get("/server_info").json()["num_parameters"]
            }
            assert [each["id"] for each in listed] == ["first", "second"]
            assert client.get("/v1/models/second").json()["id"] == "second"
            claude = client.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
            assert (claude["first_id"], claude["last_id"]) == ("first", "second")
            for name in ("first", "second", "builtin"):
                body = {"model": name, "prompt": "Once", "max_tokens": 2}
                answer = client.post("/v1/completions", json=body)
                assert (answer.status_code, answer.json()["model"]) == (200, "first")
            unknown = client.post("/v1/completions", json={"model": "third", "prompt": "Once"})
            assert unknown.status_code == 404
            assert 'model_name="first"' in client.get("/metrics").text
        assert server.stop() == 0
    assert not os.path.lexists("headrace.sock")


def healthy(server):
    """Whether the server answers; right after a flood it may still close new connections."""
    try:
        return server.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def test_a_server_that_runs_out_of_files_says_so_and_serves_on():
    with serving("--response-cache", "memory", open_files=96) as server:
        host, port = server.url.removeprefix("http://").split(":")
        clients = [socket.create_connection((host, int(port)), 60) for _ in range(120)]
        refused = b""
        for client in clients:
            client.settimeout(0.01)
            try:
                refused = client.recv(4096) or refused
            except OSError:
                continue
        assert b"too_many_connections" in refused
        for client in clients:
            client.close()
        eventually(lambda: any("limit of open files is 96" in line for line in server.lines))
        eventually(lambda: healthy(server))
        assert server.post("/v1/completions", {"prompt": "Once", "max_tokens": 2}).status_code == 200


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
@pytest.mark.parametrize(
    ("by_signal", "fronts"),
    [(True, "1"), (False, "1"), (True, "2")],
    ids=["SIGHUP", "watching", "SIGHUP with front ends"],
)
def test_a_new_certificate_is_presented_and_streams_go_on(tmp_path, by_signal, fronts):
    cert, key = pair(tmp_path / "tls", "old")
    with serving("--ssl-keyfile", key, "--ssl-certfile", cert, "--api-server-count", fronts) as server:
        place = server.url.removeprefix("https://").split(":")

        def presented():
            return ssl.get_server_certificate((place[0], int(place[1])))

        old = presented()
        body = {"prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        with (
            httpx.Client(verify=False, timeout=60) as client,
            client.stream("POST", f"{server.url}/v1/completions", json=body) as stream,
        ):
            pair(tmp_path / "tls", "new")
            if by_signal:
                server.process.send_signal(signal.SIGHUP)
            until = time.monotonic() + 60
            while any(presented() == old for _ in range(8 if fronts != "1" else 1)):  # at each front end
                assert time.monotonic() < until
                time.sleep(0.1)
            assert "[DONE]" in "".join(stream.iter_text())
