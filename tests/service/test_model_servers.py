"""Processes of models: small programs in place of servers."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys

import pytest

from headrace.service import model_servers
from headrace.service.model_servers import (
    ModelServer,
    ModelServers,
    ModelState,
    NotStarted,
    Report,
    Restarts,
    Started,
)

LISTENS = """
import json, socket, sys
channel = socket.socket(fileno=int(sys.argv[1]))
channel.sendall(json.dumps({"names": ["one", "also"], "device": "cpu", "total_bytes": 7}).encode() + b"\\n")
channel.recv(1)
"""
ENDS = "raise SystemExit(2)"


class Programs:
    """Starts the programs in turn, the last one again and again."""

    def __init__(self, *programs: str) -> None:
        self.programs = list(programs)
        self.started = 0

    def __call__(self) -> Started:
        ours, theirs = socket.socketpair()
        program = self.programs[min(self.started, len(self.programs) - 1)]
        self.started += 1
        with theirs:
            number = theirs.fileno()
            process = subprocess.Popen([sys.executable, "-c", program, str(number)], pass_fds=[number])
        return Started(process, ours)


def test_a_process_reports_its_names_and_ends_with_its_channel():
    server = ModelServer("folder", "/nowhere", Programs(LISTENS))
    assert (server.name, server.state) == ("folder", ModelState.RESTARTING)
    assert server.start() == Report(["one", "also"], "cpu", 7)
    assert (server.name, server.names, server.state) == ("one", ("one", "also"), ModelState.RUNNING)
    assert not server.ended()
    server.end(10.0)
    assert server.ended()


RELOADS = """
import json, signal, socket, sys
channel = socket.socket(fileno=int(sys.argv[1]))
channel.recv(1)
signal.signal(signal.SIGHUP, lambda *_: channel.sendall(b"reloaded"))
channel.sendall(json.dumps({"names": ["one"]}).encode() + b"\\n")
channel.recv(1)
"""


def test_a_reload_while_a_process_starts_reaches_it_when_it_listens():
    started = Programs(RELOADS)()
    server = ModelServer("folder", "/nowhere", lambda: started)
    server.reload()  # the signal would end a process that does not handle it yet
    started.channel.sendall(b"1")
    server.start()
    assert started.channel.recv(100) == b"reloaded"
    server.reload()
    assert started.channel.recv(100) == b"reloaded"
    server.end(10.0)


def test_a_process_that_ends_at_once_has_not_started():
    with pytest.raises(NotStarted, match="folder did not start"):
        ModelServer("folder", "/nowhere", Programs(ENDS)).start()


async def until(holds) -> None:
    for _ in range(2000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen")


def killed(programs: Programs) -> list[tuple[ModelState, bool, bool]]:
    """The first three states of a model whose process is killed, with well and ready of the server."""
    seen: list[tuple[ModelState, bool, bool]] = []

    class Watched(ModelServer):
        """Notes each state as it is set: a process may be started again before anybody looks."""

        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "state" and programs.started:
                health = servers.health()
                seen.append((self.state, health.well, health.ready))

    server = Watched("folder", "/nowhere", programs)
    servers = ModelServers([server, ModelServer("other", "/nowhere", Programs(LISTENS))])

    async def run() -> None:
        restarts = Restarts(servers)
        for each in servers.all:
            each.start()
        await restarts.start()
        os.kill(server.pid, signal.SIGKILL)
        await until(lambda: len(seen) == 3)
        await restarts.stop()

    try:
        asyncio.run(run())
    finally:
        servers.stop()
    return seen


def test_a_process_that_ends_is_started_again():
    programs = Programs(LISTENS, ENDS, LISTENS)
    assert killed(programs) == [
        (ModelState.RUNNING, True, True),
        (ModelState.RESTARTING, True, True),
        (ModelState.RUNNING, True, True),
    ]
    assert programs.started == 3


def test_a_model_that_cannot_be_started_again_has_failed(monkeypatch):
    monkeypatch.setattr(model_servers, "FIRST_DELAY_SECONDS", 0.001)
    programs = Programs(LISTENS, ENDS)
    states = killed(programs)
    assert states[-1] == (ModelState.FAILED, False, False)
    assert programs.started == 1 + model_servers.MOST_STARTS


def test_the_drain_ends_all_processes_and_starts_none_again():
    programs = Programs(LISTENS)
    servers = ModelServers([ModelServer("a", "/nowhere", programs), ModelServer("b", "/nowhere", programs)])

    async def run() -> bool:
        restarts = Restarts(servers)
        for each in servers.all:
            each.start()
        await restarts.start()
        drained = await servers.drain(5.0)
        await restarts.stop()
        return drained

    assert asyncio.run(run())
    assert all(each.ended() for each in servers.all)
    assert programs.started == 2
    assert servers.health().why == "draining"
    servers.stop()
