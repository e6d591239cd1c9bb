"""The first lines between a launched rank and rank 0: short, with a deadline, and with a proof of the shared secret.

```
 rank ── nonce ──> rank 0        only with a secret; a stranger learns nothing before its proof
      <── nonce ──
      ── proof ──>
      <── proof ──
      ── one line of JSON ──> rank 0        always
```
A proof is an HMAC-SHA256 over both nonces. What follows is not encrypted.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time

from headrace.fleet.kv_transfer.wire import proof

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
