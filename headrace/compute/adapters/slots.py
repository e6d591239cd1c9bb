"""The adapter of each slot of a runner, and those of a step's rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headrace.compute.adapters.store import AdapterStore
from headrace.compute.batch import Batch, Ints, adapter_tokens
from headrace.core.plan import StepPlan


class SlotAdapters:
    """The adapters of ``slots`` sequences, whose places on the device ``store`` knows; without a store there are none.

    `launched` is called for each plan in turn, on the thread that makes plans, and `begin` when its work begins.
    """

    def __init__(self, store: AdapterStore | None = None, slots: int = 0) -> None:
        self._store = store
        self._named = [""] * slots
        self._launched: deque[Sequence[Any]] = deque()
        self.of_rows: Sequence[Any] = ()
        """The prepared adapter of each row of the step that runs (None: it has none); empty if no row has one."""

    def launched(self, plan: StepPlan) -> None:
        """Find the adapters of a plan's rows, now: a place may be given away while the step is in flight."""
        if self._store is None:
            return
        for entry in plan.entries:
            self._named[entry.slot] = entry.adapter
        names = [self._named[row.slot] for row in plan.rows]
        prepared = {name: self._store.prepared(name) for name in set(names) if name}
        self._launched.append([prepared.get(name) for name in names] if prepared else ())

    def begin(self) -> None:
        """The work of the oldest launched plan begins."""
        if self._store is not None:
            self.of_rows = self._launched.popleft()

    def added(self, batch: Batch, lengths: Ints) -> Batch:
        """The batch of the step that runs with its adapters; ``lengths`` are those of its rows."""
        return replace(batch, adapters=adapter_tokens(self.of_rows, lengths)) if self.of_rows else batch
