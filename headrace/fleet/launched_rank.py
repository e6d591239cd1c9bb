"""A rank other than 0 that a launcher started: connects to rank 0, and starts the process that computes.

That process ends if any rank is lost; this one then connects again, until rank 0 has ended. A signal ends this one
only, because rank 0 may have requests to finish.
"""

from __future__ import annotations

import json
import logging
import select
import socket
import subprocess
import time
from pathlib import Path

from headrace.config import Launch
from headrace.fleet.launched import JOIN_SECONDS, SecretDiffers, meeting_point, prove, read_line, watch
from headrace.fleet.messages import versions
from headrace.fleet.others import RankFailed, start_process

RETRY_SECONDS = 0.5
"""Time between two attempts to reach rank 0."""

END_SECONDS = 5.0
"""Timeout for a process to end after rank 0 has closed the connection."""

logger = logging.getLogger(__name__)


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
