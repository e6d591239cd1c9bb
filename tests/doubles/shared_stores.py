"""Real Redis and Memcached servers on free ports, for as long as a block lasts; and free ports for other programs."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pytest

START_SECONDS = 60.0
PORTS = range(10_000, 30_000)[int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 8 :: 8]
"""Below those that the system gives to connections and to servers that ask for any port. Each worker has its own."""


@contextmanager
def patience() -> Iterator[None]:
    """Stores wait for a minute: on a slow machine a write would be given up, and what it kept a miss."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("tier.WRITE", "sqlite.BUSY", "redis.CONNECT", "memcached.SOCKET"):
            patch.setattr(f"headrace.response_cache.stores.{name}_SECONDS", 60.0)
        yield


@dataclass
class StoreServer:
    process: subprocess.Popen[bytes]
    port: int

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def program(name: str) -> str:
    """The program's path. Where tests run unwatched its absence is a failure, at somebody's desk a skip."""
    found = shutil.which(name)
    if found is None:
        message = f"{name} is not installed: apt-get install redis-server memcached"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    return found


def free_port() -> int:
    """A port for a program that must be told one: nothing else takes it before the program does."""
    while True:
        port = random.SystemRandom().choice(PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextmanager
def redis_server(port: int = 0) -> Iterator[StoreServer]:
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--save", "", "--appendonly", "no", "--bind", "127.0.0.1", "--dir", folder]
        with _running(lambda free: [program("redis-server"), "--port", str(free), *flags], port) as server:
            yield server


@contextmanager
def memcached_server(port: int = 0, *flags: str) -> Iterator[StoreServer]:
    def command(free: int) -> list[str]:
        return [program("memcached"), "-p", str(free), "-l", "127.0.0.1", "-U", "0", "-u", "nobody", *flags]

    with _running(command, port) as server:
        yield server


@contextmanager
def _running(command, port: int) -> Iterator[StoreServer]:
    port = port or free_port()
    process = subprocess.Popen(command(port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + START_SECONDS
        while True:
            assert process.poll() is None, "the server has ended"
            try:
                socket.create_connection(("127.0.0.1", port), 1.0).close()
                break
            except OSError:
                assert time.monotonic() < until, "the server does not listen"
                time.sleep(0.02)
        yield StoreServer(process, port)
    finally:
        process.kill()
        process.wait()
