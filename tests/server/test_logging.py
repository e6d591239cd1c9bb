"""The log of a real server process: its lines, its secrets, and what leaves it for systemd and a trace collector."""

from __future__ import annotations

import json
import signal
import socket
import time
from pathlib import Path

import httpx
import pytest

from tests.doubles.collecting import collecting
from tests.server.conftest import Server, serving

SECRET = "xyzzy-7391"
CHAT = "/v1/chat/completions"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def chat(text: str, **more) -> dict:
    body = {"model": "builtin", "messages": [{"role": "user", "content": text}], "max_tokens": 4}
    return body | {"temperature": 0} | more


def stop(server: Server) -> list[str]:
    server.stop()
    return server.lines


def provoke(server: Server) -> None:
    """Send the secret everywhere a client can, in requests that succeed and in requests that fail."""
    key = {"Authorization": "Bearer right-key-" + SECRET}
    wrong = {"Authorization": "Bearer wrong-" + SECRET, "Cookie": SECRET}
    server.post(CHAT, chat(SECRET), headers=key)
    server.post(CHAT, chat(SECRET, stream=True), headers=key)
    server.post(CHAT, chat(SECRET), headers=wrong)
    server.post(CHAT, chat(SECRET), headers={"X-Api-Key": SECRET})
    server.post(CHAT, chat(SECRET, temperature=SECRET), headers=key)
    server.post(CHAT, {SECRET: SECRET}, headers=key)
    server.post(CHAT, chat("x", stop=[SECRET], tools=[{"type": SECRET}]), headers=key)
    server.post(CHAT, chat("x", chat_template="{{ raise_exception('" + SECRET + "') }}"), headers=key)
    server.post("/v1/completions", {"model": "builtin", "prompt": SECRET, "max_tokens": 4}, headers=key)
    server.post("/tokenize", {"model": "builtin", "prompt": SECRET}, headers=key)
    httpx.post(server.url + CHAT, content=b'{"broken ' + SECRET.encode(), headers=key, timeout=60)
    httpx.post(server.url + CHAT, content=b"\xff" + SECRET.encode(), headers=key, timeout=60)
    server.get("/v1/models?api_key=" + SECRET, headers=key)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:  # no HTTP at all
        raw.sendall(b"GET / \x00HTTP/9\r\nAuthorization: " + SECRET.encode() + b"\r\n\r\n")
        raw.recv(1000)


def test_prompts_and_keys_never_reach_the_log_and_every_line_is_json() -> None:
    flags = ["--log-format", "json", "--log-level", "debug", "--api-key", "right-key-" + SECRET]
    flags += ["--trust-request-chat-template"]
    with serving(*flags, "--response-cache", "memory") as server:
        provoke(server)
        lines = stop(server)
    assert not any(SECRET in line for line in lines)
    records = [json.loads(line) for line in lines]
    assert all(record.keys() >= {"time", "level", "component", "message"} for record in records)
    access = [record for record in records if record["component"] == "access"]
    assert len(access) == 13
    done = [record for record in access if "finish_reason" in record]
    assert len(done) == 3, access
    assert all(record["completion_tokens"] > 0 and record["ttft_seconds"] > 0 for record in done)
    assert {record["status"] for record in access} >= {200, 400, 401}
    *_, last = records
    assert (last["component"], last["message"]) == ("shutdown", "server stopped")
    assert last["finished_requests"] in (2, 3)  # the second request may be served from the cache


def test_text_lines_tell_start_requests_and_the_end() -> None:
    with serving() as server:
        server.post(CHAT, chat("Hello"), headers={"X-Request-Id": "mine"})
        found = server.get("/v1/requests/mine").json()
        lines = sorted(
            stop(server)
        )  # by time: lines of the access log wait for others, so later ones may precede them
    assert found["state"] == "finished"
    parts = [line.split() for line in lines]
    assert {each[1] for each in parts} == {"INFO"}
    assert [each[2] for each in parts if each[2] != "startup"] == ["access", "access", *["shutdown"] * 3]
    (done,) = (line for line in lines if "request_id=mine" in line)
    assert f"200 POST {CHAT} request_id=mine id={found['id']} tenant=default model=builtin" in done


def test_the_access_log_can_be_left_out() -> None:
    with serving("--no-access-log") as server:
        server.get("/v1/models")
        assert not any("access" in line for line in stop(server))


def test_systemd_hears_when_the_server_is_ready_and_when_it_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "400000")
        with serving() as server:
            heard, both = set[bytes](), {b"READY=1", b"WATCHDOG=1"}
            while heard != both:
                heard.add(listener.recv(100))
                assert heard <= both
            stop(server)
            while (last := listener.recv(100)) == b"WATCHDOG=1":
                pass
            assert last == b"STOPPING=1"


def test_a_collector_receives_the_spans_of_a_request() -> None:
    pytest.importorskip("opentelemetry.sdk")
    with (
        collecting() as collector,
        serving("--otlp-traces-endpoint", collector.url, "--response-cache", "memory") as server,
    ):
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
        answer = server.post(CHAT, chat("Hello"), headers=headers)
        server.get("/health")
        version, trace_id, span_id, flags = answer.headers["traceparent"].split("-")
        assert (version, trace_id, flags) == ("00", TRACE, "01")
        assert span_id != PARENT
        server.process.send_signal(signal.SIGTERM)  # what is queued is sent before the end
        made = collector.spans(6)
    spans = {span["name"]: span for span in made}
    root = spans.pop("chat builtin")
    assert (root["kind"], root["trace_id"], root["span_id"]) == ("SPAN_KIND_SERVER", TRACE, span_id)
    assert root["parent_id"] == PARENT
    assert root["service"] == "headrace"
    attributes = root["attributes"]
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.response.id"] == answer.json()["id"]
    assert attributes["gen_ai.usage.output_tokens"] == answer.json()["usage"]["completion_tokens"]
    assert attributes["gen_ai.response.finish_reasons"] == [answer.json()["choices"][0]["finish_reason"]]
    assert attributes["headrace.request_id"] == "mine"
    assert set(spans) == {"cache_lookup", "queue", "prefill", "decode"}
    assert all(span["parent_id"] == span_id and span["trace_id"] == TRACE for span in spans.values())
    assert root["start"] <= spans["queue"]["start"] <= spans["queue"]["end"] == spans["prefill"]["start"]
    assert spans["prefill"]["end"] == spans["decode"]["start"] <= spans["decode"]["end"]
    lookups = [span["attributes"] for span in made if span["name"] == "cache_lookup"]
    assert {each["headrace.cache.layer"]: each["headrace.cache.outcome"] for each in lookups} == {
        "exact": "miss",
        "partial": "miss",
    }


@pytest.mark.parametrize(("stream", "status"), [(False, 499), (True, 200)])
def test_a_client_that_hangs_up_is_logged_as_such(server: Server, stream: bool, status: int) -> None:
    said = len(server.lines)
    body = {"model": "builtin", "prompt": "x", "max_tokens": 8000, "ignore_eos": True, "stream": stream}
    raw = json.dumps(body).encode()
    host, port = server.url.removeprefix("http://").split(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(head + raw)
        if stream:
            connection.recv(100)
        else:
            server.wait_until(lambda info: info["open_requests"] == 1)
    server.wait_until(lambda info: info["open_requests"] == 0)
    until = time.monotonic() + 60
    while not (found := [line for line in server.lines[said:] if " POST " in line]):
        assert time.monotonic() < until
        time.sleep(0.02)
    assert f" {status} POST /v1/completions" in found[0]
    assert " error=client_disconnected " in found[0]
