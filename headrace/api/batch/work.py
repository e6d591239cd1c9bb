"""Runs the lines of a batch, a number at a time, and writes each result exactly once, whenever the process is killed.

``run-batch`` and the batches of a server use it. They pass a function that sends a line, and a sink for results.

A result counts when its line is complete in the file, including the line break. When the file is opened again, an
incomplete last line of a killed process is removed, and its request runs again. All other results are known by their
key, and their requests do not run again. Writes are not buffered, so a killed process loses nothing. ``fsync`` follows
in batches and limits the loss in a power failure.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import httpx

from headrace.api.batch.lines import (
    BadLine,
    BatchRequest,
    Line,
    answered,
    in_job_order,
    refused,
    result_key,
    succeeded,
    used,
    was_executed,
)
from headrace.api.batch.store import Totals
from headrace.api.replies import is_long, pieces
from headrace.files import private_file

SLICE = 64
"""Number of lines that are read at once."""

Send = Callable[[BatchRequest], Awaitable[dict[str, Any]]]
"""Runs one line and returns its result."""


class Sink(Protocol):
    """Receives results: `Results` or `SplitResults`."""

    def append(self, result: dict[str, Any], line: bytes) -> None: ...


class Feed:
    """The lines without a result, in job order.

    They are read, parsed and ordered on a worker thread, because a large batch takes seconds.
    """

    def __init__(self, lines: Iterator[Line], done: Collection[str]) -> None:
        known = frozenset(done)
        self._lines = in_job_order(line for line in lines if line.key not in known)
        self._read: deque[Line] = deque()
        self._reading = asyncio.Lock()

    async def take(self) -> Line | None:
        """The next line; None after the last one."""
        if not self._read:
            async with self._reading:
                if not self._read:
                    # Shielded: the thread cannot be interrupted, and nothing else may read meanwhile.
                    reading = asyncio.ensure_future(asyncio.to_thread(self._slice))
                    try:
                        await asyncio.shield(reading)
                    except asyncio.CancelledError:
                        await asyncio.wait([reading])
                        raise
        return self._read.popleft() if self._read else None

    def _slice(self) -> None:
        self._read.extend(islice(self._lines, SLICE))


async def run_lines(
    feed: Feed,
    sink: Sink,
    send: Send,
    *,
    concurrency: int,
    ended: Callable[[dict[str, Any]], None] = lambda result: None,
) -> None:
    """Run all lines of ``feed``, ``concurrency`` at a time; ``ended`` is called after a result is written.

    An exception of ``send`` or ``sink`` ends the run. Running lines are then cancelled and have no result.
    """

    async def work() -> None:
        while (line := await feed.take()) is not None:
            result = refused(line) if isinstance(line, BadLine) else await send(line)
            long = is_long(result)
            text = await asyncio.to_thread(result_line, result) if long else result_line(result)
            sink.append(result, text)
            ended(result)

    workers = [asyncio.create_task(work()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


def result_line(result: dict[str, Any]) -> bytes:
    """A result as a line of an output file. A lone surrogate becomes backslash-u and four digits, as in JSON."""
    return b"".join([*(piece.encode("utf-8", "backslashreplace") for piece in pieces(result)), b"\n"])


SYNC_LINES = 256
SYNC_SECONDS = 1.0


class ResultsError(ValueError):
    """An output file that cannot be continued."""


class Results:
    """An output file, open for appending and locked against a second run.

    Attributes:
        keys: the keys of the results in the file.
        failed: the number of them that are errors.
        totals: counts of completed and failed lines, and the tokens that they used.

    With ``syncs`` False, the owner calls `sync` itself, because the disk may take long.

    Raises:
        ResultsError: another process writes to the file, or it contains something other than results.
    """

    def __init__(self, path: str | Path, syncs: bool = True) -> None:
        self.path = Path(path)
        self.keys: set[str] = set()
        self.failed = 0
        self.totals = Totals()
        self._syncs = syncs
        self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115 (closed by close)
        try:
            self._lock()
            self._recover()
        except BaseException:
            self._file.close()
            raise
        self._unsynced = 0
        self._synced_at = time.monotonic()

    def __enter__(self) -> Results:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def append(self, result: dict[str, Any], line: bytes) -> None:
        """Write one result; ``line`` is its `result_line`.

        Raises:
            ResultsError: the file already has a result of this line, or cannot be written.
        """
        key = result_key(result)
        if key in self.keys:
            raise ResultsError(f"{self.path} already has a result for {key!r:.200}")
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise ResultsError(f"{self.path} cannot be written: {error.strerror}") from error
        self._count(key, result)
        self._unsynced += 1
        if not self._syncs:
            return
        if self._unsynced >= SYNC_LINES or time.monotonic() - self._synced_at >= SYNC_SECONDS:
            self.sync()

    @property
    def nbytes(self) -> int:
        """Size of the file while it is open."""
        return 0 if self._file.closed else os.fstat(self._file.fileno()).st_size

    def sync(self) -> None:
        """Flush what was written to the disk."""
        os.fsync(self._file.fileno())
        self._unsynced = 0
        self._synced_at = time.monotonic()

    def close(self) -> None:
        """Sync and close the file."""
        if not self._file.closed:
            self.sync()
            self._file.close()

    def _count(self, key: str, result: dict[str, Any]) -> None:
        self.keys.add(key)
        self.failed += not succeeded(result)
        self.totals = _added(self.totals, result)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ResultsError(f"another process is writing to {self.path}") from error

    def _recover(self) -> None:
        whole = 0  # bytes up to the end of the last whole line
        with open(self.path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    break
                result = _parse(line)
                if result is None:
                    raise ResultsError(
                        f"{self.path}, line {number}: not a result of a batch; is it the right file?"
                    )
                key = result_key(result)
                if key in self.keys:
                    raise ResultsError(f"{self.path}, line {number}: a second result for {key!r:.200}")
                self._count(key, result)
                whole += len(line)
        self._file.truncate(whole)


class SplitResults:
    """The two output files of a batch on a server: responses with status 200, and all other results.

    A line has one result in one of them. Syncing is left to the owner; it may happen on another thread.

    Only the server's user can read them.

    Raises:
        ResultsError: as `Results`, or both files have a result of the same line.
    """

    def __init__(self, output: Path, errors: Path) -> None:
        for each in (output, errors):
            private_file(each)
        self._output = Results(output, syncs=False)
        try:
            self._errors = Results(errors, syncs=False)
        except BaseException:
            self._output.close()
            raise
        self.keys = self._output.keys | self._errors.keys
        if len(self.keys) < len(self._output.keys) + len(self._errors.keys):
            self.close()
            raise ResultsError(f"{output} and {errors} have results of the same line")

    @property
    def totals(self) -> Totals:
        """Counts of completed and failed lines, and the tokens that they used."""
        return Totals(*map(sum, zip(self._output.totals, self._errors.totals, strict=True)))

    def append(self, result: dict[str, Any], line: bytes) -> None:
        """Write one result; ``line`` is its `result_line`.

        Raises:
            ResultsError: as `Results.append`.
        """
        key = result_key(result)
        if key in self.keys:
            raise ResultsError(f"there already is a result for {key!r:.200}")
        (self._output if succeeded(result) else self._errors).append(result, line)
        self.keys.add(key)

    @property
    def nbytes(self) -> int:
        """Size of both files."""
        return self._output.nbytes + self._errors.nbytes

    def sync(self) -> None:
        """Flush written results to the disk."""
        self._output.sync()
        self._errors.sync()

    def close(self) -> None:
        """Sync and release the files."""
        self._output.close()
        self._errors.close()


def _added(totals: Totals, result: dict[str, Any]) -> Totals:
    """``totals`` with one more result."""
    if not was_executed(result):
        return totals
    tokens = used(result)
    good = succeeded(result)
    return Totals(
        totals.completed + good,
        totals.failed + (not good),
        totals.prompt_tokens + tokens.prompt_tokens,
        totals.cached_tokens + tokens.cached_tokens,
        totals.completion_tokens + tokens.completion_tokens,
    )


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    is_result = isinstance(value, dict) and {"id", "custom_id", "response", "error"} <= value.keys()
    return value if is_result else None


BUSY = frozenset({429, 503})
BUSY_TRIES = 12
LOST_TRIES = 4
FIRST_WAIT_SECONDS = 0.5
MAX_WAIT_SECONDS = 60.0


class ServerGone(ConnectionError):
    """The server does not respond: the run ends, and the next run continues with the missing lines."""


class Outcome(NamedTuple):
    """The outcome of one line, for progress."""

    succeeded: bool
    prompt_tokens: int
    completion_tokens: int


async def run_batch(
    client: httpx.AsyncClient,
    lines: Iterator[BatchRequest | BadLine],
    results: Results,
    *,
    concurrency: int,
    ended: Callable[[Outcome], None],
    model: str | None = None,
) -> None:
    """Run all lines that have no result yet.

    Args:
        client: bound to the server (``base_url``), or to an application.
        lines: read ahead, and sent in the order that shares most prefixes.
        results: receives the results in the order in which they arrive.
        concurrency: number of concurrent requests.
        ended: called with each line's outcome after its result is written.
        model: sent instead of the lines' own ``model``.

    Raises:
        ServerGone: several attempts of a request could not reach the server, or its engine has failed.
    """
    await run_lines(
        Feed(lines, results.keys),
        results,
        partial(_send, client, model=model),
        concurrency=concurrency,
        ended=lambda result: ended(_outcome(result)),
    )


async def _send(client: httpx.AsyncClient, line: BatchRequest, *, model: str | None) -> dict[str, Any]:
    """Send until there is a response; a busy server is retried with increasing delays."""
    try:
        body = line.body if model is None else {**line.body, "model": model}
        request = client.build_request("POST", line.url, json=body)
    except (ValueError, RecursionError, httpx.InvalidURL) as error:  # NaN, a lone surrogate, nesting too deep
        return refused(BadLine(line.number, line.custom_id, f"line {line.number} cannot be sent: {error}"))
    wait = FIRST_WAIT_SECONDS
    busy = lost = 0
    while True:
        try:
            response = await client.send(request)
        except httpx.TransportError as error:
            lost += 1
            if lost == LOST_TRIES:
                raise ServerGone(f"no answer from {client.base_url}: {error!r}") from error
        else:
            if response.status_code == 500 and await _has_failed(client):
                raise ServerGone(f"the engine behind {client.base_url} has failed")
            busy += response.status_code in BUSY
            if response.status_code not in BUSY or busy == BUSY_TRIES:
                return answered(line, response.status_code, _request_id(response), _body(response))
            wait = max(wait, _retry_after(response))
        await asyncio.sleep(min(wait, MAX_WAIT_SECONDS))
        wait *= 2


async def _has_failed(client: httpx.AsyncClient) -> bool:
    """Whether a server error concerns all requests and not only this one."""
    try:
        return (await client.get("/health")).status_code == 503
    except httpx.TransportError:
        return True


def _body(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return response.text


def _request_id(response: httpx.Response) -> str:
    """The server's id of the request: from the header, or else the response's own id."""
    body = _body(response)
    fallback = body.get("id", "") if isinstance(body, dict) else ""
    return response.headers.get("x-request-id") or str(fallback)


def _retry_after(response: httpx.Response) -> float:
    try:
        return max(0.0, float(response.headers.get("retry-after", "0")))
    except ValueError:  # HTTP also allows a date: use our own waits
        return 0.0


def _outcome(result: dict[str, Any]) -> Outcome:
    tokens = used(result)
    return Outcome(succeeded(result), tokens.prompt_tokens, tokens.completion_tokens)
