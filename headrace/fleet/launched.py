"""Ranks other than 0 that torchrun or another launcher started, on this machine or others.

```
 rank          ── TCP to rank 0 ──> with a secret: its proof, see `prove`
               ──> one line of JSON: rank, number of ranks, versions
               <── an empty line, or why it is refused
               then the messages of `worker`, which gets the socket
```
A connection that does not prove the secret never ends a start, whatever it says; without a secret (one machine), no
connection does. If a rank is lost, all of them close their connections and connect again, as at the start. This file
has both sides: `Launched` is that of rank 0, and `run_rank` runs any other rank.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
import secrets
import select
import socket
import subprocess
import time
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from torch._C._distributed_c10d import TCPStore

from headrace.config import Launch
from headrace.fleet.kv_transfer.wire import proof
from headrace.fleet.messages import versions
from headrace.fleet.others import Peer, RankFailed, Watched, start_process

# The first lines between a launched rank and rank 0: short, with a deadline, and with a proof of the shared secret.
#
#  rank ── nonce ──> rank 0        only with a secret; a stranger learns nothing before its proof
#       <── nonce ──
#       ── proof ──>
#       <── proof ──
#       ── one line of JSON ──> rank 0        always
# A proof is an HMAC-SHA256 over both nonces. What follows is not encrypted.

LINE_BYTES = 4096
"""Maximum length of a line."""

NEEDED = "the secret of --rank-secret is needed; nonce "
"""What rank 0 sends before its nonce: a rank without a secret shows it as the reason of its end."""

RANK, RANK_0 = "rank", "rank 0"


class SecretDiffers(Exception):
    """The other side does not know the secret."""


def read_line(connection: socket.socket, until: float | None) -> bytes:
    """One line, without its end, by the monotonic time ``until`` (None: whenever it comes).

    Raises:
        OSError: the connection was closed, the time is over, or the line is too long.
    """
    line = bytearray()
    while not line.endswith(b"\n"):
        connection.settimeout(None if until is None else max(0.001, until - time.monotonic()))
        part = connection.recv(1)  # nothing behind the line may be read
        if not part:
            raise ConnectionError("the connection was closed")
        line += part
        if len(line) > LINE_BYTES:
            raise ConnectionError("the line is too long")
    return bytes(line[:-1])


def verify(connection: socket.socket, secret: str, until: float) -> None:
    """Rank 0's part: verify that a rank knows the secret, then prove the same to it.

    Raises:
        SecretDiffers: it does not.
        OSError: as `read_line`.
    """
    theirs, mine = read_line(connection, until), secrets.token_hex(16)
    connection.sendall(f"{NEEDED}{mine}\n".encode())
    nonces = f"{theirs.decode(errors='replace')} {mine}"
    _compare(read_line(connection, until), secret, RANK, nonces)
    connection.sendall(proof(secret.encode(), RANK_0, nonces, None).encode() + b"\n")


def prove(connection: socket.socket, secret: str, until: float) -> None:
    """A rank's part of `verify`.

    Raises:
        SecretDiffers: rank 0 does not know the secret, or has closed the connection because this rank does not.
        OSError: as `read_line`.
    """
    mine = secrets.token_hex(16)
    connection.sendall(mine.encode() + b"\n")
    theirs = read_line(connection, until).decode(errors="replace").removeprefix(NEEDED)
    nonces = f"{mine} {theirs}"
    connection.sendall(proof(secret.encode(), RANK, nonces, None).encode() + b"\n")
    try:
        answer = read_line(connection, until)
    except ConnectionError as error:
        raise SecretDiffers from error
    _compare(answer, secret, RANK_0, nonces)


def _compare(sent: bytes, secret: str, side: str, nonces: str) -> None:
    if not hmac.compare_digest(sent, proof(secret.encode(), side, nonces, None).encode()):
        raise SecretDiffers


JOIN_SECONDS = 300.0
"""Timeout until all ranks have connected, at the start and after one was lost."""

HELLO_SECONDS = 5.0
"""Timeout for the first lines of a connection."""

ACCEPT_SECONDS = 0.05
"""How often rank 0 looks for ranks that have been greeted."""

MOST_GREETED = 16  # see docs/decisions/security.md#secret-of-launched-ranks
"""Maximum connections that are greeted at once."""

MOST_PENDING = 128
"""Maximum connections that are or wait to be greeted; further ones are closed, and a rank tries again."""

UNHEARD_MS = 10_000
"""A connection is lost if the other machine does not acknowledge data for this time."""

logger = logging.getLogger(__name__)


class Launched(Watched):
    """Listens for the ranks that ``launch`` announces.

    Raises:
        RankFailed: rank 0 cannot listen at its address.
    """

    def __init__(self, launch: Launch) -> None:
        super().__init__()
        self.address = launch.host
        self._size = launch.size
        self._secret = launch.secret
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
        greeting = ThreadPoolExecutor(MOST_GREETED, "headrace-hello")  # a silent stranger holds up no rank
        pending: set[Future[_Hello | None]] = set()
        try:
            while len(peers) < self._size - 1:
                if time.monotonic() > until:
                    raise self._missing(peers)
                self._accept(greeting, pending)
                done = {each for each in pending if each.done()}
                pending -= done
                for hello in filter(None, (each.result() for each in done)):
                    self._admit(hello, peers)
        except BaseException:
            for each in peers.values():
                each.close()
            raise
        finally:
            greeting.shutdown(wait=False)
            for late in pending:
                late.add_done_callback(_leave)
        return [peers[rank] for rank in sorted(peers)]

    def close(self) -> None:
        super().close()
        self._listener.close()

    def _accept(self, greeting: ThreadPoolExecutor, pending: set[Future[_Hello | None]]) -> None:
        """Wait shortly for a connection, and greet it on a thread of its own."""
        self._listener.settimeout(ACCEPT_SECONDS)
        try:
            connected, (address, *_) = self._listener.accept()
        except OSError:  # none came, or it has gone already
            return
        if len(pending) < MOST_PENDING:
            pending.add(greeting.submit(self._greet, connected, address))
        else:
            connected.close()

    def _greet(self, connected: socket.socket, address: str) -> _Hello | None:
        """What a new connection says of itself; None if it has disconnected, or is not a rank."""
        until = time.monotonic() + HELLO_SECONDS
        try:
            if self._secret:
                verify(connected, self._secret, until)
            said = json.loads(read_line(connected, until))
            hello = _Hello(
                int(said["rank"]), int(said["size"]), str(said["versions"])[:100], connected, address
            )
            if not select.select([connected], [], [], 0)[0]:  # nothing more is said; else it has closed
                return hello
        except SecretDiffers:
            logger.warning("a connection from %s is no rank: its secret differs (--rank-secret)", address)
        except (OSError, ValueError, TypeError, LookupError, RecursionError, OverflowError):
            logger.info("a connection from %s is no rank", address)
        connected.close()
        return None

    def _admit(self, hello: _Hello, peers: dict[int, Peer]) -> None:
        """Make a connection a rank, or tell it why not.

        Raises:
            RankFailed: it knows the secret, and was started for another group of ranks, or with other versions.
        """
        rank, address = hello.rank, hello.address
        problem = ""
        if hello.versions != versions():
            problem = f"rank {rank} at {address} has {hello.versions}; rank 0 has {versions()}"
        elif hello.size != self._size or not 0 < rank < self._size:
            problem = f"rank {rank} at {address} is one of {hello.size} ranks; rank 0 is one of {self._size}"
        elif rank in peers:
            problem = f"rank {rank} at {address}: another process has the same rank"
        with suppress(OSError):  # the connection is found lost later
            hello.connected.sendall(problem.encode(errors="replace") + b"\n")
        if not problem:
            peers[rank] = _Remote(rank, hello.connected, address)
            return
        hello.connected.close()
        if self._secret:
            raise RankFailed(problem)
        logger.warning("%r was refused; rank 0 waits for the right one", problem)  # may be any process's

    def _missing(self, peers: Collection[int]) -> RankFailed:
        missing = ", ".join(str(rank) for rank in range(1, self._size) if rank not in peers)
        return RankFailed(
            f"rank {missing} did not connect to {self.address}, port {self._port}, within {JOIN_SECONDS:.0f} s"
        )


class _Hello(NamedTuple):
    """What a connection said of itself."""

    rank: int
    size: int
    versions: str
    connected: socket.socket
    address: str


def _leave(greeted: Future[_Hello | None]) -> None:
    """Close a connection that is no longer awaited."""
    hello = None if greeted.cancelled() else greeted.result()
    if hello is not None:
        hello.connected.close()


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


def is_loopback(host: str) -> bool:
    """Whether a host leads to this machine only; False if it has no address."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(each[4][0]).partition("%")[0]).is_loopback for each in found)


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


# -- a rank other than 0
#
# It connects to rank 0, and starts the process that computes. That process ends if any rank is lost; this one then
# connects again, until rank 0 has ended. A signal ends this one only, because rank 0 may have requests to finish.

RETRY_SECONDS = 0.5
"""Time between two attempts to reach rank 0."""

END_SECONDS = 5.0
"""Timeout for a process to end after rank 0 has closed the connection."""


def run_rank(launch: Launch, folder: Path) -> None:
    """Run rank ``launch.rank`` with the model in ``folder``; returns when rank 0 has ended.

    Raises:
        RankFailed: rank 0 cannot be reached, or rejects this rank.
    """
    host, port = meeting_point(launch)
    took_part, until = False, time.monotonic() + JOIN_SECONDS
    while (connection := _reach(host, port, 0.0 if took_part else JOIN_SECONDS)) is not None:
        with connection:
            if not _greet(connection, launch):
                if not took_part and time.monotonic() > until:
                    raise RankFailed(
                        f"rank 0 at {host}, port {port} has no place for it; is the secret the same?"
                    )
                time.sleep(RETRY_SECONDS)
                continue
            logger.info(
                "rank %d of %d takes part; rank 0 is at %s, port %d", launch.rank, launch.size, host, port
            )
            took_part = True
            own = {
                "folder": str(folder),
                "address": connection.getsockname()[0],
                "local_rank": launch.local_rank,
            }
            code = _compute(connection, json.dumps(own))
            logger.info("the process of rank %d ended with exit code %d", launch.rank, code)
    logger.info("rank 0 has ended, and rank %d with it", launch.rank)


def _reach(host: str, port: int, seconds: float) -> socket.socket | None:
    """Connect to rank 0 within ``seconds``; None if it has ended, which only a rank that took part can know."""
    until = time.monotonic() + seconds
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=10.0)
        except ConnectionRefusedError as error:
            if not seconds:
                return None
            problem: OSError = error
        except OSError as error:
            problem = error
        else:
            connection.settimeout(None)
            watch(connection)
            return connection
        if time.monotonic() > until:
            reason = (problem.strerror or str(problem)).lower()
            raise RankFailed(f"rank 0 cannot be reached at {host}, port {port}: {reason}")
        time.sleep(RETRY_SECONDS)


def _greet(connection: socket.socket, launch: Launch) -> bool:
    """Register with rank 0 and wait for its start. False if rank 0 ended meanwhile. Raises RankFailed."""
    hello = {"rank": launch.rank, "size": launch.size, "versions": versions()}
    try:
        if launch.secret:
            prove(connection, launch.secret, time.monotonic() + JOIN_SECONDS)
        connection.sendall(json.dumps(hello).encode() + b"\n")
        answer = read_line(connection, None)
    except SecretDiffers:
        raise RankFailed("its secret is not that of rank 0 (--rank-secret)") from None
    except OSError:
        return False
    if answer.strip():
        raise RankFailed(f"rank 0 rejected this rank: {answer.decode(errors='replace').strip()}")
    return True


def _compute(connection: socket.socket, own: str) -> int:
    """Start the process that computes, and wait until it or the connection has ended; returns its exit code."""
    process = start_process(connection.fileno(), own)
    try:
        poll = select.poll()
        poll.register(connection, select.POLLRDHUP)
        while process.poll() is None and not poll.poll(200):
            pass
        return process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        return -9  # it hung and was killed
    finally:
        process.kill()
        process.wait()
