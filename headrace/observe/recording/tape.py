"""Writes a trace to a file on a separate thread; the engine only puts moments into a queue."""

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

from headrace.files import private_opener
from headrace.observe.recording.moments import Moment
from headrace.observe.recording.wire import Scribe

logger = logging.getLogger(__name__)

MOST_WAITING = 100_000
"""Maximum number of queued moments. Beyond it, the recording stops, so that it does not fill memory."""


class Tape:
    """Writes moments to ``path`` (compressed if it ends in ``.gz``) until `close`, or until it has ``limit_bytes``.

    A replay needs everything since the start of the engine, so old entries are never dropped. At the limit the trace
    ends, with a last line in the file and a warning in the log, and serving continues.

    An existing file is overwritten when the first moment arrives, so a failed start keeps the last recording.

    Raises:
        BlockingIOError: another process writes to the file.
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self._path = path
        self._limit = limit_bytes
        self._raw = open(path, "ab", opener=private_opener)  # noqa: SIM115 (closed at the end)
        try:
            fcntl.flock(self._raw, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._raw.close()
            raise
        except OSError:
            pass  # the file system has no locks
        self._file: IO[bytes] | gzip.GzipFile = self._raw
        self._scribe = Scribe(secrets.token_bytes(32))
        self._queue: queue.SimpleQueue[Moment | None] = queue.SimpleQueue()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="headrace-tape", daemon=True)
        self._thread.start()

    def tell(self, moment: Moment) -> None:
        """Queue a moment."""
        if not self._stopped:
            self._queue.put(moment)

    def close(self, timeout: float = 10.0) -> None:
        """Write what is queued, and close the file."""
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
        except Exception as error:  # a full disk, most likely; it must not affect the engine
            self._stopped = True
            logger.warning("recording to %s stopped: %s", self._path, error)
        finally:
            self._queue = queue.SimpleQueue()  # release what is still queued

    def _stop(self, why: str) -> None:
        self._stopped = True
        self._write({"stopped": why})
        logger.warning("recording to %s stopped: %s; serving continues", self._path, why)

    def _write(self, line: dict[str, object]) -> None:
        # ASCII: if the process is killed, the last line may be incomplete, but never a character.
        self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
