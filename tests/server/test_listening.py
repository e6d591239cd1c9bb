"""The sockets at which a server and its processes listen: in each mode at loopback or at a configured address only."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.fleet.collectives import open_store
from tests.doubles.shared_stores import free_port
from tests.server.conftest import Server, serving

LISTEN = "0A"
UNCONNECTED = "07"
"""The state of a UDP socket that takes packets of anyone."""


def processes(root: int) -> Iterator[int]:
    """A process and all below it."""
    yield root
    for path in Path(f"/proc/{root}/task").glob("*/children"):
        for child in path.read_text().split():
            yield from processes(int(child))


def sockets(process: int) -> set[str]:
    """The inodes of a process's sockets."""
    found = set()
    for path in Path(f"/proc/{process}/fd").iterdir():
        try:
            target = os.readlink(path)
        except OSError:
            continue
        if target.startswith("socket:["):
            found.add(target[8:-1])
    return found


def address(text: str) -> str:
    """An address of /proc/net: words of 32 bits in the order of the machine."""
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    return str(ipaddress.ip_address(struct.pack(f"={len(words)}I", *words)))


def listening(root: int) -> set[str]:
    """The addresses at which a process and those below it listen."""
    own = set().union(*(sockets(each) for each in processes(root)))
    found = set()
    for kind, state in (("tcp", LISTEN), ("tcp6", LISTEN), ("udp", UNCONNECTED), ("udp6", UNCONNECTED)):
        for line in Path(f"/proc/{root}/net/{kind}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == state and fields[9] in own:
                found.add(address(fields[1].partition(":")[0]))
    return found


def answers(server: Server) -> None:
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 4}).status_code == 200


MODES = {
    "plain": ["--metrics-port", "0"],
    "tensor parallel": ["--tensor-parallel-size", "2"],
    "pipeline": ["--pipeline-parallel-size", "2"],
    "KV events": ["--kv-events-config", '{"endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}'],
    "KV transfer": [
        *(
            "--kv-transfer-config",
            json.dumps({"kv_connector": "SharedMemoryConnector", "kv_role": "kv_both", "kv_port": 0}),
        ),
        *("--kv-transfer-secret", "s"),
    ],
    "tuner": ["--tuner", "on", "--tuner-window", "1"],
}


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_listens_at_loopback_only(mode):
    with serving(*MODES[mode]) as server:
        answers(server)
        assert listening(server.process.pid) == {"127.0.0.1"}


def test_another_loopback_address_is_the_only_one(tmp_path):
    flags = ["--host", "127.0.0.3", "--metrics-port", "0", "--kv-events-config", '{"endpoint": "tcp://*:0"}']
    with serving(*flags) as server:
        assert listening(server.process.pid) == {"127.0.0.3"}


def test_launched_ranks_listen_at_the_address_of_rank_0(monkeypatch):
    port = free_port()
    given = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.2", "MASTER_PORT": str(port)}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HEADRACE_RANK_SECRET", "s")
    command = ["--tensor-parallel-size", "2"]
    other = os.environ | {"RANK": "1"}
    rank = subprocess.Popen(
        [sys.executable, "-m", "headrace", "serve", *command],
        env=other,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with serving(*command) as server:
            answers(server)
            assert listening(server.process.pid) == {"127.0.0.1", "127.0.0.2"}
            assert listening(rank.pid) <= {"127.0.0.1", "127.0.0.2"}
            assert server.stop() == 0
        assert rank.wait(60) == 0
    finally:
        rank.kill()
        rank.wait()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_the_store_of_ranks_listens_at_its_address(host):
    store = open_store(host)
    family, *_, where = socket.getaddrinfo(host, store.port, type=socket.SOCK_STREAM)[0]
    with socket.create_connection(where[:2], 5):
        pass
    other = "127.0.0.2" if family == socket.AF_INET else "127.0.0.1"
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((other, store.port), 5)
