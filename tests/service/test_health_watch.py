"""A stall and its end are logged once, and the watchdog is silent in between."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.service.health_watch import HealthWatch, SystemdNotifier
from headrace.service.service import Health
from headrace.service.thread import Progress


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


class Notifier:
    def __init__(self) -> None:
        self.sent: list[str] = []

    def send(self, message: str) -> None:
        self.sent.append(message)


def scene(watchdog: float | None = 10.0):
    service = SimpleNamespace(draining=False, well=True)
    service.health = lambda: Health(
        service.well, True, "" if service.well else "no step", Progress(True, 7, 2, 0, "")
    )
    notifier = Notifier()
    return service, notifier, HealthWatch(service, notifier, watchdog)


@pytest.fixture(autouse=True)
def _levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace")


def test_a_stall_and_its_end_are_logged_once_each(caplog) -> None:
    service, notifier, watch = scene()
    watch.check()
    service.well = False
    watch.check()
    watch.check()
    service.well = True
    watch.check()
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("ERROR", "unhealthy: no step"),
        ("WARNING", "steps make progress again"),
    ]
    assert caplog.records[0].fields == {"open_requests": 2, "steps": 7}
    assert notifier.sent == ["WATCHDOG=1"] * 2


def test_the_drain_is_announced_once() -> None:
    async def life() -> list[str]:
        service, notifier, watch = scene(watchdog=None)
        watch.start()
        await asyncio.sleep(0)
        service.draining = True
        watch.check()
        watch.check()
        await watch.stop()
        return notifier.sent

    assert asyncio.run(life()) == ["STOPPING=1"]


def test_the_watchdog_is_served_twice_in_its_interval() -> None:
    assert scene(watchdog=0.5)[2]._seconds == 0.25
    assert scene(watchdog=60.0)[2]._seconds == 1.0
