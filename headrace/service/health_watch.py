"""Watches the health of the engine: logs a stall and its end, and keeps systemd informed.

It runs on the server's loop once a second. While the engine is stalled it sends no watchdog message, so that systemd
restarts a service that has `WatchdogSec`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Protocol

from headrace.service.service import Health

# Notifies systemd that the server is ready, alive or stopping, by sd_notify(3): one datagram per message.

logger = logging.getLogger("headrace.health")


class SystemdNotifier:
    """Sends messages to the socket ``address`` of a service with ``Type=notify``; without an address it does nothing.

    An address that begins with ``@`` is in the abstract namespace. A message that cannot be sent is logged once.
    """

    def __init__(self, address: str | None) -> None:
        self._address = "\0" + address[1:] if address and address.startswith("@") else address

    def send(self, message: str) -> None:
        """Send assignments such as ``READY=1``, separated by newlines."""
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
                channel.sendto(message.encode(), self._address)
        except OSError as error:
            logger.warning("systemd cannot be notified: %s", error.strerror or error)
            self._address = None


CHECK_SECONDS = 1.0


class Watched(Protocol):
    """What is watched: a service, or the processes of several models."""

    draining: bool

    def health(self) -> Health: ...


class HealthWatch:
    """Checks ``service`` every ``seconds``.

    ``watchdog`` is the interval in which systemd expects watchdog messages (None: it expects none); ``seconds`` is
    reduced to half of it.
    """

    def __init__(
        self,
        service: Watched,
        notifier: SystemdNotifier,
        watchdog: float | None = None,
        seconds: float = CHECK_SECONDS,
    ) -> None:
        self._service = service
        self._notifier = notifier
        self._watchdog = watchdog is not None
        self._seconds = seconds if watchdog is None else min(seconds, watchdog / 2)
        self._well = True
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to check, on the running loop."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop checking, and inform systemd that the server stops, unless it has been informed."""
        if self._task is not None:
            self._task.cancel()
        self._notify_stopping()

    def check(self) -> None:
        """Compare the engine's health with the last check."""
        health = self._service.health()
        if health.well != self._well:
            self._well = health.well
            fields = {"open_requests": health.progress.open_requests, "steps": health.progress.steps}
            if health.well:
                logger.warning("steps make progress again", extra={"fields": fields})
            else:
                logger.error("unhealthy: %s", health.why, extra={"fields": fields})
        if self._service.draining:
            self._notify_stopping()
        if self._watchdog and self._well:
            self._notifier.send("WATCHDOG=1")

    def _notify_stopping(self) -> None:
        if not self._stopping:
            self._stopping = True
            self._notifier.send("STOPPING=1")

    async def _run(self) -> None:
        while True:
            self.check()
            await asyncio.sleep(self._seconds)
