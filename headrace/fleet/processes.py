"""Ranks other than 0 as processes that rank 0 starts on its machine."""

from __future__ import annotations

import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from headrace.fleet.others import Peer, Watched

END_SECONDS = 2.0
"""Longest wait for the exit code of a process that has closed its socket."""

_MAIN = (
    "import sys; sys.path.insert(0, sys.argv[1]); from headrace.fleet.worker_process import main;"
    " main(int(sys.argv[2]), sys.argv[3])"
)


def start_process(descriptor: int, own: str = "{}") -> subprocess.Popen[bytes]:
    """Start the process of a rank with its socket to rank 0; ``own`` is for `worker_process.main`."""
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
