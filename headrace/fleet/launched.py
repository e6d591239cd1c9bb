"""Ranks other than 0 that torchrun or another launcher started, on this machine or others.

```
 launched_rank ── TCP to rank 0 ──> one line of JSON: rank, number of ranks, versions
               <── an empty line, or why it is refused
               then the messages of `worker_process`, which gets the socket
```
If a rank is lost, all of them close their connections and connect again, as at the start.
"""

from __future__ import annotations

import json
import select
import socket
import time
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection

from torch._C._distributed_c10d import TCPStore

from headrace.config import Launch
from headrace.fleet.others import Peer, RankFailed, Watched
from headrace.fleet.setup import versions

JOIN_SECONDS = 300.0
"""Timeout until all ranks have connected, at the start and after one was lost."""

HELLO_SECONDS = 5.0
"""Timeout for the first line of a connection."""

HELLO_BYTES = 4096
"""Maximum length of the first line."""

UNHEARD_MS = 10_000
"""A connection is lost if the other machine does not acknowledge data for this time."""


class Launched(Watched):
    """Listens for the ranks that ``launch`` announces.

    Raises:
        RankFailed: rank 0 cannot listen at its address.
    """

    def __init__(self, launch: Launch) -> None:
        super().__init__()
        self.address = launch.host
        self._size = launch.size
        port = 0 if launch.agent_store else launch.port
        try:
            family = socket.getaddrinfo(launch.host, port, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((launch.host, port), family=family, backlog=128)
        except OSError as error:
            raise RankFailed(
                f"rank 0 cannot listen at MASTER_ADDR {launch.host}, port {port}: {_reason(error)}"
            ) from error
        self._port = self._listener.getsockname()[1]
        if launch.agent_store:
            _agent_store(launch).set(_key(launch), str(self._port))

    def open_peers(self) -> list[Peer]:
        peers: dict[int, Peer] = {}
        until = time.monotonic() + JOIN_SECONDS
        try:
            while len(peers) < self._size - 1:
                self._listener.settimeout(max(0.01, until - time.monotonic()))
                connected, (address, *_) = self._listener.accept()
                with connected, suppress(OSError, ValueError, TypeError, LookupError):  # not a rank
                    if (rank := self._greet(connected, address, set(peers))) is not None:
                        peers[rank] = _Remote(rank, connected, address)
        except BaseException as error:
            for each in peers.values():
                each.close()
            if isinstance(error, TimeoutError):
                missing = ", ".join(str(rank) for rank in range(1, self._size) if rank not in peers)
                raise RankFailed(
                    f"rank {missing} did not connect to {self.address}, port {self._port}, within"
                    f" {JOIN_SECONDS:.0f} s"
                ) from None
            raise
        return [peers[rank] for rank in sorted(peers)]

    def close(self) -> None:
        super().close()
        self._listener.close()

    def _greet(self, connected: socket.socket, address: str, known: set[int]) -> int | None:
        """The rank of a new connection; None if it has disconnected or was rejected.

        Raises:
            RankFailed: it was started for another group of ranks, or with other versions.
            OSError, ValueError, TypeError, LookupError: it is not a rank.
        """
        connected.settimeout(HELLO_SECONDS)
        with connected.makefile("rb") as lines:
            hello = json.loads(lines.readline(HELLO_BYTES))
        rank = int(hello["rank"])
        if select.select([connected], [], [], 0)[0]:  # nothing more is said: closed
            return None
        problem = ""
        if hello["versions"] != versions():
            problem = f"rank {rank} at {address} has {hello['versions']}; rank 0 has {versions()}"
        elif hello["size"] != self._size or not 0 < rank < self._size:
            problem = (
                f"rank {rank} at {address} is one of {hello['size']} ranks; rank 0 is one of {self._size}"
            )
        elif rank in known:
            problem = f"rank {rank} at {address}: another process has the same rank"
        connected.sendall(problem.encode() + b"\n")
        if problem:
            raise RankFailed(problem)
        return rank


class _Remote(Peer):
    """A rank that connected."""

    def __init__(self, rank: int, connected: socket.socket, address: str) -> None:
        connected.settimeout(None)
        watch(connected)
        super().__init__(rank, Connection(connected.detach()))
        self._address = address

    def end(self) -> None:
        # The process ends when its connection does. Closing it here would pull it away from the watcher.
        with suppress(OSError), socket.socket(fileno=self.connection.fileno()) as borrowed:
            try:
                borrowed.shutdown(socket.SHUT_RDWR)
            finally:
                borrowed.detach()

    def ended(self) -> str:
        return f"rank {self.rank} at {self._address} closed its connection"


def meeting_point(launch: Launch) -> tuple[str, int]:
    """The address and port of rank 0; waits for rank 0 if they come from torchrun's store.

    Raises:
        RankFailed: the store does not respond, or rank 0 has not stored its port.
    """
    if not launch.agent_store:
        return launch.host, launch.port
    try:
        return launch.host, int(_agent_store(launch).get(_key(launch)))
    except RuntimeError as error:  # torch's for a store that says nothing
        raise RankFailed(
            f"rank 0 has not stored its port in torchrun's store at {launch.host}, port {launch.port}"
        ) from error


def watch(connection: socket.socket) -> None:
    """Enable keepalive, so that a connection ends if the other machine is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, UNHEARD_MS // 1000)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNHEARD_MS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _agent_store(launch: Launch) -> TCPStore:
    return TCPStore(launch.host, launch.port, is_master=False, timeout=timedelta(seconds=JOIN_SECONDS))


def _key(launch: Launch) -> str:
    return f"headrace/rank 0/{launch.attempt}"


def _reason(error: OSError) -> str:
    return (error.strerror or type(error).__name__).lower()
