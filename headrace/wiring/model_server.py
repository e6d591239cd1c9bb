"""The program of one model of several: a server at a Unix socket, started and ended by `wiring.models`.

It reads its options from a socket, its only argument, and reports there when it listens. Once the other end is closed,
it drains and ends.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from headrace.config import ConfigError, options
from headrace.service.model_servers import Report
from headrace.wiring.model import served_names
from headrace.wiring.server import Server, serve


def main() -> None:
    """Run the program."""
    began = time.perf_counter() - time.process_time()
    channel = socket.socket(fileno=int(sys.argv[1]))
    with channel.makefile("rb") as lines:
        given, file = json.loads(lines.readline())
    threading.Thread(target=_end_with, args=(channel,), name="headrace-channel", daemon=True).start()
    try:
        chosen = options(given, None if file is None else Path(file))

        def listens(server: Server) -> None:
            channel.sendall(json.dumps(report(server, served_names(chosen.model))._asdict()).encode() + b"\n")

        serve(chosen, began=began, listens=listens)
    except ConfigError as error:
        print(f"headrace: {chosen_name(given)}{error}", file=sys.stderr)
        raise SystemExit(2) from None


def chosen_name(given: dict[str, object]) -> str:
    """The model's name before a message."""
    return f"{given['model']}: " if "model" in given else ""


def report(server: Server, names: tuple[str, ...]) -> Report:
    """What the front learns of the model."""
    if (loaded := server.loaded) is None:
        return Report(names)
    plan = loaded.ledger
    room = plan.free_bytes + plan.weight_bytes + plan.process_bytes + plan.draft_weight_bytes
    return Report(names, plan.device, plan.total_bytes, room)


def _end_with(channel: socket.socket) -> None:
    """Drain when the other end is closed."""
    while channel.recv(1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
