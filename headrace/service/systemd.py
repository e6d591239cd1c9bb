"""Notifies systemd that the server is ready, alive or stopping, by sd_notify(3): one datagram per message."""

from __future__ import annotations

import logging
import socket

logger = logging.getLogger(__name__)


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
