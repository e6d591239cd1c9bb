"""Rank 0's interface to the other ranks: messages, replies, heartbeats, and the handling of lost ranks.

A rank is lost if it closes its connection or sends no heartbeat for `SILENT_SECONDS`. Then the watcher ends all other
ranks, so that pending operations between ranks fail at once.
"""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from headrace.compute.mover import Copied
from headrace.core.plan import Move, Tier

SILENT_SECONDS = 8.0
"""A rank without a heartbeat for this time is lost."""

START_SECONDS = 120.0
"""Timeout for a rank's process to start and import its libraries."""

LOAD_SECONDS = 3600.0
"""Timeout for a rank to load its part of the model."""

logger = logging.getLogger(__name__)


class RankFailed(RuntimeError):
    """A rank cannot take part; the message has the rank and the reason."""


class Others(Protocol):
    """The ranks other than 0. Messages reach all of them, in order."""

    @property
    def address(self) -> str:
        """The address at which they reach rank 0."""
        ...

    def start(self) -> None:
        """Start all of them, after ending earlier ones. Raises RankFailed."""
        ...

    def send(self, messages: Sequence[bytes | None]) -> None:
        """A message to each rank, or none. Raises RankFailed."""
        ...

    def replies(self) -> list[dict[str, Any]]:
        """One reply of each rank, which may take as long as loading. Raises RankFailed."""
        ...

    def listen(self, heard: Callable[[int, Copied], None]) -> None:
        """Call ``heard`` with the rank for each finished disk copy from now on, from any thread."""
        ...

    def failure(self, seconds: float = 0.0) -> str:
        """Why the ranks are lost, or an empty text; waits up to ``seconds`` for the reason."""
        ...

    def stop(self) -> None:
        """End all of them."""
        ...

    def close(self) -> None:
        """End all of them, and do not start them again."""
        ...


class Peer(ABC):
    """A rank with its connection and its replies."""

    def __init__(self, rank: int, connection: Connection) -> None:
        self.rank = rank
        self.connection = connection
        self.started = False
        self.heard = time.monotonic()
        self.replies: deque[dict[str, Any]] = deque()

    @abstractmethod
    def end(self) -> None:
        """End the rank, from any thread; it may have ended."""

    @abstractmethod
    def ended(self) -> str:
        """How it ended, after its connection was closed."""

    def close(self) -> None:
        """Release the rank's resources after its end."""
        self.connection.close()

    def problem(self, now: float) -> str:
        """Why it is lost, or an empty text."""
        silent = now - self.heard
        if self.started and silent > SILENT_SECONDS:
            return f"rank {self.rank} has sent no heartbeat for {silent:.0f} s"
        if not self.started and silent > START_SECONDS:
            return f"rank {self.rank} did not start within {START_SECONDS:.0f} s"
        return ""


class Watched(ABC):
    """`Others` over one connection per rank, watched by a thread. Subclasses open the connections."""

    def __init__(self) -> None:
        self._peers: list[Peer] = []
        self._failure = ""
        self._heard: Callable[[int, Copied], None] = lambda rank, copied: None
        self._news = threading.Condition()
        self._watcher: threading.Thread | None = None

    @abstractmethod
    def open_peers(self) -> list[Peer]:
        """The ranks from 1 on. Raises RankFailed."""

    def start(self) -> None:
        self.stop()
        self._failure = ""
        self._peers = self.open_peers()
        self._watcher = threading.Thread(target=self._watch, name="headrace-ranks", daemon=True)
        self._watcher.start()
        self._until(lambda: all(each.started for each in self._peers), START_SECONDS)

    def send(self, messages: Sequence[bytes | None]) -> None:
        try:
            for each, message in zip(self._peers, messages, strict=True):
                if message is not None:
                    each.connection.send_bytes(message)
        except (OSError, ValueError) as error:
            raise RankFailed(self.failure(1.0) or str(error)) from error

    def replies(self) -> list[dict[str, Any]]:
        self._until(lambda: all(each.replies for each in self._peers), LOAD_SECONDS)
        return [each.replies.popleft() for each in self._peers]

    def listen(self, heard: Callable[[int, Copied], None]) -> None:
        self._heard = heard

    def failure(self, seconds: float = 0.0) -> str:
        with self._news:
            self._news.wait_for(lambda: self._failure, seconds)
            return self._failure

    def stop(self) -> None:
        with self._news:
            self._failure = self._failure or "the ranks were stopped"
        for each in self._peers:
            each.end()
        if self._watcher is not None:
            self._watcher.join()
        for each in self._peers:
            each.close()
        self._peers, self._watcher = [], None

    def close(self) -> None:
        self.stop()

    def _until(self, done: Callable[[], bool], seconds: float) -> None:
        with self._news:
            came = self._news.wait_for(lambda: self._failure or done(), seconds)
            if self._failure or not came:
                raise RankFailed(self._failure or f"a rank did not answer within {seconds:.0f} s")

    def _watch(self) -> None:
        by_connection = {each.connection: each for each in self._peers}
        while not self._failure:
            problem = ""
            for connection in wait(list(by_connection), 0.5):
                problem = problem or self._hear(by_connection[connection])  # type: ignore[index]
            now = time.monotonic()
            problem = problem or next(
                filter(None, (each.problem(now) for each in by_connection.values())), ""
            )
            if problem:
                self._lose(problem)

    def _hear(self, each: Peer) -> str:
        """Take one reply; returns why the rank is lost, or an empty text."""
        try:
            reply = each.connection.recv_bytes()
        except (EOFError, OSError):
            return each.ended()
        each.heard = time.monotonic()
        if reply[:1] == b"C":
            self._heard(each.rank, copied_of(reply[1:]))
            return ""
        if reply[:1] == b"E":
            return f"rank {each.rank}: {reply[1:].decode()}"
        with self._news:
            each.started = True
            if reply[:1] == b"R":
                each.replies.append(json.loads(reply[1:]))
            self._news.notify_all()
        return ""

    def _lose(self, problem: str) -> None:
        with self._news:
            if self._failure:
                return
            self._failure = problem
            self._news.notify_all()
        logger.warning("%s; all ranks end", problem)
        for each in self._peers:
            each.end()


def copied_message(copied: Copied) -> bytes:
    """The end of a copy as JSON."""
    return json.dumps([*copied.move, copied.checksum, copied.seconds]).encode()


def copied_of(message: bytes) -> Copied:
    """The inverse of `copied_message`."""
    source, target, source_tier, target_tier, checksum, seconds = json.loads(message)
    return Copied(Move(source, target, Tier(source_tier), Tier(target_tier)), checksum, seconds)


# Ranks other than 0 as processes that rank 0 starts on its machine.

END_SECONDS = 2.0
"""Longest wait for the exit code of a process that has closed its socket."""

_MAIN = (
    "import sys; sys.path.insert(0, sys.argv[1]); from headrace.fleet.worker import main;"
    " main(int(sys.argv[2]), sys.argv[3])"
)


def start_process(descriptor: int, own: str = "{}") -> subprocess.Popen[bytes]:
    """Start the process of a rank with its socket to rank 0; ``own`` is for `worker.main`."""
    root = str(Path(__file__).parents[2])
    # A separate process group: Ctrl-C reaches only the parent, which then ends this process.
    return subprocess.Popen(
        [sys.executable, "-c", _MAIN, root, str(descriptor), own],
        pass_fds=(descriptor,),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


class _Process(Peer):
    """A process and its socket."""

    def __init__(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = start_process(theirs.fileno())
        super().__init__(rank, Connection(ours.detach()))

    def end(self) -> None:
        self.process.kill()

    def ended(self) -> str:
        try:
            return f"rank {self.rank} ended with exit code {self.process.wait(END_SECONDS)}"
        except subprocess.TimeoutExpired:
            return f"rank {self.rank} closed its connection"

    def close(self) -> None:
        self.process.wait()
        super().close()


class Processes(Watched):
    """Ranks 1 to ``size - 1`` as processes of this machine."""

    address = "127.0.0.1"

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._processes: list[_Process] = []

    def open_peers(self) -> list[Peer]:
        self._processes = [_Process(rank) for rank in range(1, self._size)]
        return [*self._processes]

    @property
    def ids(self) -> list[int]:
        """The ids of the processes, by rank."""
        return [each.process.pid for each in self._processes]
