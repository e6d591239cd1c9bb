"""The process of one rank other than 0: `processes` or `launched_rank` starts it with a socket to rank 0.

It reads messages from the socket and writes replies: ``b"."`` as a heartbeat each second, ``b"R"`` with JSON, ``b"C"``
with a finished disk copy, or ``b"E"`` with an error before it ends. It ends when rank 0 ends.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from multiprocessing.connection import Connection

from headrace.compute.device import keep_freed_memory
from headrace.fleet.others import copied_message
from headrace.fleet.worker import Worker

BEAT_SECONDS = 1.0
"""Time between two heartbeats."""

logger = logging.getLogger(__name__)


class _Replies:
    """The socket for replies, shared by the computing thread and the heartbeat thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, reply: bytes) -> None:
        with self._lock:
            self._connection.send_bytes(reply)

    def beat(self) -> None:
        """Send heartbeats until rank 0 has gone; then end the process, which may be waiting for another rank."""
        ended = threading.Event()
        try:
            while not ended.wait(BEAT_SECONDS):
                self.send(b".")
        except OSError:
            os._exit(1)


def main(descriptor: int, own: str) -> None:
    """Handle the messages of a socket until it is closed; ``own`` is the argument of `Worker`, as JSON."""
    connection = Connection(descriptor)
    replies = _Replies(connection)
    replies.send(b".")
    threading.Thread(target=replies.beat, name="headrace-beat", daemon=True).start()
    keep_freed_memory()
    worker = Worker(lambda copied: replies.send(b"C" + copied_message(copied)), json.loads(own))
    try:
        while True:
            reply = worker.answer(connection.recv_bytes())
            if reply is not None:
                replies.send(b"R" + json.dumps(reply).encode())
    except EOFError:
        os._exit(0)  # without waiting for threads of the process groups
    except Exception as error:
        replies.send(b"E" + f"{type(error).__name__}: {error}".encode())
        os._exit(1)
