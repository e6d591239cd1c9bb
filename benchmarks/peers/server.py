"""A contender's server: started once, and stopped with SIGSTOP while other contenders run.

So it cannot use a core between its turns, even if its threads wait by spinning (OpenMP) or polling. Its processes are
found by their parents, because some servers start engines in sessions of their own, which no signal to a group reaches.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx

from benchmarks.peers.processes import end, processes, send, stat_fields, state_of
from benchmarks.peers.vocabulary import read
from headrace.lab.bench.client import Endpoint, ServerTarget
from headrace.lab.bench.stats import Record
from headrace.lab.workload.work import Work

READY_SECONDS = 600.0
PATIENCE_SECONDS = 600.0


class StoppedServer:
    """A `stats.Target` whose process runs only within `run`."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], endpoint: Endpoint, rows: int) -> None:
        self.name = name
        self.endpoint = endpoint
        self._process = process
        self._target = ServerTarget(name, endpoint, rows)
        self._pause()

    @property
    def completed(self) -> int:
        return self._target.completed

    def run(self, work: Sequence[Work]) -> list[Record]:
        with self.turn():
            return self._target.run(work)

    def pids(self) -> list[int]:
        """The server's processes."""
        return processes(self._process.pid)

    def facts(self) -> dict[str, Any]:
        return {"resident MiB": sum(map(_resident_bytes, self.pids())) >> 20}

    def close(self) -> None:
        """Ends the process, and with it all that it started."""
        end(self._process)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Let the server run within this context."""
        send(self.pids(), signal.SIGCONT)
        try:
            yield
        finally:
            self._pause()

    def _pause(self) -> None:
        """Stops all processes, and returns once each has stopped or is found to have ended."""
        stopped = set[int]()
        while running := set(self.pids()) - stopped:  # one may be started while others are being stopped
            send(running, signal.SIGSTOP)
            for pid in running:
                while state_of(pid) not in "TtZX":
                    time.sleep(0.001)
            stopped |= running


def start(
    name: str,
    command: Sequence[str],
    port: int,
    ready: str,
    rows: int,
    environment: Mapping[str, str],
    extra: Mapping[str, Any],
) -> StoppedServer:
    """Starts ``command``, waits until ``ready`` answers 200, and stops it.

    Raises:
        RuntimeError: it ended, or was not ready in time; the message ends with the end of its log.
    """
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+b") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=dict(environment), start_new_session=True
        )
        try:
            deadline = time.monotonic() + READY_SECONDS
            while process.poll() is None and time.monotonic() < deadline:
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"{url}{ready}", timeout=5.0, trust_env=False).status_code == 200:
                        models = httpx.get(f"{url}/v1/models", trust_env=False).json()
                        model = models["data"][0]["id"]
                        endpoint = Endpoint(url, model, "", extra, PATIENCE_SECONDS)
                        return StoppedServer(name, process, endpoint, rows)
                time.sleep(0.2)
            log.seek(0)
            said = log.read()[-3000:].decode(errors="replace")
            raise RuntimeError(f"{name} was not ready: {said}")
        except (
            BaseException
        ):  # on an interrupt too: it has a session of its own, so no signal of the terminal ends it
            end(process, 0.0)
            raise


def exit_on_signals() -> None:
    """Lets a signal that ends this process unwind it, so that the servers are ended too."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup sets it
            signal.signal(number, lambda *_: sys.exit(1))


def first_tokens(endpoint: Endpoint, work: Work) -> list[int]:
    """The ids that a server answers ``work`` with: as ids where it says them, else read from `vocabulary`'s text."""
    tokens: list[int] = []
    with httpx.stream(
        "POST", endpoint.address(work), json=endpoint.body(work), timeout=120.0, trust_env=False
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:]).get("choices", ()):
                    tokens += choice.get("token_ids") or read(choice.get("text") or "")
    return tokens


def _resident_bytes(pid: int) -> int:
    fields = stat_fields(pid)
    return int(fields[21]) * os.sysconf("SC_PAGE_SIZE") if fields else 0
