from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks.peers.server import first_tokens, start
from headrace.lab.workload.work import Work
from tests.doubles.shared_stores import free_port

SPINNING = """
import sys, threading
from benchmarks.peers.front import serve

class Spinner:
    def submit(self, prompt, max_tokens, stream):
        stream.put([1] * max_tokens)
        stream.end(len(prompt))

def spin():
    while True:
        pass

threading.Thread(target=spin, daemon=True).start()
serve(Spinner(), "spinner", int(sys.argv[1]))
"""


def state(pid: int) -> str:
    """Empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_a_server_takes_no_time_between_its_turns_however_its_threads_wait():
    port = free_port()
    command = [sys.executable, "-c", SPINNING, str(port)]
    server = start("spinner", command, port, "/health", 2, {"PYTHONPATH": str(Path.cwd())}, {})
    try:
        work = [Work(f"w{i}", (1, 2), max_tokens=4, ignore_eos=True) for i in range(3)]
        assert [record.error for record in server.run(work)] == [""] * 3
        before = ticks(server.pids()[0])
        time.sleep(0.1)
        assert state(server.pids()[0]) == "T"
        assert ticks(server.pids()[0]) == before
        assert [record.error for record in server.run(work)] == [""] * 3  # and it goes on
    finally:
        server.close()
    assert server._process.returncode is not None


ENGINE_APART = """
import subprocess, sys, threading
from benchmarks.peers.front import serve

spin = "print(1, flush=True)\\nwhile True: pass"
engine = subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE, start_new_session=True)
engine.stdout.readline()

class Idle:
    def submit(self, prompt, max_tokens, stream):
        stream.put([1] * max_tokens)
        stream.end(len(prompt))

serve(Idle(), "idle", int(sys.argv[1]))
"""


def test_an_engine_in_a_session_of_its_own_is_stopped_and_ended_with_its_server():
    port = free_port()
    command = [sys.executable, "-c", ENGINE_APART, str(port)]
    server = start("apart", command, port, "/health", 2, {"PYTHONPATH": str(Path.cwd())}, {})
    try:
        front, engine = server.pids()
        before = ticks(engine)
        time.sleep(0.1)
        assert ticks(engine) == before
        with server.turn():
            until = time.monotonic() + 60.0
            while ticks(engine) <= before:
                assert time.monotonic() < until
                time.sleep(0.01)
    finally:
        server.close()
    assert front == server._process.pid
    assert state(engine) in ("", "Z")


NAMELESS = """
import os, pathlib, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Nameless(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": []}')

listening = HTTPServer(("127.0.0.1", int(sys.argv[1])), Nameless)
pathlib.Path(sys.argv[2]).write_text(str(os.getpid()))
listening.serve_forever()
"""


@pytest.mark.parametrize("cut_short", [False, True], ids=["names no model", "interrupted"])
def test_no_server_outlives_a_start_that_failed(tmp_path, monkeypatch, cut_short):
    noted = tmp_path / "pid"
    if cut_short:

        def interrupt(_: float) -> None:
            if noted.exists() and noted.read_text():
                raise KeyboardInterrupt

        monkeypatch.setattr("benchmarks.peers.server.time.sleep", interrupt)
    port = free_port()
    ready = "/never" if cut_short else "/health"
    script = NAMELESS.replace("200", "200 if self.path != '/never' else 503")
    with pytest.raises(KeyboardInterrupt if cut_short else IndexError):
        start("nameless", [sys.executable, "-c", script, str(port), str(noted)], port, ready, 1, {}, {})
    with pytest.raises(ProcessLookupError):
        os.kill(int(noted.read_text()), 0)


def test_servers_here_are_asked_without_a_proxy(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    port = free_port()
    command = [sys.executable, "-c", SPINNING, str(port)]
    server = start("spinner", command, port, "/health", 1, {"PYTHONPATH": str(Path.cwd())}, {})
    try:
        with server.turn():
            assert first_tokens(server.endpoint, Work("w", (1, 2), max_tokens=3, ignore_eos=True)) == [
                1,
                1,
                1,
            ]
    finally:
        server.close()


def test_a_server_that_ends_is_reported_with_the_end_of_its_log():
    command = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    with pytest.raises(RuntimeError, match="no such model"):
        start("broken", command, free_port(), "/health", 1, {}, {})
