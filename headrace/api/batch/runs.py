"""Runs one batch to its end: runs its lines, writes errors for missing results, and makes its output files visible."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from headrace.api.batch.lines import (
    CANCELLED,
    EXPIRED,
    BadLine,
    BatchRequest,
    answered,
    over_quota,
    read_lines,
    refused,
    unexecuted,
)
from headrace.api.batch.store import (
    OUTPUT_PURPOSE,
    BatchRecord,
    BatchStatus,
    Contents,
    FileRecord,
    service_class,
)
from headrace.api.batch.work import Feed, SplitResults, result_line, run_lines

INPUT_MISSING = (
    {
        "code": "input_file_missing",
        "message": "The contents of the input file are no longer on the server's disk.",
        "param": "input_file_id",
        "line": None,
    },
)
"""The errors of a batch whose input file was deleted on the disk."""

SYNC_SECONDS = 2.0
"""Interval of syncing results to the disk: at most this much is lost in a power failure. The tenant's limit of bytes is
checked as often."""

FIRST_WAIT_SECONDS = 0.5
MAX_WAIT_SECONDS = 60.0


class Reply(NamedTuple):
    """The response to a line: HTTP status, request id, and body."""

    status: int
    request_id: str
    body: Any


class Busy(Exception):
    """The server rejects the line for now; retry it in ``seconds``."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"busy for {seconds:g} s")
        self.seconds = seconds


class Port(Protocol):
    """The server's endpoints, which run lines."""

    def draining(self) -> bool:
        """Whether the server is shutting down."""
        ...

    async def run(self, line: BatchRequest, tenant: str, service_class: str) -> Reply:
        """Run one line.

        Raises:
            Busy: the server rejects it for now.
        """
        ...


Change = Callable[[BatchRecord], BatchRecord]


class Store(Protocol):
    """Changes a batch in the store and adds files to it; returns the changed batch."""

    def __call__(
        self, batch: BatchRecord, change: Change, files: Sequence[FileRecord] = ()
    ) -> Awaitable[BatchRecord]: ...


class Run:
    """The run of ``batch``, which is in progress, finalizing or cancelling.

    It may be cancelled at any time and begun again. ``slots`` limit the running lines of all batches together, by
    service class. Once ``full`` says that the tenant's files have reached their limit, no further line runs.
    """

    def __init__(
        self,
        batch: BatchRecord,
        store: Store,
        contents: Contents,
        port: Port,
        slots: Mapping[str, asyncio.Semaphore],
        concurrency: int,
        clock: Callable[[], float],
        full: Callable[[str], Awaitable[bool]],
    ) -> None:
        self.tenant = batch.tenant
        self._full, self._over_quota = full, False
        self._batch = batch
        self._store = store
        self._contents = contents
        self._port = port
        self._concurrency = concurrency
        self._clock = clock
        self._class = service_class(batch, clock())
        self._slots = slots[self._class]
        self._input_missing = False
        self._ends = self._ending(batch, clock())
        self._results: SplitResults | None = None

    def live(self, batch: BatchRecord) -> BatchRecord:
        """``batch`` with the counts so far."""
        return batch if self._results is None else replace(batch, totals=self._results.totals)

    @property
    def nbytes(self) -> int:
        """Bytes of its results, which are no files of the tenant yet."""
        return 0 if self._results is None else self._results.nbytes

    def outdated(self, batch: BatchRecord, now: float) -> bool:
        """Whether the run must be restarted: the batch was cancelled or has expired, or its class has changed."""
        if self._ends is not None or batch.status is BatchStatus.FINALIZING:
            return False
        return self._ending(batch, now) is not None or service_class(batch, now) != self._class

    async def finish(self) -> None:
        """Run the batch to its end.

        Raises:
            OSError: files cannot be read or written.
            ResultsError: the output files cannot be used.
        """
        batch = self._batch
        if not batch.output_file_id:  # cancelled before it was validated
            await self._store(batch, lambda each: each.enter(BatchStatus.CANCELLED, self._clock()))
            return
        results = self._results = await self._open()
        try:
            if self._ends is not None:
                await asyncio.to_thread(self._write_unexecuted, results, self._ends)
            elif len(results.keys) < batch.total:
                self._input_missing = not self._input().exists()
                if not self._input_missing:
                    await self._run(results)
            await asyncio.to_thread(results.sync)
        finally:
            await asyncio.shield(asyncio.to_thread(results.close))
        await self._end(results)

    @staticmethod
    def _ending(batch: BatchRecord, now: float) -> str | None:
        """The error code of lines without a result, if the batch ends before all have run."""
        if batch.status is BatchStatus.CANCELLING:
            return CANCELLED
        expired = batch.status is BatchStatus.IN_PROGRESS and now >= batch.expires_at
        return EXPIRED if expired else None

    async def _open(self) -> SplitResults:
        """Open the output files, and read the results of earlier runs."""
        batch = self._batch
        paths = self._contents.path(batch.output_file_id), self._contents.path(batch.error_file_id)
        opening = asyncio.ensure_future(asyncio.to_thread(SplitResults, *paths))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                (await opening).close()
            raise

    async def _run(self, results: SplitResults) -> None:
        self._over_quota = await self._full(self.tenant)
        syncing = asyncio.get_running_loop().create_task(self._keep_synced(results))
        try:
            with self._input().open("rb") as file:
                await run_lines(
                    Feed(read_lines(file), results.keys), results, self._send, concurrency=self._concurrency
                )
        finally:
            syncing.cancel()
            await asyncio.wait([syncing])

    async def _keep_synced(self, results: SplitResults) -> None:
        while True:
            await asyncio.sleep(SYNC_SECONDS)
            self._over_quota = await self._full(self.tenant)
            await asyncio.to_thread(results.sync)
            await self._store(self._batch, self.live)

    async def _send(self, line: BatchRequest) -> dict[str, Any]:
        """Run one line until it has a result; a busy server is retried with increasing delays."""
        wait = FIRST_WAIT_SECONDS
        while True:
            async with self._slots:
                if self._over_quota:
                    return self._named(line.number, over_quota(line))
                try:
                    reply = await self._port.run(line, self._batch.tenant, self._class)
                    return self._named(line.number, answered(line, *reply))
                except Busy as busy:
                    seconds = min(max(wait, busy.seconds), MAX_WAIT_SECONDS)
            await asyncio.sleep(seconds)
            wait *= 2

    def _write_unexecuted(self, results: SplitResults, code: str) -> None:
        """Write the error ``code`` as the result of every line without one."""
        if not self._input().exists():
            return
        with self._input().open("rb") as file:
            for line in read_lines(file):
                if line.key not in results.keys:
                    result = refused(line) if isinstance(line, BadLine) else unexecuted(line, code)
                    named = self._named(line.number, result)
                    results.append(named, result_line(named))

    async def _end(self, results: SplitResults) -> None:
        """Make the output files visible and end the batch, in one transaction."""
        batch, now = self._batch, self._clock()
        if self._ends is None and not self._input_missing:
            batch = await self._store(batch, self._finalizing)
        outputs = [
            (batch.output_file_id, f"{batch.id}_output.jsonl"),
            (batch.error_file_id, f"{batch.id}_error.jsonl"),
        ]
        sizes = [self._contents.path(id).stat().st_size for id, _ in outputs]
        until = None if batch.output_seconds is None else int(now) + batch.output_seconds
        files = [
            FileRecord(id, batch.tenant, name, OUTPUT_PURPOSE, size, int(now), until)
            for (id, name), size in zip(outputs, sizes, strict=True)
            if size
        ]

        def ended(each: BatchRecord) -> BatchRecord:
            lost = self._input_missing and each.status is BatchStatus.IN_PROGRESS
            return each.enter(
                BatchStatus.FAILED if lost else _LAST[each.status],
                self._clock(),
                errors=INPUT_MISSING if lost else (),
                totals=results.totals,
                has_output=sizes[0] > 0,
                has_errors=sizes[1] > 0,
            )

        await self._store(batch, ended, files)
        for (id, _), size in zip(outputs, sizes, strict=True):
            if not size:
                await asyncio.to_thread(self._contents.remove, id)

    def _finalizing(self, batch: BatchRecord) -> BatchRecord:
        """Enter the state finalizing, as all lines have results; a batch that was just cancelled stays cancelling."""
        if batch.status is BatchStatus.IN_PROGRESS:
            return batch.enter(BatchStatus.FINALIZING, self._clock())
        return batch

    def _input(self) -> Path:
        return self._contents.path(self._batch.input_file_id)

    def _named(self, number: int, result: dict[str, Any]) -> dict[str, Any]:
        """``result`` with an id that no other batch has."""
        return result | {"id": f"batch_req_{self._batch.id.removeprefix('batch_')}_{number}"}


_LAST = {
    BatchStatus.FINALIZING: BatchStatus.COMPLETED,
    BatchStatus.CANCELLING: BatchStatus.CANCELLED,
    BatchStatus.IN_PROGRESS: BatchStatus.EXPIRED,
}
"""The final state of a batch whose output files are complete, by its state before."""
