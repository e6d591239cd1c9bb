"""Real server processes: `headrace serve` on the built-in model, one for most tests."""

from __future__ import annotations

import os
import queue
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.doubles.forks import Forked

if TYPE_CHECKING:
    from tests.server.browser import Browser

START_SECONDS = 120.0
SMALL = ["--kv-cache-memory-bytes", str(64 * 2**20)]


@dataclass
class Server:
    """A running server process."""

    process: Forked
    url: str
    lines: list[str]
    reader: threading.Thread
    """Appends what the process says to ``lines``."""

    def stop(self) -> int:
        """Send SIGTERM and wait for the `end`."""
        self.process.terminate()
        return self.end()

    def end(self) -> int:
        """The exit status, once the process has ended and all its lines are read."""
        status = self.process.wait(60)
        self.reader.join(60)
        return status

    def get(self, path: str, **more) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, verify=False, **more)

    def post(self, path: str, body=None, **more) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, verify=False, **more)

    def wait_until(self, condition: Callable[[dict], bool], seconds: float = 60.0) -> dict:
        """Wait for ``/server_info`` to fulfil a condition."""
        until = time.monotonic() + seconds
        while True:
            info = self.get("/server_info").json()
            if condition(info):
                return info
            assert time.monotonic() < until, info
            time.sleep(0.02)

    def metric(self, name: str) -> float:
        lines = [
            line for line in self.get("/metrics").text.splitlines() if line.startswith(f"headrace:{name}{{")
        ]
        return sum(float(line.split()[-1]) for line in lines)


@contextmanager
def serving(*flags: str, open_files: int = 0) -> Iterator[Server]:
    """A server on a free port, up when the block is entered and gone when it is left.

    ``open_files`` limits its open files (0: as this process).
    """
    command = ["-m", "headrace", "serve", "--port", "0", *SMALL, *flags]
    reading, writing = os.pipe()
    process = Forked(*command, output=writing, errors=writing)
    os.close(writing)
    if open_files:  # not by `preexec_fn`, for which a large test process would have to be copied
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (open_files, open_files))
    said: queue.Queue[str | None] = queue.Queue()
    lines: list[str] = []

    def listen() -> None:
        with open(reading) as text:
            for line in text:
                lines.append(line)
                said.put(line)
        said.put(None)

    reader = threading.Thread(target=listen, daemon=True)
    reader.start()
    try:
        url = ""
        until = time.monotonic() + START_SECONDS
        while not url:
            line = said.get(timeout=max(0.1, until - time.monotonic()))
            assert line is not None, "the server ended:\n" + "".join(lines)
            url = next(
                (word for word in line.split() if word.startswith(("http", "unix:")) and "ready" in line), ""
            )
        yield Server(process, url, lines, reader)
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The server that most tests share; they leave it idle."""
    with serving("--trust-request-chat-template") as running:
        yield running


@pytest.fixture(scope="session")
def strict_server() -> Iterator[Server]:
    """A server with narrow bounds: two keys, one slot, two places in the queue, two seconds."""
    flags = ["--api-key", "alpha", "--api-key", "beta", "--max-num-seqs", "1", "--max-num-queued-reqs", "2"]
    flags += ["--request-timeout", "2", "--max-body-bytes", "20000"]
    with serving(*flags) as running:
        yield running


@pytest.fixture(scope="module")
def session() -> Iterator[Browser]:
    """A browser for the tests of a file."""
    from tests.server.browser import browsing  # needs selenium, which only these tests have

    with browsing() as browser:
        yield browser
