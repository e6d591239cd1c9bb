from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from benchmarks.peers.server import free_port, start
from headrace.lab.workload import Work

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
        state = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()[0]
        before = ticks(server.pid)
        time.sleep(0.1)
        assert state == "T"
        assert ticks(server.pid) == before
        assert [record.error for record in server.run(work)] == [""] * 3  # and it goes on
    finally:
        server.close()
    assert server._process.returncode is not None


def test_a_server_that_ends_is_told_with_its_last_words():
    command = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    with pytest.raises(RuntimeError, match="no such model"):
        start("broken", command, free_port(), "/health", 1, {}, {})
