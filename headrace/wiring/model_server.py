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
from contextlib import suppress
from pathlib import Path

from headrace.config import ConfigError, Options, options
from headrace.service.model_servers import Report
from headrace.wiring.model import served_names
from headrace.wiring.server import Server, serve


def main() -> None:
    """Run the program."""
    began = time.perf_counter() - time.process_time()
    channel = socket.socket(fileno=int(sys.argv[1]))
    with channel.makefile("rb") as lines:
        given, file = json.loads(lines.readline())
    left = threading.Event()
    threading.Thread(target=_end_with, args=(channel, left), name="headrace-channel", daemon=True).start()
    try:
        chosen = _named(given, None if file is None else Path(file))

        def listens(server: Server) -> None:
            channel.sendall(json.dumps(report(server, served_names(chosen.model))._asdict()).encode() + b"\n")

        serve(chosen, began=began, listens=listens)
    except ConfigError as error:
        print(f"headrace: {chosen_name(given)}{error}", file=sys.stderr)
        raise SystemExit(2) from None
    finally:
        if left.is_set():
            _remove_folder(given["uds"])


def _named(given: dict[str, object], file: Path | None) -> Options:
    """The options of the model, whose log lines show its name.

    Raises:
        ConfigError: an option is wrong.
    """
    chosen = options(given, file)
    if chosen.observability.log_name:
        return chosen
    return options(given | {"log_name": served_names(chosen.model)[0]}, file)


def _remove_folder(path: str) -> None:
    """Remove the folder of a socket whose front has ended without removing it, once no process has a socket there."""
    with suppress(OSError):
        os.rmdir(os.path.dirname(path))


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


def _end_with(channel: socket.socket, left: threading.Event) -> None:
    """Drain when the other end is closed, and set ``left``."""
    with suppress(ConnectionError):
        while channel.recv(1):
            pass
    left.set()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
