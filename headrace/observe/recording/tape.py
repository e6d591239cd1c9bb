"""The file of a recording, written by a thread of its own: the engine only puts values into a queue."""

from __future__ import annotations

import fcntl
import gzip
import json
import logging
import queue
import secrets
import threading
from pathlib import Path
from typing import IO

from headrace.observe.recording.moments import Moment
from headrace.observe.recording.wire import Scribe

logger = logging.getLogger(__name__)

MOST_WAITING = 100_000
"""Moments that may wait to be written: more, and the recording ends rather than the memory."""


class Tape:
    """Writes moments to ``path`` (compressed if it ends in ``.gz``) until `close`, or until it has ``limit_bytes``.

    A replay needs all that happened since the engine began, so a recording is never cut at its start: it stops, with a
    last line and a warning in the log that say so, and serving goes on.

    What is in the file already is given up when the first moment comes, not before: a start that fails leaves the last
    recording, which may be of the crash that somebody wants to look at.

    Raises:
        BlockingIOError: another process writes to it.
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self._path = path
        self._limit = limit_bytes
        self._raw = path.open("ab")
        try:
            fcntl.flock(self._raw, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._raw.close()
            raise
        except OSError:
            pass  # a file system without locks
        self._file: IO[bytes] | gzip.GzipFile = self._raw
        self._scribe = Scribe(secrets.token_bytes(32))
        self._queue: queue.SimpleQueue[Moment | None] = queue.SimpleQueue()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="headrace-tape", daemon=True)
        self._thread.start()

    def tell(self, moment: Moment) -> None:
        """Have a moment written, soon."""
        if not self._stopped:
            self._queue.put(moment)

    def close(self, timeout: float = 10.0) -> None:
        """Write what waits, and end the file."""
        self._queue.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            moment = self._queue.get()
            if moment is not None:
                self._raw.seek(0)
                self._raw.truncate()
                if self._path.suffix == ".gz":
                    self._file = gzip.GzipFile(fileobj=self._raw, mode="wb")
            while moment is not None:
                self._write(self._scribe.line(moment))
                if self._queue.empty():
                    self._file.flush()
                if self._raw.tell() >= self._limit:
                    self._stop(f"the trace has reached {self._limit} bytes")
                    break
                if self._queue.qsize() > MOST_WAITING:
                    self._stop(f"more than {MOST_WAITING} moments waited to be written")
                    break
                moment = self._queue.get()
            self._file.close()
            self._raw.close()
        except Exception as error:  # a full disk, most likely: the engine must not notice
            self._stopped = True
            logger.warning("recording to %s stopped: %s", self._path, error)
        finally:
            self._queue = queue.SimpleQueue()  # what still waited would stay in memory as long as the server

    def _stop(self, why: str) -> None:
        self._stopped = True
        self._write({"stopped": why})
        logger.warning("recording to %s stopped: %s; serving goes on", self._path, why)

    def _write(self, line: dict[str, object]) -> None:
        # In ASCII a kill can cut a line, but no letter: what is left can be read.
        self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
