"""Starts the collector process of `tests.doubles.collector` and reads its spans."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Collector:
    """A running collector; ``url`` is the endpoint to send spans to."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.url = f"http://127.0.0.1:{int(process.stdout.readline())}/v1/traces"
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(
            target=lambda: [self._lines.put(line) for line in process.stdout], daemon=True
        ).start()

    def spans(self, count: int, seconds: float = 60.0) -> list[dict[str, Any]]:
        """Wait for ``count`` spans."""
        return [json.loads(self._lines.get(timeout=seconds)) for _ in range(count)]


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector process while the block runs."""
    command = [sys.executable, "-m", "tests.doubles.collector"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield Collector(process)
    finally:
        process.kill()
        process.wait()
