"""Whatever is interrupted, and wherever, a batch ends with exactly one result of every line."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.api.batch import batches as module
from headrace.api.batch import runs
from headrace.api.batch.store import BatchRecord, BatchStore
from tests.api.batch.server import (
    LIMITS,
    Clock,
    FakePort,
    batches_in,
    begin,
    input_lines,
    results,
    until,
    when,
)

PROMPTS = ["a", "bad", "busy", "c", "bad2", "d", "e", "f"]


class Kill(NamedTuple):
    """The end of a process: at a change in the store, before or after it, or after some lines; ``torn`` bytes of one
    more result are in the output file then."""

    change: int | None
    before: bool
    lines: int
    torn: int


KILLS = st.lists(
    st.builds(
        Kill, st.none() | st.integers(1, 4), st.booleans(), st.integers(0, len(PROMPTS)), st.integers(0, 40)
    ),
    max_size=4,
)


class Killed(Exception):
    """The process is gone."""


def dying(kill: Kill | None, die: Callable[[], None]) -> Callable[..., Any]:
    """`BatchStore.change` of a process that dies at one of its changes."""
    change, changes = BatchStore.change, count(1)

    def changed(self: BatchStore, *values: Any) -> Any:
        fatal = kill is not None and kill.change is not None and next(changes) >= kill.change
        result = None if fatal and kill is not None and kill.before else change(self, *values)
        if fatal:
            die()
            raise Killed
        return result

    return changed


async def live(
    folder: Path, kill: Kill | None, clock: Clock, patch: pytest.MonkeyPatch
) -> BatchRecord | None:
    """One process's life; the batch where it ended."""
    port, killed = FakePort(), asyncio.Event()
    loop = asyncio.get_running_loop()
    patch.setattr(BatchStore, "change", dying(kill, lambda: loop.call_soon_threadsafe(killed.set)))
    batches = batches_in(folder, port, clock)
    batches.start()
    try:
        if not await batches.batches("t", limit=9, after=None):
            await begin(batches, input_lines(PROMPTS))
        ends = [asyncio.ensure_future(until(batches, "batch_0t", "completed"))]
        if kill is not None:
            lines = kill.lines if kill.change is None else 1 << 20
            ends.append(asyncio.ensure_future(killed.wait()))
            ends.append(asyncio.ensure_future(when(lambda: len(port.order) >= lines)))
        done, rest = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for each in rest:
            each.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        return ends[0].result() if ends[0] in done else None
    finally:
        await batches.stop()


def tear(folder: Path, size: int) -> None:
    """Leave the beginning of a result at the end of one output file that is being written."""
    store = BatchStore(folder / "batches.db", LIMITS)
    for batch in store.open_batches():
        path = folder / "contents" / batch.output_file_id
        if batch.output_file_id and path.exists() and size:
            with path.open("ab") as file:
                file.write(b'{"id": "batch_req_1", "custom_id": "r0", "response": null, "error"'[:size])
    store.close()


@given(KILLS)
@settings(max_examples=40)
def test_every_line_has_exactly_one_result(kills: list[Kill]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, clock, batch = Path(name), Clock(), None
        for kill in [*kills, None]:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(module, "TICK_SECONDS", 0.002)
                patch.setattr(runs, "FIRST_WAIT_SECONDS", 0.0)
                batch = asyncio.run(live(folder, kill, clock, patch))
            if kill is not None:
                tear(folder, kill.torn)
        assert batch is not None
        written = results(folder, batch.output_file_id) + results(folder, batch.error_file_id)
        assert Counter(each["custom_id"] for each in written) == {f"r{n}": 1 for n in range(len(PROMPTS))}
        assert (batch.total, batch.totals.completed, batch.totals.failed) == (8, 6, 2)
        stored = {path.name for path in (folder / "contents").iterdir()}
        assert stored == {batch.input_file_id, batch.output_file_id, batch.error_file_id}
