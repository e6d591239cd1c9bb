"""systemd is notified over a datagram socket, as sd_notify(3) describes."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.service.systemd import SystemdNotifier


@pytest.fixture(params=["path", "abstract"])
def listener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        if request.param == "path":
            address = str(tmp_path / "notify")
            channel.bind(address)
        else:
            address = f"@headrace-test-{tmp_path.name}"
            channel.bind("\0" + address[1:])
        channel.settimeout(10)
        yield channel, address


def test_messages_arrive(listener: tuple[socket.socket, str]) -> None:
    channel, address = listener
    notifier = SystemdNotifier(address)
    notifier.send("READY=1")
    notifier.send("STOPPING=1")
    assert (channel.recv(100), channel.recv(100)) == (b"READY=1", b"STOPPING=1")


@pytest.mark.parametrize("address", [None, ""])
def test_without_systemd_nothing_is_sent(address: str | None, caplog) -> None:
    SystemdNotifier(address).send("READY=1")
    assert not caplog.records


def test_a_socket_that_is_gone_is_reported_once(tmp_path: Path, caplog) -> None:
    notifier = SystemdNotifier(str(tmp_path / "none"))
    notifier.send("READY=1")
    notifier.send("WATCHDOG=1")
    assert [record.getMessage() for record in caplog.records] == [
        "systemd cannot be notified: No such file or directory"
    ]
