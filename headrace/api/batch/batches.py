"""The batches of a server: accepts files and batches, runs them, and reports their progress.

```
 routes ── create, cancel, upload … ──> store (one thread)
                                          │ every TICK_SECONDS, and after a restart
        validate ──> run up to RUNS batches, one per tenant ──> output and error file ──> completed
```
A batch's state is in the store, and each result is in its output files as soon as it is written. So a killed process
loses no result: the next one reads the output files and runs the lines without a result. `Port` runs a line, so this
file handles neither request formats nor models.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Container, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from headrace.api.batch.lines import Validation
from headrace.api.batch.runs import INPUT_MISSING, Port, Run
from headrace.api.batch.store import (
    CLASSES,
    DAY,
    INPUT_PURPOSE,
    BatchRecord,
    BatchStatus,
    BatchStore,
    Contents,
    FileRecord,
    Limits,
    QuotaExceeded,
    Upload,
)

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.2
"""Interval at which new batches, expiry and shutdown are checked."""

RUNS = 8
"""Maximum batches that run at once, one per tenant."""

RETRY_SECONDS = 30.0
"""Delay before a batch is retried after a failure of the server, such as a full disk."""

EXPIRE_FILES_SECONDS = 60.0

UPLOADS = 4
"""Maximum concurrent uploads of one tenant: they use disk space before they count against its limit."""

FILE_SECONDS = 30 * DAY
"""Default lifetime of a file, as at OpenAI."""

ResultT = TypeVar("ResultT")


class Bounds(NamedTuple):
    """Limits for all tenants: ``file_bytes`` of a file, ``line_bytes`` of a line, ``lines`` of a batch, and
    ``concurrency``: lines that run at once.
    """

    file_bytes: int
    line_bytes: int
    lines: int
    concurrency: int


class Batches:
    """All files and batches of a server; ``clock`` is Unix time.

    Raises:
        OSError: the folder cannot be used.
    """

    def __init__(
        self, folder: Path, port: Port, limits: Limits, bounds: Bounds, clock: Callable[[], float]
    ) -> None:
        self.bounds = bounds
        self.clock = clock
        self._limits = limits
        self.contents = Contents(folder)
        self._store = BatchStore(self.contents.database, limits)
        self.contents.tidy(self._store.file_ids())
        self._port = port
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="headrace-batches")
        # Separate, because lines that wait for idle time must not block lines that need not wait.
        self._slots = {name: asyncio.Semaphore(bounds.concurrency) for name in CLASSES}
        self._uploads = Counter[str]()
        self._runs: dict[str, tuple[Run, asyncio.Task[None]]] = {}
        self._rest_until: dict[str, float] = {}
        self._wake = asyncio.Event()
        self._work_task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to run batches, on the running loop."""
        self._work_task = asyncio.get_running_loop().create_task(self._work())

    async def stop(self) -> None:
        """Stop all runs, and release the folder."""
        if self._work_task is not None:
            self._work_task.cancel()
            await asyncio.wait([self._work_task])
        await self._stop_runs(list(self._runs))
        await self._on_thread(self._store.close)
        self._thread.shutdown()
        self.contents.close()

    # files

    @asynccontextmanager
    async def upload(self, tenant: str) -> AsyncIterator[Upload]:
        """A file to receive; it is deleted after the block, unless `add_file` has stored it.

        Raises:
            QuotaExceeded: the tenant may not store another file, or has too many concurrent uploads.
        """
        if self._uploads[tenant] >= UPLOADS:
            raise QuotaExceeded(f"the tenant already sends {UPLOADS} files")
        self._uploads[tenant] += 1
        try:
            await self._on_thread(self._store.check_upload, tenant, 0)
            upload = await self._on_thread(self.contents.upload)
            try:
                yield upload
            finally:
                await asyncio.shield(self._on_thread(upload.drop))
        finally:
            self._uploads[tenant] -= 1
            self._uploads += Counter()  # forgets tenants without uploads

    async def add_file(self, tenant: str, upload: Upload, filename: str, seconds: int | None) -> FileRecord:
        """Store a received file for ``seconds`` (None: the default lifetime).

        Raises:
            QuotaExceeded: it exceeds the tenant's limits.
        """
        now = int(self.clock())
        file = FileRecord(
            f"file-{secrets.token_hex(12)}",
            tenant,
            filename,
            INPUT_PURPOSE,
            upload.nbytes,
            now,
            now + (FILE_SECONDS if seconds is None else seconds),
        )

        def keep() -> None:
            try:
                self._store.check_upload(tenant, upload.nbytes)
                upload.keep(self.contents.path(file.id))
                self._store.add_file(file)
            except BaseException:
                self.contents.remove(file.id)
                raise

        await asyncio.to_thread(upload.sync)
        await self._on_thread(keep)
        return file

    async def file(self, tenant: str, id: str) -> FileRecord:
        """One file; raises `NotFound`."""
        return await self._on_thread(self._store.file, tenant, id)

    async def files(
        self, tenant: str, *, limit: int, after: str | None, purpose: str | None, newest_first: bool
    ) -> list[FileRecord]:
        """A page of a tenant's files; raises `NotFound` for ``after``."""
        return await self._on_thread(
            partial(
                self._store.files,
                tenant,
                limit=limit,
                after=after,
                purpose=purpose,
                newest_first=newest_first,
            )
        )

    async def remove_file(self, tenant: str, id: str) -> None:
        """Delete a file; raises `NotFound` or `FileInUse`."""
        await self._on_thread(self._store.remove_file, tenant, id)
        await self._on_thread(self.contents.remove, id)

    # batches

    async def create(self, batch: BatchRecord) -> BatchRecord:
        """Accept a batch; raises `NotFound` or `QuotaExceeded`."""
        await self._on_thread(self._store.add_batch, batch)
        self._wake.set()
        return batch

    async def batch(self, tenant: str, id: str) -> BatchRecord:
        """One batch with its current counts; raises `NotFound`."""
        return self._live(await self._on_thread(self._store.batch, tenant, id))

    async def batches(self, tenant: str, *, limit: int, after: str | None) -> list[BatchRecord]:
        """A page of a tenant's batches, newest first; raises `NotFound` for ``after``."""
        page = await self._on_thread(partial(self._store.batches, tenant, limit=limit, after=after))
        return [self._live(batch) for batch in page]

    async def cancel(self, tenant: str, id: str) -> BatchRecord:
        """Cancel a batch; if it is being cancelled already, do nothing.

        Raises:
            NotFound: the tenant has no such batch.
            ValueError: it has ended, or all its lines have ended.
        """

        def change(batch: BatchRecord) -> BatchRecord:
            if batch.status in (BatchStatus.CANCELLING, BatchStatus.CANCELLED):
                return batch
            return batch.enter(BatchStatus.CANCELLING, self.clock())

        batch = await self._on_thread(self._store.change, tenant, id, change)
        self._wake.set()
        return self._live(batch)

    # running

    def _live(self, batch: BatchRecord) -> BatchRecord:
        """``batch`` with the counts of its run, if it is running."""
        known = self._runs.get(batch.id)
        return batch if known is None else known[0].live(batch)

    async def _work(self) -> None:
        expire_at = 0.0
        while True:
            self._wake.clear()  # before the look: what changes during it asks for another one
            try:
                if self.clock() >= expire_at:
                    expire_at = self.clock() + EXPIRE_FILES_SECONDS
                    for id in await self._on_thread(self._store.expire_files, self.clock()):
                        await self._on_thread(self.contents.remove, id)
                await self._tick()
            except Exception:  # a batch that fails must not end the others
                logger.exception("the batches' background task failed and continues")
            timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._wake.set)
            try:
                await self._wake.wait()
            finally:
                timer.cancel()

    async def _tick(self) -> None:
        # 1. A server that shuts down continues its runs after the next start.
        if self._port.draining():
            await self._stop_runs(list(self._runs))
            return
        # 2. Stop runs whose batch was cancelled, has expired, or now runs in another class.
        batches = await self._on_thread(self._store.open_batches)
        now = self.clock()
        running = {id: run for id, (run, _) in self._runs.items()}
        outdated = [
            batch.id for batch in batches if batch.id in running and running[batch.id].outdated(batch, now)
        ]
        await self._stop_runs(outdated)
        # 3. Check the input files of new batches.
        resting = {id for id, until in self._rest_until.items() if until > now}
        new = [
            batch for batch in batches if batch.status is BatchStatus.VALIDATING and batch.id not in resting
        ]
        for batch in new:
            await self._guarded(batch, self._validate(batch))
        if outdated or new:  # runs may have ended meanwhile, and must not begin again
            batches = await self._on_thread(self._store.open_batches)
        # 4. Start what may run.
        for batch in _chosen(batches, self._runs, resting, now):
            run = Run(
                batch,
                self._store_change,
                self.contents,
                self._port,
                self._slots,
                self.bounds.concurrency,
                self.clock,
                self._full,
            )
            task = asyncio.get_running_loop().create_task(self._guarded(batch, run.finish()))
            self._runs[batch.id] = run, task
            task.add_done_callback(partial(self._run_ended, batch.id))

    async def _full(self, tenant: str) -> bool:
        """Whether a tenant's files, with the results that its batches have so far, have reached its limit."""
        _, stored = await self._on_thread(self._store.usage, tenant)
        return stored + sum(run.nbytes for run, _ in self._runs.values() if run.tenant == tenant) >= (
            self._limits.nbytes
        )

    def _run_ended(self, id: str, task: asyncio.Task[None]) -> None:
        known = self._runs.get(id)
        if known is not None and known[1] is task:
            del self._runs[id]
            self._wake.set()

    async def _stop_runs(self, ids: Iterable[str]) -> None:
        tasks = [self._runs[id][1] for id in ids if id in self._runs]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _guarded(self, batch: BatchRecord, work: Coroutine[object, object, None]) -> None:
        """Run ``work``; if it fails, retry the batch after `RETRY_SECONDS`."""
        try:
            await work
        except Exception:
            logger.exception("batch %s failed and is retried in %g s", batch.id, RETRY_SECONDS)
            self._rest_until[batch.id] = self.clock() + RETRY_SECONDS
        else:
            self._rest_until.pop(batch.id, None)

    async def _validate(self, batch: BatchRecord) -> None:
        """Check the input file, slice by slice, and accept or fail the batch."""
        if self.clock() >= batch.expires_at:
            await self._store_change(batch, lambda each: each.enter(BatchStatus.EXPIRED, self.clock()))
            return
        path = self.contents.path(batch.input_file_id)
        if not path.exists():
            lost = partial(
                BatchRecord.enter, status=BatchStatus.FAILED, now=self.clock(), errors=INPUT_MISSING
            )
            await self._store_change(batch, lost)
            return
        with path.open("rb") as file:
            check = Validation(
                file, batch.endpoint, max_lines=self.bounds.lines, max_line_bytes=self.bounds.line_bytes
            )
            while await self._on_thread(check.advance):
                await asyncio.sleep(0)

        def judged(each: BatchRecord) -> BatchRecord:
            if each.status is not BatchStatus.VALIDATING:  # it was cancelled meanwhile
                return each
            if check.errors:
                return each.enter(BatchStatus.FAILED, self.clock(), errors=tuple(check.errors))
            return each.enter(
                BatchStatus.IN_PROGRESS,
                self.clock(),
                total=check.lines,
                output_file_id=f"file-{secrets.token_hex(12)}",
                error_file_id=f"file-{secrets.token_hex(12)}",
            )

        await self._store_change(batch, judged)
        self._wake.set()

    async def _store_change(
        self,
        batch: BatchRecord,
        change: Callable[[BatchRecord], BatchRecord],
        files: Sequence[FileRecord] = (),
    ) -> BatchRecord:
        return await self._on_thread(self._store.change, batch.tenant, batch.id, change, tuple(files))

    async def _on_thread(self, function: Callable[..., ResultT], *values: object) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *values)


def _chosen(
    batches: Iterable[BatchRecord], running: Container[str], resting: Container[str], now: float
) -> list[BatchRecord]:
    """The batches to start: the oldest of each tenant without a running one, up to `RUNS`, and all that only end."""
    waiting = [batch for batch in batches if batch.status is not BatchStatus.VALIDATING]
    busy = {batch.tenant for batch in waiting if batch.id in running}
    count = sum(batch.id in running for batch in waiting)
    chosen = []
    for batch in waiting:
        ends = batch.status is not BatchStatus.IN_PROGRESS or now >= batch.expires_at
        if batch.id in running or batch.id in resting:
            continue
        if ends or (batch.tenant not in busy and count < RUNS):
            busy.add(batch.tenant)
            count += 1
            chosen.append(batch)
    return chosen
